"""Checkpoints of torch.distributed.checkpoint's format: ours, torch's own ways, NVRx's writer.

One rank, each way in a process of its own, in turn, as in ``peers``. Every save has new files; the
old ones are removed, and the disk is let come to rest, before the next is timed. What planning
costs at more ranks is in ``global-planning``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from benchmarks.peers.catalogue import GLOBAL_PEERS, OURS_GLOBAL
from benchmarks.peers.report import PeersReport
from benchmarks.peers.section import take_turns
from benchmarks.report import Report
from benchmarks.setup import Options

__all__ = ["measure"]

_BUDGET_S = 1200.0


def measure(options: Options) -> Report:
    """As many rounds as asked for and as the time allows, at least one."""
    report = _GlobalReport("global", options.state)
    take_turns(report, GLOBAL_PEERS, options, _BUDGET_S, with_loops=False, at_rest=True)
    report.judge()
    return report


@dataclass(slots=True)
class _GlobalReport(PeersReport):
    ours: ClassVar[str] = OURS_GLOBAL

    def judge(self) -> None:
        """Hold ours against the goals."""
        if self.ours not in self.peers:
            return
        self._against_limit("stall", "one flat memcpy")
        self._against_peer("stall", "DCP async_save, thread", 0.5)
        self._against_best("stall", 1.0)
        self._against_limit("durable", "memcpy + O_DIRECT write")
        self._against_peer("durable", "DCP save", 0.6)
        self._against_best("durable")
        for load in ("load, cold", "load, warm"):
            self._against_limit(load, "raw read")
            self._against_best(load)

    def _against_peer(self, metric: str, peer: str, target: float) -> None:
        told = self._medians(metric)
        if peer in told:
            self.fact(f"{metric}, of {peer}'s", told[self.ours] / told[peer], "", target=target)
