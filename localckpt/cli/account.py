"""Account of a job's time: what of it was training that counts, and where the rest went.

Every second from the first start to the last sign of life belongs to one :data:`Kind`. A start is
as fast as its slowest rank, so of what all ranks do at once the longest counts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, get_args

from localckpt.cli.starts import JobSave, SaveOutcome, Start, ended_at, saves_of
from localckpt.events.event import Event

Kind: TypeAlias = Literal["training", "blocking", "waiting", "repeated", "recovery", "down"]
"""Use of a stretch of time. ``blocking``: training waits for a save. ``waiting``: it waits for
saves to end, before it stops. ``repeated``: training that a restart has lost. ``recovery``: from
the start of the processes until training goes on. ``down``: nothing runs."""

PARTS = ("start", "meet", "find", "fetch", "read")
"""Parts of a recovery, in their order."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of time of one kind, in seconds since 1970."""

    kind: Kind
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass(frozen=True, slots=True)
class SaveCounts:
    """Saves of one start to one kind of storage; the ``cut_off`` ones have no known end."""

    ok: int
    failed: int
    cut_off: int
    blocking_s: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Restart:
    """One start of the job, and what it cost that it had to start again.

    Attributes:
        down_s: Time from the last sign of life of the start before; 0 of the first.
        recovery_s: Time from the start of the first process until the last rank trained.
        parts_s: How long each part of the recovery took, on the rank that was ready last.
        lost_steps: Steps that were done before, and are done again; ``None`` of the first.
        repeated_s: Training time of those steps.
        sources: Number of ranks by the tier that they resumed from.
    """

    start: Start
    down_s: float
    recovery_s: float
    parts_s: dict[str, float]
    lost_steps: int | None
    repeated_s: float
    sources: dict[str, int]
    on_nodes: SaveCounts
    on_shared: SaveCounts

    def to_json(self) -> dict[str, Any]:
        """Plain data; keys are only ever added."""
        start = self.start
        return {
            "began": start.began,
            "ended": start.ended,
            "ending": start.ending,
            "silent_ranks": list(start.silent_ranks),
            "world_size": start.world_size,
            "resumed_step": start.resumed_step,
            "last_step": start.last_step,
            "down_s": self.down_s,
            "recovery_s": self.recovery_s,
            "recovery": self.parts_s,
            "lost_steps": self.lost_steps,
            "repeated_s": self.repeated_s,
            "sources": self.sources,
            "saves": {"nodes": asdict(self.on_nodes), "shared": asdict(self.on_shared)},
        }


