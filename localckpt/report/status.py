"""Status of a job that runs: how far it is, and how much of that is safe where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from localckpt.report.account import degraded_since
from localckpt.report.saves import JobSave, saves_of
from localckpt.report.starts import Start, ended_at

__all__ = ["Status", "status_of"]

_RECENT_S = 60.0
"""Time over which the speed of training is taken."""


@dataclass(frozen=True, slots=True)
class Status:
    """Status of the last start of a job.

    Attributes:
        number: Number of the start, from 1.
        start: The start.
        saves: Its saves, in the order in which they began.
        on_nodes: The newest complete save to the nodes; ``None`` for none.
        on_other_nodes: The newest one of which the nodes have copies on others.
        on_shared: The newest one on shared storage.
        steps_per_s: Speed of training in its last minute; ``None`` if it is not known.
        last_heard: When each rank was last heard of, in seconds since 1970.
        degraded_since: Since when the newest checkpoint has fewer copies than asked for; ``None``
            if it has all.
    """

    number: int
    start: Start
    saves: tuple[JobSave, ...]
    on_nodes: JobSave | None
    on_other_nodes: JobSave | None
    on_shared: JobSave | None
    steps_per_s: float | None
    last_heard: dict[int, float]
    degraded_since: float | None

    @property
    def failed(self) -> tuple[JobSave, ...]:
        """Saves that failed."""
        return tuple(save for save in self.saves if save.outcome == "failed")

    def to_json(self) -> dict[str, Any]:
        """Plain data; keys are only ever added."""
        levels = (self.on_nodes, self.on_other_nodes, self.on_shared)
        names = ("nodes", "other_nodes", "shared")
        return {
            "start": self.number,
            "ending": self.start.ending,
            "world_size": self.start.world_size,
            "began": self.start.began,
            "resumed_step": self.start.resumed_step,
            "last_step": self.start.last_step,
            "steps_per_s": self.steps_per_s,
            "newest": {
                name: None if save is None else _to_json(save)
                for name, save in zip(names, levels, strict=True)
            },
            "saves": [_to_json(save) for save in self.saves],
            "degraded_since": self.degraded_since,
            "last_heard": {str(rank): at for rank, at in self.last_heard.items()},
        }


def status_of(starts: Sequence[Start]) -> Status:
    """Status of a job.

    Args:
        starts: Its starts, in the order in which they began; at least one.
    """
    start = starts[-1]
    saves = tuple(saves_of(start))
    ok = [save for save in saves if save.outcome == "ok"]
    on_nodes = [save for save in ok if not save.is_shared]
    return Status(
        number=len(starts),
        start=start,
        saves=saves,
        on_nodes=_newest(on_nodes),
        on_other_nodes=_newest([save for save in on_nodes if save.tier == "replicated"]),
        on_shared=_newest([save for save in ok if save.is_shared]),
        steps_per_s=_speed(start),
        last_heard={r: max(map(ended_at, events)) for r, events in sorted(start.ranks.items())},
        degraded_since=degraded_since(start),
    )


def _newest(saves: Sequence[JobSave]) -> JobSave | None:
    return max(saves, key=lambda save: save.step, default=None)


def _speed(start: Start) -> float | None:
    """Steps per second between the last notes."""
    marks = start.marks
    recent = [mark for mark in marks if mark[1] >= marks[-1][1] - _RECENT_S]
    if len(recent) < 2 or recent[-1][1] <= recent[0][1]:
        return None
    return (recent[-1][0] - recent[0][0]) / (recent[-1][1] - recent[0][1])


def _to_json(save: JobSave) -> dict[str, Any]:
    return {**asdict(save), "bytes_per_s": save.throughput}
