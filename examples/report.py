"""What the demo tells: what the ranks wrote in their journals, and the table made of it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

__all__ = ["Comparison", "Event", "Journals", "Training", "make_table", "make_times_table"]


@dataclass(frozen=True, slots=True)
class Event:
    """One line of a rank's journal; ``at`` is in seconds of the monotonic clock."""

    rank: int
    kind: str
    node: str
    at: float
    values: dict[str, Any]


@dataclass(slots=True)
class Training:
    """One run of the training: where its results lie, and what was seen of it."""

    tier: str
    results: Path
    ranks_on_node: int
    events: list[Event] = field(default_factory=list)
    lost_node: str = ""
    lost_at: float = 0.0

    @property
    def where(self) -> str:
        return "on disk" if self.tier == "disk" else "in memory"

    def of_kind(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]

    @property
    def loads(self) -> list[Event]:
        """The last of each rank, in rank order."""
        last = {event.rank: event for event in self.of_kind("load")}
        return [last[rank] for rank in sorted(last)]

    @property
    def resumed_at(self) -> int:
        """The iteration whose checkpoint was loaded."""
        return int(self.loads[0].values["iteration"])

    @property
    def reached(self) -> int:
        """The last iteration that any rank had finished when the node was lost."""
        first_load = min(event.at for event in self.of_kind("load"))
        return max(
            int(event.values["iteration"])
            for event in self.of_kind("iteration")
            if event.at < first_load
        )

    @property
    def back_after_s(self) -> float:
        """From SIGKILL until the first iteration after the restart was done."""
        first_load = min(event.at for event in self.loads)
        again = min(event.at for event in self.of_kind("iteration") if event.at > first_load)
        return again - self.lost_at


@dataclass(frozen=True, slots=True)
class Comparison:
    """How two trainings ended: the values looked at, and the names of those that differ."""

    nbytes: int
    values: int
    different: list[str]


@dataclass(frozen=True, slots=True)
class Resharded:
    """What came of a training that went on with another number of ranks."""

    iteration: int
    ranks: int
    is_equal: bool
    """Whether the ranks that went on had the state that was saved, bit for bit."""
    compared: int
    difference: float
    """The most by which the losses of iterations differ that were done before and after."""
    back_after_s: float

    @classmethod
    def of(cls, training: Training) -> Resharded:
        saved = {e.values["iteration"]: e.values["digest"] for e in training.of_kind("digest")}
        digests = {event.values["digest"] for event in training.loads}
        before: dict[int, float] = {}
        differences: dict[int, float] = {}
        for event in training.of_kind("iteration"):
            iteration, loss = event.values["iteration"], event.values["loss"]
            if event.at < training.loads[0].at:
                before[iteration] = loss
            elif iteration in before:
                differences[iteration] = abs(loss - before[iteration])
        iteration = training.resumed_at
        return cls(
            iteration=iteration,
            ranks=len(training.loads),
            is_equal=digests == {saved[iteration]},
            compared=len(differences),
            difference=max(differences.values(), default=0.0),
            back_after_s=training.back_after_s,
        )

    @property
    def is_good(self) -> bool:
        """Whether the state was that which was saved, and the losses the same but for rounding."""
        return self.is_equal and self.difference < 1e-3

    def __str__(self) -> str:
        equal = "bit for bit what was saved" if self.is_equal else "NOT what was saved"
        return (
            f"after a node was lost for good, {self.ranks} ranks went on after iteration "
            f"{self.iteration} with a state that is {equal}; {self.compared} losses that were "
            f"computed before and after differ by {self.difference:.1g} at most; SIGKILL to "
            f"training again {self.back_after_s:.1f} s"
        )


class Journals:
    """The journals of all ranks, read while they are written."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self._paths = [folder / f"rank{rank}.jsonl" for rank in range(ranks)]
        self._positions = [0] * ranks

    def read(self) -> list[Event]:
        """What has been written since the last call."""
        news = []
        for rank, path in enumerate(self._paths):
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._positions[rank])
                text = file.read()
            complete = text[: text.rfind(b"\n") + 1]
            self._positions[rank] += len(complete)
            for line in complete.splitlines():
                values = json.loads(line)
                kind, node, at = (values.pop(key) for key in ("event", "node", "at"))
                news.append(Event(rank, kind, node, at, values))
        return news


def make_table(trainings: list[Training], comparisons: list[Comparison]) -> Table:
    """One column for each training that lost a node."""
    table = Table(title="a node lost, a node replaced", title_style="bold")
    table.add_column("")
    for training in trainings:
        table.add_column(f"checkpoints {training.where}", justify="right")

    def row(name: str, cells: list[str]) -> None:
        table.add_row(name, *cells)

    row("a rank's shard", [f"{_nbytes(t) / 1e6:.1f} MB" for t in trainings])
    row("saves", [str(len({s.values["iteration"] for s in t.of_kind("save")})) for t in trainings])
    row("stall a save: median (most)", [_milliseconds(t, _stall) for t in trainings])
    row("behind training: copies made", [_milliseconds(t, _replication) for t in trainings])
    row("all kept, from the call", [_milliseconds(t, _durable) for t in trainings])
    table.add_section()
    row("node lost, with its store", [f"{t.lost_node}, iteration {t.reached}" for t in trainings])
    row("resumed after iteration", [str(t.resumed_at) for t in trainings])
    row("lost iterations", [str(t.reached - t.resumed_at) for t in trainings])
    row("SIGKILL to training again", [f"{t.back_after_s:.1f} s" for t in trainings])
    row("find_latest", [_most_s(t, "find_latest_s") for t in trainings])
    row("load", [_most_s(t, "seconds") for t in trainings])
    for rank in range(len(trainings[0].loads)):
        row(f"shard of rank {rank} came from", [_origin(t, rank) for t in trainings])
    table.add_section()
    row("values compared", [f"{c.values} ({c.nbytes / 1e6:.1f} MB)" for c in comparisons])
    verdicts = ["no" if c.different else "yes" for c in comparisons]
    row("recovered bit for bit", verdicts)
    return table


def make_times_table(seconds: dict[str, float]) -> Table:
    """How long it took until training went on, by the way in which the lost rank was replaced."""
    table = Table(title="SIGKILL to training again", title_style="bold")
    table.add_column("")
    table.add_column("seconds", justify="right")
    for way, took_s in seconds.items():
        table.add_row(way, f"{took_s:.1f}")
    return table


def _nbytes(training: Training) -> int:
    return max(int(event.values["nbytes"]) for event in training.of_kind("save"))


def _stall(save: dict[str, Any]) -> float:
    return float(save["stall_s"])


def _replication(save: dict[str, Any]) -> float:
    return float(save["replicate_s"])


def _durable(save: dict[str, Any]) -> float:
    return float(save["durable_s"])


def _milliseconds(training: Training, seconds: Callable[[dict[str, Any]], float]) -> str:
    saves = [event.values for event in training.of_kind("save")]
    # Of a save that was finalized when the next one had begun, little is told.
    times = [1e3 * seconds(save) for save in saves if save["replicate_s"] is not None]
    return f"{statistics.median(times):.1f} ({max(times):.1f}) ms"


def _most_s(training: Training, name: str) -> str:
    return f"{max(event.values[name] for event in training.loads):.3f} s"


def _origin(training: Training, rank: int) -> str:
    load = training.loads[rank]
    before = next(e.node for e in training.of_kind("iteration") if e.rank == rank)
    moved = f"on {load.node}" if load.node == before else f"{before} to {load.node}"
    return f"{load.values['source']} ({moved})"