@dataclass(frozen=True, slots=True)
class Account:
    """Account of a job: its starts, the first one too, and its time, in order and without holes."""

    restarts: tuple[Restart, ...]
    stretches: tuple[Stretch, ...]

    @property
    def seconds(self) -> dict[Kind, float]:
        sums: dict[Kind, float] = dict.fromkeys(get_args(Kind), 0.0)
        for stretch in self.stretches:
            sums[stretch.kind] += stretch.seconds
        return sums

    @property
    def total_s(self) -> float:
        """Time from the first start to the last sign of life."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """Share of the time that was training that counts, from 0 to 1."""
        return self.seconds["training"] / self.total_s if self.total_s else 0.0

    @property
    def unsaved_steps(self) -> int | None:
        """Steps of the last start that a restart would lose; ``None`` if it never trained."""
        last = self.restarts[-1].start
        if last.last_step is None or last.resumed_step is None:
            return None
        saved = [save.step for save in saves_of(last) if save.outcome == "ok"]
        return last.last_step - max([last.resumed_step, *saved])

    def to_json(self) -> dict[str, Any]:
        """Plain data; keys are only ever added."""
        return {
            "starts": [restart.to_json() for restart in self.restarts],
            "total_s": self.total_s,
            "seconds": dict(self.seconds),
            "goodput": self.goodput,
            "unsaved_steps": self.unsaved_steps,
            "timeline": [[s.kind, s.began, s.ended] for s in self.stretches],
        }


def account(starts: Sequence[Start]) -> Account:
    """Account for the time of a job, from its starts in the order in which they began."""
    kept: list[_Trained] = []
    lost: list[_Trained] = []
    others: list[Stretch] = []
    restarts = []
    until, reached = None, -1
    for start in starts:
        lost_steps, repeated_s = None, 0.0
        if until is not None:
            others.append(Stretch("down", until, max(until, start.began)))
            if start.resumed_step is not None:
                lost_steps = max(0, reached - start.resumed_step)
                gone = _take_after(kept, start.resumed_step)
                repeated_s = sum(trained.seconds for trained in gone)
                lost += gone
            else:
                lost_steps = 0
        saves = saves_of(start)
        began = start.began if until is None else max(until, start.began)
        trained_from = max(began, start.trained_from)
        others.append(Stretch("recovery", began, trained_from))
        pauses = _pauses(start, trained_from)
        others += pauses
        ended = max(trained_from, start.ended)
        kept.append(_Trained(start, trained_from, ended, pauses))
        restarts.append(
            Restart(
                start,
                down_s=0.0 if until is None else max(0.0, start.began - until),
                recovery_s=trained_from - began,
                parts_s=_parts(start),
                lost_steps=lost_steps,
                repeated_s=repeated_s,
                sources=dict(Counter(e.tier for e in start.named("resume") if e.tier is not None)),
                on_nodes=_saves(save for save in saves if not save.is_shared),
                on_shared=_saves(save for save in saves if save.is_shared),
            )
        )
        until = ended
        if start.last_step is not None:
            reached = start.last_step
    stretches = [
        *others,
        *(stretch for trained in kept for stretch in trained.stretches("training")),
        *(stretch for trained in lost for stretch in trained.stretches("repeated")),
    ]
    stretches = [stretch for stretch in stretches if stretch.ended > stretch.began]
    return Account(tuple(restarts), tuple(sorted(stretches, key=lambda stretch: stretch.began)))


@dataclass(frozen=True, slots=True)
class _Trained:
    """Training of one start between two times, with the pauses in it."""

    start: Start
    began: float
    ended: float
    pauses: Sequence[Stretch]

    def stretches(self, kind: Kind) -> list[Stretch]:
        found, at = [], self.began
        for pause in self.pauses:
            if pause.ended > at and pause.began < self.ended:
                found.append(Stretch(kind, at, max(at, pause.began)))
                at = pause.ended
        return [*found, Stretch(kind, at, max(at, self.ended))]

    @property
    def seconds(self) -> float:
        return sum(stretch.seconds for stretch in self.stretches("training"))


def _take_after(kept: list[_Trained], step: int) -> list[_Trained]:
    """Take away the training after a step, which is to be done again."""
    gone = []
    while kept:
        last = kept.pop()
        marks = last.start.marks
        if marks and marks[0][0] < step:
            at = min(last.ended, max(last.began, _time_of(step, marks)))
            kept.append(_Trained(last.start, last.began, at, last.pauses))
            gone.append(_Trained(last.start, at, last.ended, last.pauses))
            break
        gone.append(last)
        if marks and marks[0][0] == step:
            break
    return gone


def _time_of(step: int, marks: Sequence[tuple[int, float]]) -> float:
    """Estimate when a step was done, as if all steps between two known ones took the same time."""
    index = bisect_right(marks, step, key=lambda mark: mark[0])
    (done, at), *_ = marks[index - 1 :]
    if index == len(marks) or done == step:
        return at
    next_done, next_at = marks[index]
    return at + (next_at - at) * (step - done) / (next_done - done)


def _pauses(start: Start, trained_from: float) -> list[Stretch]:
    """Times in which training waited, without overlaps; of several ranks the longest one counts."""
    pauses: list[Stretch] = []
    kinds: dict[str, Kind] = {"blocking": "blocking", "wait": "waiting"}
    at = trained_from
    for event in start.named(*kinds):
        ended = ended_at(event)
        if ended <= at:
            continue
        pauses.append(Stretch(kinds[event.name], max(at, event.start), ended))
        at = ended
    return pauses


def _parts(start: Start) -> dict[str, float]:
    """Parts of the recovery, of the rank that was ready last."""
    resumed = [event for event in start.named("resume") if event.outcome == "ok"]
    if not resumed:
        return dict.fromkeys(PARTS, 0.0)
    last = max(resumed, key=ended_at)
    return {part: _number(last, f"{part}_s") for part in PARTS}


def _number(event: Event, key: str) -> float:
    value = event.details.get(key)
    return float(value) if isinstance(value, int | float) else 0.0


def _saves(saves: Iterable[JobSave]) -> SaveCounts:
    outcomes: Counter[SaveOutcome] = Counter()
    blocking_s, nbytes = 0.0, 0
    for save in saves:
        outcomes[save.outcome] += 1
        blocking_s += save.blocking_s
        nbytes += save.nbytes if save.outcome == "ok" else 0
    return SaveCounts(
        outcomes["ok"], outcomes["failed"], outcomes["unfinished"], blocking_s, nbytes=nbytes
    )


def degraded_since(start: Start) -> float | None:
    """Time of the save since which none has all copies, nor were they made; ``None`` for none."""
    lacking = {event.step for event in start.named("degraded")}
    changes = [(event.start, True) for event in start.named("degraded")]
    changes += [
        (ended_at(event), False)
        for event in start.named("save", "reprotected")
        if event.outcome == "ok" and event.tier != "shared" and event.step not in lacking
    ]
    since = None
    for at, is_degraded in sorted(changes):
        since = (at if since is None else since) if is_degraded else None
    return since
