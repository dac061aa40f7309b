"""A job on paper: the events that its ranks would leave, and what is known of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from localckpt.events.event import LOST, Event, Name

__all__ = ["STEP_S", "PaperJob"]

STEP_S = 2.0
"""Duration of a step."""


@dataclass
class PaperJob:
    """A job of some ranks that trains, saves and dies as it is told."""

    ranks: int = 1
    at: float = 1000.0  # seconds since 1970
    saved: int = -1  # step of the newest checkpoint
    done: int = -1  # last step
    events: list[Event] = field(default_factory=list)
    starts: int = 0
    _numbers: Any = field(default_factory=count)

    def start(self, down_s: float = 0.0, split: Sequence[float] = (1, 2, 3, 4, 5)) -> None:
        """Start again, and resume from the newest checkpoint."""
        self.at += down_s
        self.starts += 1
        began, self.done = self.at, self.saved
        names: Sequence[Name] = ("start", "meet", "find", "fetch", "read")
        self._emit("run_began", at=began + split[0], **self._who(began))
        for name, seconds in zip(names, split, strict=True):
            self._emit(name, seconds)
            self.at += seconds
        details = {f"{name}_s": float(s) for name, s in zip(names, split, strict=True)}
        details |= {"job_run": f"job {self.starts}"}
        self._emit("resume", self.at - began, began, step=self.saved, tier="local", **details)

    def fail_to_start(self, seconds: float) -> None:
        """Start again, and die before anything is resumed."""
        self.starts += 1
        self._emit("run_began", **self._who(self.at))
        self._emit("start", seconds)
        self.at += seconds

    def train(self, steps: int) -> None:
        """Do some steps; each is noted."""
        for _ in range(steps):
            self.at += STEP_S
            self.done += 1
            self._emit("steps", step=self.done)

    def save(self, blocking_s: float = 0.5, outcome: Any = "ok", **fields: Any) -> None:
        """Save the last step; training waits, and the save is over at once."""
        for rank in range(self.ranks):
            # The last rank is the one that training waits for.
            slower = blocking_s * (rank + 1) / self.ranks
            self._add("blocking", rank, self.at, slower, step=self.done)
        self.at += blocking_s
        if outcome is not None:
            self._emit("save", step=self.done, outcome=outcome, nbytes=100, **fields)
        if outcome == "ok":
            self.saved = self.done

    def end(self, outcome: Any = "ok", **fields: Any) -> None:
        self._emit("run_ended", step=self.done, outcome=outcome, **fields)

    def note(self, name: Name, seconds: float = 0.0, **fields: Any) -> None:
        self._emit(name, seconds, **fields)
        self.at += seconds

    def _who(self, began: float) -> dict[str, Any]:
        return {"session": "run", "world_size": self.ranks, "process_start": began}

    def _emit(self, name: Name, seconds: float = 0.0, at: float | None = None, **told: Any) -> None:
        for rank in range(self.ranks):
            self._add(name, rank, self.at if at is None else at, seconds, **told)

    def _add(self, name: Name, rank: int, at: float, seconds: float, **told: Any) -> None:
        known = ("step", "tier", "outcome", "nbytes", "error_class")
        fields = {key: told.pop(key) for key in known if key in told}
        self.events.append(
            Event(
                *(name, at, rank, "node", f"start {self.starts} rank {rank}", next(self._numbers)),
                duration=seconds,
                is_lost=name in LOST,
                details=told,
                **fields,
            )
        )
