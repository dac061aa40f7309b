"""The manager that keeps checkpoints in shared memory, beside a copy of the same bytes."""

from __future__ import annotations

import time

import localckpt
from benchmarks.report import Report, compare
from benchmarks.setup import Options, Saver, closing_all, make_setting

__all__ = ["measure"]


def measure(options: Options) -> Report:
    """Stall, commit and both ways to load, each beside one memcpy."""
    report = Report("in-memory", options.state)
    setting = make_setting(options)
    saver = Saver(
        localckpt.InMemoryCheckpointManager(root=options.directory / "shm"), setting.state
    )
    copy = "memcpy, 1 thread"
    stall = report.compared("stall of save", copy, setting.nbytes, 1.3)
    commit = report.compared("committed, from the call", copy, setting.nbytes)

    def load_s(into: bool) -> float:
        saver.manager.find_latest()
        began = time.perf_counter()
        loaded = saver.manager.load(into=setting.state) if into else saver.manager.load()
        seconds = time.perf_counter() - began
        del loaded
        return seconds

    with closing_all([saver]):
        saver.warm_up()
        for _ in range(options.rounds):
            copy_s = setting.copy_in_s()
            stall.add(copy_s, saver.start())
            commit.add(copy_s, saver.finish())
        compare(
            options.rounds,
            setting.copy_out_s,
            [
                (report.compared("load(into=state)", copy, setting.nbytes), lambda: load_s(True)),
                (report.compared("load()", copy, setting.nbytes), lambda: load_s(False)),
            ],
        )
    return report
