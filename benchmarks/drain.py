"""Training time that is lost while a checkpoint goes to shared storage: drained, or saved there.

One rank, each way in a process of its own, in turn, as in ``peers``: a drain of what the node has,
the same at a bounded rate, a save of ours, and the asynchronous saves of others. What the save on
the node costs, which a drain needs before it, is in ``save`` and ``peers``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from benchmarks.loops import LOOPS
from benchmarks.peers.catalogue import DRAIN_PEERS, OURS_DRAIN, OURS_GLOBAL
from benchmarks.peers.report import PeersReport
from benchmarks.peers.section import take_turns
from benchmarks.report import Report
from benchmarks.setup import Options

__all__ = ["measure"]

_BUDGET_S = 1200.0


def measure(options: Options) -> Report:
    """As many rounds as asked for and as the time allows, at least one."""
    report = _DrainReport("drain", options.state)
    # The first one once more after the others, so that a machine that slows down is seen.
    take_turns(report, [*DRAIN_PEERS, OURS_DRAIN], options, _BUDGET_S)
    report.judge()
    return report


@dataclass(slots=True)
class _DrainReport(PeersReport):
    ours: ClassVar[str] = OURS_DRAIN

    def judge(self) -> None:
        """Tell the time that each way takes from training, for each GB that it writes."""
        for loop in LOOPS:
            for name, lost_s in self._medians(f"lost, {loop}").items():
                gigabytes = self.peers[name].nbytes / 1e9
                note = f"stall {1e3 * self._medians(f'stall, {loop}')[name]:.1f} ms"
                self.fact(f"lost for a GB, {loop}: {name}", 1e3 * lost_s / gigabytes, "ms", note)
        for loop in LOOPS:
            lost = self._medians(f"lost, {loop}")
            if OURS_DRAIN in lost and OURS_GLOBAL in lost:
                ratio = lost[OURS_DRAIN] / lost[OURS_GLOBAL]
                self.fact(f"lost, {loop}, of a save of ours to shared storage", ratio, "")
            if OURS_DRAIN in lost:
                self._against_best(f"lost, {loop}")
                self._against_best(f"stall, {loop}")
