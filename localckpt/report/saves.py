"""Saves of one start of a job, put together from the events of its ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Literal, TypeAlias

from localckpt.events.event import Event, Tier
from localckpt.report.starts import Start, ended_at

__all__ = ["JobSave", "SaveOutcome", "saves_of"]

SaveOutcome: TypeAlias = Literal["ok", "failed", "skipped", "unfinished"]
"""How a save ended. ``unfinished``: it is under way, or was cut off."""


@dataclass(frozen=True, slots=True)
class JobSave:
    """One save of all ranks.

    Attributes:
        step: The step that was saved.
        is_shared: Whether it went to shared storage.
        outcome: How it ended; ``"ok"`` on one rank is so on all.
        tier: What it reached; ``None`` unless it is ``"ok"``.
        began: When the first rank began it, in seconds since 1970.
        ended: When it was durable on the last rank, or failed; ``None`` while it is unfinished.
        blocking_s: How long training waited for it, on the slowest rank.
        nbytes: Bytes of all ranks.
        error: Class and text of what it failed with; empty if it did not.
    """

    step: int
    is_shared: bool
    outcome: SaveOutcome
    tier: Tier | None
    began: float
    ended: float | None
    blocking_s: float
    nbytes: int
    error: str

    @property
    def throughput(self) -> float | None:
        """Bytes of all ranks per second, from its beginning until it was durable."""
        if self.ended is None or self.ended <= self.began:
            return None
        return self.nbytes / (self.ended - self.began)


def saves_of(start: Start) -> list[JobSave]:
    """All saves of a start, in the order in which they began."""
    # By the storage, the step, and how often the rank had saved that step before.
    by_save: dict[tuple[bool, int, int], list[Event]] = defaultdict(list)
    attempts: Counter[tuple[str, int, bool, int]] = Counter()
    for event in start.named("blocking", "save", "drain"):
        if event.step is not None:
            is_shared = event.tier == "shared"
            known = event.name, event.rank, is_shared, event.step
            by_save[is_shared, event.step, attempts[known]].append(event)
            attempts[known] += 1
    saves = [_merged(step, is_shared, of) for (is_shared, step, _), of in by_save.items()]
    return sorted(saves, key=lambda save: (save.began, save.step))


def _merged(step: int, is_shared: bool, events: list[Event]) -> JobSave:
    blocking = [event for event in events if event.name == "blocking"]
    # A drain to shared storage is a save that training does not wait for.
    ends = [event for event in events if event.name in ("save", "drain")]
    outcomes = {event.outcome for event in ends}
    outcome: SaveOutcome = "unfinished"
    for possible in ("skipped", "failed", "ok"):
        if possible in outcomes:
            outcome = possible
    counted = [event for event in ends if event.outcome == outcome]
    errors = [f"{e.error_class}: {e.details.get('error', '')}" for e in counted if e.error_class]
    return JobSave(
        step=step,
        is_shared=is_shared,
        outcome=outcome,
        tier=next((e.tier for e in counted if e.tier), None) if outcome == "ok" else None,
        began=min(event.start for event in events),
        ended=max(map(ended_at, counted)) if counted else None,
        blocking_s=max((event.duration for event in blocking), default=0.0),
        nbytes=sum(event.nbytes or 0 for event in counted or blocking),
        error=errors[0] if errors else "",
    )
