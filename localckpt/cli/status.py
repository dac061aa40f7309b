"""Status of a start of a job: how far it is, and which of its checkpoints are safe where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from localckpt.cli.account import degraded_since
from localckpt.cli.output import age, counted, duration, size, table_lines
from localckpt.cli.starts import JobSave, Start, ended_at, saves_of
from localckpt.failure_texts import ranks_named

_MOST_SAVES = 8
# Ranks note something every 2 seconds; a rank this far behind the others does not.
_SILENT_S = 30.0
# Time over which the speed of training is taken.
_RECENT_S = 60.0


@dataclass(frozen=True, slots=True)
class Status:
    """Status of the last start of a job, and when each rank was last heard of.

    ``on_other_nodes`` is the newest save of which the nodes have copies on others; from
    ``degraded_since`` on the newest checkpoint has fewer copies than asked for.
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
        return tuple(save for save in self.saves if save.outcome == "failed")

    def to_json(self) -> dict[str, Any]:
        """Plain data; keys are only ever added."""
        newest = (self.on_nodes, self.on_other_nodes, self.on_shared)
        return {
            "steps_per_s": self.steps_per_s,
            "newest": {
                name: None if save is None else _to_json(save)
                for name, save in zip(("nodes", "other_nodes", "shared"), newest, strict=True)
            },
            "saves": [_to_json(save) for save in self.saves],
            "degraded_since": self.degraded_since,
            "last_heard": {str(rank): at for rank, at in self.last_heard.items()},
        }

    def lines(self) -> list[str]:
        """Describe a start that has no end, for people."""
        step = self.start.last_step
        speed = "" if self.steps_per_s is None else f", {self.steps_per_s:.3g} steps/s"
        state = "is restarting" if step is None else f"is at step {step}{speed}"
        return [
            f"Start {self.number} {state}; last heard of {age(self.start.ended)} ago.",
            "",
            *self._newest_lines(),
            *self._save_lines(),
            *self._warnings(),
        ]

    def _newest_lines(self) -> list[str]:
        """A line for each place where checkpoints are: the newest one there."""
        places = {
            "the nodes": self.on_nodes,
            "other nodes": self.on_other_nodes,
            "shared storage": self.on_shared,
        }
        rows = []
        for place, save in places.items():
            if save is None or save.ended is None:
                rows.append((place, "-", "-", "-"))
            else:
                behind = (self.start.last_step or 0) - save.step
                rows.append((place, str(save.step), age(save.ended), counted(behind, "step")))
        names = ("newest on", "step", "age", "behind")
        return table_lines(names, rows, right=names[1:])

    def _save_lines(self) -> list[str]:
        recent = [save for save in self.saves if save.outcome != "skipped"][-_MOST_SAVES:]
        if not recent:
            return []
        names = ("save", "to", "size", "waited", "durable in", "per second", "")
        rows = [
            (
                str(save.step),
                "shared storage" if save.is_shared else "the nodes",
                size(save.nbytes),
                duration(save.blocking_s),
                "-" if save.ended is None else duration(save.ended - save.began),
                "-" if save.throughput is None else size(int(save.throughput)),
                _outcome(save),
            )
            for save in reversed(recent)
        ]
        return ["", *table_lines(names, rows, right=[*names[:1], *names[2:-1]])]

    def _warnings(self) -> list[str]:
        lines = []
        if self.failed:
            last = self.failed[-1]
            lines.append(
                f"{counted(len(self.failed), 'save')} failed, the last of step {last.step}: "
                f"{last.error}"
            )
        if self.degraded_since is not None:
            lines.append(f"fewer copies than asked for, for {age(self.degraded_since)}")
        newest = max(self.last_heard.values())
        if silent := [rank for rank, at in self.last_heard.items() if at < newest - _SILENT_S]:
            oldest = min(self.last_heard.values())
            lines.append(f"{ranks_named(silent)} not heard of for up to {age(oldest)}")
        return ["", *lines] if lines else []


def status_of(starts: Sequence[Start]) -> Status:
    """Status of a job, from its starts in the order in which they began; at least one."""
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


def _outcome(save: JobSave) -> str:
    if save.outcome == "unfinished":
        return "under way"
    return save.outcome if save.outcome == "failed" else save.tier or "ok"
