"""Training time that one save costs, by who writes behind training: a thread or a process."""

from __future__ import annotations

from statistics import median

from benchmarks.loops import LOOPS, Lost, lost_in, running
from benchmarks.peers.ours import OursProcess, OursThread
from benchmarks.report import Report
from benchmarks.setup import Options
from benchmarks.state import build_state

__all__ = ["measure"]

_WARM_UP_SAVES = 4


def measure(options: Options) -> Report:
    """Each loop alone and with a save behind it, in turn, for both async workers."""
    report = Report("async")
    state = build_state(options.width)
    savers = [
        OursThread(options.directory / "thread", state),
        OursProcess(options.directory / "process", state),
    ]
    try:
        for saver in savers:
            for _ in range(_WARM_UP_SAVES):
                saver.start()
                saver.finish()
        for name, loop in LOOPS.items():
            lost: dict[str, list[Lost]] = {saver.worker: [] for saver in savers}
            with running(loop) as (step, steps):
                for _ in range(2 * options.rounds):
                    for saver in savers:
                        lost[saver.worker].append(lost_in(step, steps, saver))
            for worker, samples in lost.items():
                _tell(report, f"{name}, {worker}", samples)
    finally:
        for saver in savers:
            saver.close()
    return report


def _tell(report: Report, name: str, samples: list[Lost]) -> None:
    lost = [sample.lost_s * 1e3 for sample in samples]
    stall = median(sample.stall_s for sample in samples) * 1e3
    note = f"{min(lost):.0f} to {max(lost):.0f} over {len(lost)} pairs; of it stall {stall:.0f} ms"
    report.fact(f"lost per save, {name}", median(lost), "ms", note, target=1.5 * stall)
