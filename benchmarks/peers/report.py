"""One row for each way to save, and how ours does against the limit and the best of the others."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, ClassVar

from rich.console import Console
from rich.table import Table

from benchmarks.loops import LOOPS
from benchmarks.peers.catalogue import OURS
from benchmarks.peers.child import Samples
from benchmarks.report import Report
from benchmarks.state import KINDS

__all__ = ["PeersReport"]

_SHOWN = {
    "first stall": "first stall",
    "stall": "later stalls",
    "durable": "durable",
    "load, cold": "load, cold",
    "load, warm": "load, warm",
    **{f"lost, {loop}": f"lost: {loop}" for loop in LOOPS},
}
_STALL_GOAL = {"gpt2": 1.15, "small": 2.0, "one": 1.15}
# A loop that lost nothing may seem to have gained; nothing is compared with fewer seconds.
_NOISE = 1e-3


@dataclass(slots=True)
class PeersReport(Report):
    """Samples of all rounds by peer, and why some have none."""

    peers: dict[str, Samples] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    ours: ClassVar[str] = OURS

    def add(self, name: str, samples: Samples) -> None:
        """Put another round's samples to those of the rounds before."""
        kept = self.peers.setdefault(name, samples)
        if kept is samples:
            return
        for metric, seconds in samples.seconds.items():
            kept.seconds.setdefault(metric, []).extend(seconds)
        for metric, seconds in samples.limits.items():
            kept.limits.setdefault(metric, []).extend(seconds)
        kept.extra_bytes += samples.extra_bytes

    def judge(self) -> None:
        """Hold ours, with a thread, against the goals."""
        if self.ours not in self.peers:
            return
        ours = self.peers[self.ours]
        self._against_limit("stall", "one flat memcpy", _STALL_GOAL[self.state])
        self._against_limit("durable", "memcpy + O_DIRECT write", 1.15)
        for load in ("load, cold", "load, warm"):
            self._against_limit(load, "raw read", 1.25)
        first = _seconds(ours, "first stall") / _seconds(ours, "stall")
        self.fact("first stall, of the later ones", first, "", target=1.5)
        for metric in ("stall", "durable", "load, cold", "load, warm"):
            self._against_best(metric, 0.5 if metric == "durable" else 1.0)
        for loop in LOOPS:
            lost = _seconds(ours, f"lost, {loop}") / _seconds(ours, f"stall, {loop}")
            self.fact(f"lost, {loop}, of its own stall", lost, "", target=1.5)
            self._against_best(f"lost, {loop}", 1.0)

    def show(self, console: Console) -> None:
        console.print(self._peers_table())
        for name, samples in self.peers.items():
            console.print(f"{name}: {samples.note}", markup=False, highlight=False)
        for name, reason in self.missing.items():
            console.print(f"not measured: {name}: {reason}", markup=False)
        Report.show(self, console)

    def content(self) -> dict[str, Any]:
        return Report.content(self) | {
            "peers": {name: asdict(samples) for name, samples in self.peers.items()},
            "missing": self.missing,
        }

    def _against_limit(self, metric: str, limit: str, target: float | None = None) -> None:
        ours = self.peers[self.ours]
        self.fact(f"{metric}, of {limit}", _ratio(ours, metric), "", target=target)

    def _against_best(self, metric: str, target: float | None = None) -> None:
        """In seconds: the limit right after a save is slowed by what that save left to do."""
        told = self._medians(metric)
        others = {name: figure for name, figure in told.items() if not name.startswith("localckpt")}
        if others:
            best = min(others, key=others.__getitem__)
            figure = told[self.ours] / max(others[best], _NOISE)
            self.fact(f"{metric}, of the best peer's", figure, "", f"best: {best}", target)

    def _medians(self, metric: str) -> dict[str, float]:
        return {
            name: _seconds(samples, metric)
            for name, samples in self.peers.items()
            if metric in samples.seconds
        }

    def _peers_table(self) -> Table:
        title = f"{self.section}, {KINDS[self.state]}: ms (ratio to the limit measured before)"
        table = Table(title=title, title_justify="left")
        table.add_column("", no_wrap=True)
        shown = {metric: title for metric, title in _SHOWN.items() if self._medians(metric)}
        for column in (*shown.values(), "extra GB"):
            table.add_column(column, justify="right")
        table.add_column("load into")
        for name, samples in self.peers.items():
            peak = f"{max(samples.extra_bytes) / 1e9:.1f}" if samples.extra_bytes else ""
            where = "place" if samples.in_place else "new"
            cells = (_cell(samples, metric) for metric in shown)
            table.add_row(name, *cells, peak, where)
        if self.ours in self.peers:
            limits = self.peers[self.ours].limits
            cells = (f"{median(limits[m]) * 1e3:.0f}" if m in limits else "" for m in shown)
            table.add_row("limit beside the first", *cells, "", "")
        return table


def _seconds(samples: Samples, metric: str) -> float:
    return median(samples.seconds[metric])


def _ratio(samples: Samples, metric: str) -> float:
    pairs = zip(samples.seconds[metric], samples.limits[metric], strict=True)
    return median(seconds / limit for seconds, limit in pairs)


def _cell(samples: Samples, metric: str) -> str:
    if metric not in samples.seconds:
        return ""
    shown = f"{_seconds(samples, metric) * 1e3:.0f}"
    return f"{shown} ({_ratio(samples, metric):.2f})" if metric in samples.limits else shown
