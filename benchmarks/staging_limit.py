"""Saves in a part of the memory that their images take, beside a raw write of what does not fit.

Training waits until the disk has taken all but what fits into the memory; the rest goes behind it.
"""

from __future__ import annotations

import localckpt
from benchmarks.limits import RecycledFile
from benchmarks.report import Report
from benchmarks.setup import Options, Saver, closing_all, make_setting

__all__ = ["measure"]

_PARTS = (1 / 8, 1 / 4, 1 / 2)
_WRITE = "O_DIRECT write + fsync"


def measure(options: Options) -> Report:
    setting = make_setting(options)
    report = Report("staging-limit")
    file = RecycledFile(options.directory / "limit", setting.buffer)
    savers = [
        Saver(
            localckpt.LocalCheckpointManager(
                options.directory / str(place), staging_limit=int(setting.nbytes * part)
            ),
            setting.state,
        )
        for place, part in enumerate(_PARTS)
    ]
    with closing_all(savers):
        for saver in savers:
            saver.warm_up()
        rows = [
            (
                saver,
                1 - part,
                report.compared(
                    f"stall in {part:.0%}", f"{1 - part:.0%} of {_WRITE}", setting.nbytes
                ),
                report.compared(f"durable in {part:.0%}", _WRITE, setting.nbytes),
            )
            for saver, part in zip(savers, _PARTS, strict=True)
        ]
        for _ in range(options.rounds):
            for saver, waited_for, stall, durable in rows:
                write_s = file.write_s()
                stall.add(waited_for * write_s, saver.start())
                durable.add(write_s, saver.finish())
    return report
