"""Training time that one save costs, which a thread writes behind training."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from statistics import median

from benchmarks.limits import RecycledFile
from benchmarks.loops import LOOPS, Lost, lost_in, running
from benchmarks.peers.ours import OursThread
from benchmarks.report import Report
from benchmarks.setup import Options, make_setting

__all__ = ["measure"]

_WARM_UP_SAVES = 4


def measure(options: Options) -> Report:
    """Each loop alone and with a save behind it, in turn, and with the limit."""
    report = Report("async")
    setting = make_setting(options)
    state = setting.state
    raw = _RawWrite(RecycledFile(options.directory / "limit", setting.buffer))
    saver = OursThread(options.directory / "ours", state)
    try:
        for _ in range(_WARM_UP_SAVES):
            saver.start()
            saver.finish()
        for name, loop in LOOPS.items():
            lost: list[Lost] = []
            to_raw_write: list[float] = []
            with running(loop) as (step, steps):
                for _ in range(2 * options.rounds):
                    lost.append(lost_in(step, steps, saver))
                    to_raw_write.append(lost_in(step, steps, raw).lost_s)
            report.fact(f"lost to a raw write, {name}", median(to_raw_write) * 1e3, "ms")
            _tell(report, name, lost)
    finally:
        saver.close()
        raw.close()
    return report


class _RawWrite:
    """What of the loss is the disk's: as many bytes written by one thread, and nothing else."""

    def __init__(self, file: RecycledFile) -> None:
        self._file = file
        self._pool = ThreadPoolExecutor(1)
        self._writing: Future[float] | None = None

    def start(self) -> None:
        self._writing = self._pool.submit(self._file.write_s)

    def done(self) -> bool:
        return self._writing is not None and self._writing.done()

    def finish(self) -> None:
        if self._writing is not None:
            self._writing.result()

    def close(self) -> None:
        self._pool.shutdown()
        self._file.close()


def _tell(report: Report, name: str, samples: list[Lost]) -> None:
    lost = [sample.lost_s * 1e3 for sample in samples]
    stall = median(sample.stall_s for sample in samples) * 1e3
    note = f"{min(lost):.0f} to {max(lost):.0f} over {len(lost)} pairs; of it stall {stall:.0f} ms"
    report.fact(f"lost per save, {name}", median(lost), "ms", note, target=1.5 * stall)
