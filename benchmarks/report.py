"""Samples, the ratios between them, and how both are shown and kept.

A ratio is taken between neighbours, one sample of ours and the sample of the limit right before it,
and the median of those ratios is what is told: a machine that slows down slows down both.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.state import KINDS

__all__ = ["Comparison", "Fact", "Report", "compare", "describe_machine"]

RESULTS = Path(__file__).parent / "results"


@dataclass(slots=True)
class Comparison:
    """Seconds of one thing beside seconds of its limit, pair by pair."""

    name: str
    limit_name: str
    nbytes: int
    target: float | None = None
    """The largest ratio that is good; ``None`` where something is only shown for comparison."""
    limit_s: list[float] = field(default_factory=list)
    ours_s: list[float] = field(default_factory=list)

    def add(self, limit_s: float, ours_s: float) -> None:
        self.limit_s.append(limit_s)
        self.ours_s.append(ours_s)

    @property
    def ratio(self) -> float:
        """Median over the pairs; above 1 is slower than the limit."""
        return median(o / limit for o, limit in zip(self.ours_s, self.limit_s, strict=True))


@dataclass(frozen=True, slots=True)
class Fact:
    """One figure that is no time beside a limit."""

    name: str
    value: float
    unit: str
    note: str = ""
    target: float | None = None
    """The largest value that is good."""

    @property
    def goal(self) -> str:
        return _goal(self.value, self.target)


@dataclass(slots=True)
class Report:
    """Everything that one section measured."""

    section: str
    state: str = "gpt2"
    comparisons: list[Comparison] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)

    def compared(
        self, name: str, limit_name: str, nbytes: int, target: float | None = None
    ) -> Comparison:
        """A new comparison, shown in the order of these calls."""
        self.comparisons.append(Comparison(name, limit_name, nbytes, target))
        return self.comparisons[-1]

    def fact(
        self, name: str, value: float, unit: str, note: str = "", target: float | None = None
    ) -> None:
        self.facts.append(Fact(name, value, unit, note, target))

    def show(self, console: Console) -> None:
        if self.comparisons:
            console.print(self._comparison_table())
        if self.facts:
            console.print(self._fact_table())

    def save(self, directory: Path) -> Path:
        """Write all samples, with the machine they were taken on."""
        RESULTS.mkdir(exist_ok=True)
        when = time.strftime("%Y%m%d-%H%M%S")
        path = RESULTS / f"{self.section}-{when}.json"
        content = {"machine": describe_machine(directory)} | self.content()
        path.write_text(json.dumps(content, indent=1) + "\n")
        return path

    def content(self) -> dict[str, Any]:
        """What :meth:`save` keeps of the measurement."""
        return {
            "section": self.section,
            "state": self.state,
            "comparisons": [asdict(c) | {"ratio": c.ratio} for c in self.comparisons],
            "facts": [asdict(f) for f in self.facts],
        }

    def _comparison_table(self) -> Table:
        table = Table(title=f"{self.section}, {KINDS[self.state]}", title_justify="left")
        for column in ("what", "limit"):
            table.add_column(column)
        for column in ("GB", "pairs", "ms", "spread", "GB/s", "limit ms", "ratio", "goal"):
            table.add_column(column, justify="right")
        for c in self.comparisons:
            ours, limit = median(c.ours_s), median(c.limit_s)
            table.add_row(
                *(c.name, c.limit_name, f"{c.nbytes / 1e9:.2f}", str(len(c.ours_s))),
                *(f"{ours * 1e3:.0f}", f"{min(c.ours_s) * 1e3:.0f}-{max(c.ours_s) * 1e3:.0f}"),
                *(
                    f"{c.nbytes / 1e9 / ours:.1f}",
                    f"{limit * 1e3:.0f}",
                    f"{c.ratio:.2f}",
                    _goal(c.ratio, c.target),
                ),
            )
        return table

    def _fact_table(self) -> Table:
        table = Table(title=None if self.comparisons else self.section, title_justify="left")
        table.add_column("figure")
        table.add_column("value", justify="right")
        for column in ("unit", "goal", "note"):
            table.add_column(column)
        for fact in self.facts:
            table.add_row(fact.name, f"{fact.value:.4g}", fact.unit, fact.goal, fact.note)
        return table


def compare(
    rounds: int, limit: Callable[[], float], arms: list[tuple[Comparison, Callable[[], float]]]
) -> None:
    """Take samples limit, arm, limit, next arm, ... so that each has its own neighbour.

    Each function gives back the seconds that it measured itself.
    """
    for _ in range(rounds):
        for comparison, arm in arms:
            comparison.add(limit(), arm())


def _goal(value: float, target: float | None) -> str:
    if target is None:
        return ""
    return f"{target:.3g} {'met' if value <= target else 'missed'}"


def describe_machine(directory: Path) -> dict[str, Any]:
    """What a reader needs to know to compare figures of two machines."""
    huge_pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "kernel": platform.release(),
        "huge_pages": huge_pages.read_text().strip() if huge_pages.exists() else "none",
        "file_system": _file_system(directory),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpu": gpu,
        "load_average": os.getloadavg()[0],
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _file_system(directory: Path) -> str:
    inside = [
        part
        for part in psutil.disk_partitions(all=True)
        if directory.resolve().is_relative_to(part.mountpoint)
    ]
    part = max(inside, key=lambda part: len(part.mountpoint))
    return f"{part.fstype} ({part.device})"
