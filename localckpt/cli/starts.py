"""Starts of a job and their saves, put together from the events of its ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

from localckpt.events.event import Event, Tier

Ending: TypeAlias = Literal["ok", "stopped", "failed", "killed", "open"]
"""How a start ended. ``killed``: some rank has recorded no end, and a later start follows.
``open``: the same of the last start, which may still run."""


def ended_at(event: Event) -> float:
    """Return the time of an event's end, in seconds since 1970."""
    return event.start + event.duration


@dataclass(frozen=True)
class Start:
    """One start of a job: the runs of its ranks that resumed together, in order of their events."""

    ranks: Mapping[int, Sequence[Event]]
    is_last: bool

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """Events of all ranks, in the order in which they began."""
        every = [event for events in self.ranks.values() for event in events]
        return tuple(sorted(every, key=lambda event: (event.start, event.rank, event.number)))

    @cached_property
    def resumed_step(self) -> int | None:
        """Step that it resumed from, -1 for the beginning; ``None`` if it never came so far."""
        steps = [e.step for e in self.named("resume") if e.outcome == "ok" and e.step is not None]
        return max(steps, default=None)

    @cached_property
    def world_size(self) -> int:
        sizes = [e.details.get("world_size") for e in self.named("run_began")]
        return max((size for size in sizes if isinstance(size, int)), default=len(self.ranks))

    @cached_property
    def began(self) -> float:
        """Time at which the first process started, in seconds since 1970."""
        process_starts = [e.details.get("process_start") for e in self.named("run_began")]
        starts = [event.start for event in self.events]
        return min([*starts, *(float(at) for at in process_starts if isinstance(at, int | float))])

    @cached_property
    def trained_from(self) -> float:
        """Time at which the last rank had resumed; the end of a start that never did."""
        if self.resumed_step is None:
            return self.ended
        return max(ended_at(event) for event in self.named("resume"))

    @cached_property
    def ended(self) -> float:
        """Time of its last event, in seconds since 1970."""
        return max(map(ended_at, self.events))

    @cached_property
    def last_step(self) -> int | None:
        """The last step that is known to be done; ``None`` if it never trained."""
        if self.resumed_step is None:
            return None
        steps = [e.step for e in self.events if e.step is not None and e.name in _DONE]
        return max([self.resumed_step, *steps])

    @cached_property
    def silent_ranks(self) -> tuple[int, ...]:
        """Ranks that have recorded no end: they were killed, or they run."""
        ended = {event.rank for event in self.named("run_ended")}
        return tuple(sorted(self.ranks.keys() - ended))

    @cached_property
    def ending(self) -> Ending:
        if self.silent_ranks:
            return "open" if self.is_last else "killed"
        outcomes = {event.outcome for event in self.named("run_ended")}
        if "failed" in outcomes:
            return "failed"
        return "stopped" if "stopped" in outcomes else "ok"

    @cached_property
    def marks(self) -> tuple[tuple[int, float], ...]:
        """Steps, and times at which they were done, both growing."""
        if self.resumed_step is None:
            return ()
        marks = [(self.resumed_step, self.trained_from)]
        for event in self.events:
            step, at = event.step, event.start
            if event.name in _DONE and step is not None and step > marks[-1][0]:
                marks.append((step, max(at, marks[-1][1])))
        return tuple(marks)

    def named(self, *names: str) -> list[Event]:
        return [event for event in self.events if event.name in names]


# Events whose step was done when they began.
_DONE = ("steps", "blocking", "preempted", "run_ended")


def starts_of(events: Iterable[Event]) -> dict[str, list[Start]]:
    """Put the events of a record together to starts of jobs, by session, in their order.

    Ranks belong together that resumed together, or ran at the same time and never came so far.
    What no Checkpointer has begun is left out: nothing tells whose it is.
    """
    runs: dict[str, list[Event]] = {}
    for event in events:
        runs.setdefault(event.run, []).append(event)
    by_session: dict[str, dict[str, list[list[Event]]]] = {}
    alone: dict[str, list[list[Event]]] = {}
    for run in sorted(runs.values(), key=lambda run: min(event.start for event in run)):
        if not any(event.name == "run_began" for event in run):
            continue
        session = _detail(run, "run_began", "session")
        if name := _detail(run, "resume", "job_run"):
            by_session.setdefault(session, {}).setdefault(name, []).append(run)
        else:
            alone.setdefault(session, []).append(run)
    found: dict[str, list[Start]] = {}
    for session in by_session.keys() | alone.keys():
        groups = [*by_session.get(session, {}).values(), *_together(alone.get(session, []))]
        groups.sort(key=lambda group: min(event.start for run in group for event in run))
        found[session] = [
            Start({run[0].rank: run for run in group}, is_last=group is groups[-1])
            for group in groups
        ]
    return dict(sorted(found.items()))


def _detail(run: Sequence[Event], name: str, key: str) -> str:
    """Text of a detail of one kind of event; empty if there is none."""
    texts = (event.details.get(key) for event in run if event.name == name)
    return next((text for text in texts if isinstance(text, str) and text), "")


def _together(runs: Sequence[list[Event]]) -> list[list[list[Event]]]:
    """Runs of different ranks that overlap in time, in groups."""
    groups: list[list[list[Event]]] = []
    for run in runs:
        began = min(event.start for event in run)
        group = groups[-1] if groups else []
        until = max((ended_at(event) for other in group for event in other), default=began)
        if group and began <= until and run[0].rank not in {other[0].rank for other in group}:
            group.append(run)
        else:
            groups.append([run])
    return groups


SaveOutcome: TypeAlias = Literal["ok", "failed", "skipped", "unfinished"]
"""How a save ended. ``unfinished``: it is under way, or was cut off."""


@dataclass(frozen=True, slots=True)
class JobSave:
    """One save of all ranks, from when the first began it until it was durable on the last.

    An outcome of ``"ok"`` on one rank is so on all; ``ended`` is ``None`` while it is unfinished.
    ``blocking_s`` is how long training waited for it, on the slowest rank.
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
