"""Trust in checkpoints: starts that resumed from each in vain, marks, drains, and metrics.

Plain values and pure decisions, without torch. Every node keeps notes of them beside its shards.
The merged notes of all nodes, the same on all ranks, decide which checkpoints a restart may take.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import Any, Literal, TypeAlias, get_args

from localckpt.errors import MismatchError
from localckpt.ids import MOST_DIGITS, MOST_RANKS, Checkpoint, Generation

__all__ = [
    "LONGEST_METRIC",
    "Choice",
    "Drained",
    "Mark",
    "MarkKind",
    "Measured",
    "Note",
    "Resumes",
    "Trust",
    "choose",
    "is_orderly",
    "parse_note",
    "resumed_in_vain",
]

MarkKind = Literal["bad", "good", "quarantined"]
"""Kinds of marks, from the weakest to the strongest."""

_LIMIT = 10**MOST_DIGITS
_WHY_CHARACTERS = 300
_DRAINED, _MEASURED = "drained", "measured"

LONGEST_METRIC = 200
"""Number of characters that the name of a noted metric has at most."""


@dataclass(frozen=True, slots=True)
class Resumes:
    """Number of starts of the job that resumed from a checkpoint and made no progress.

    Attributes:
        checkpoint: The checkpoint.
        count: Number of such starts, at least 1.
        most: Number of such starts at which the job gives the checkpoint up.
    """

    checkpoint: Checkpoint
    count: int
    most: int

    def to_json(self) -> list[Any]:
        return [*_fields(self.checkpoint), self.count, self.most]


@dataclass(frozen=True, slots=True)
class Mark:
    """Mark of a checkpoint.

    Attributes:
        checkpoint: The checkpoint.
        kind: ``"bad"`` for a checkpoint that its check found bad; ``"good"`` for one that the job
            called good; ``"quarantined"`` for one that is never to be loaded again.
        why: Reason, as a text for messages.
    """

    checkpoint: Checkpoint
    kind: MarkKind
    why: str

    def to_json(self) -> list[Any]:
        return [*_fields(self.checkpoint), self.kind, self.why[:_WHY_CHARACTERS]]


@dataclass(frozen=True, slots=True)
class Drained:
    """Note that a checkpoint was drained to shared storage.

    Attributes:
        checkpoint: The checkpoint.
    """

    checkpoint: Checkpoint

    def to_json(self) -> list[Any]:
        return [*_fields(self.checkpoint), _DRAINED, ""]


@dataclass(frozen=True, slots=True)
class Measured:
    """Metric that was given with the save of a checkpoint.

    Attributes:
        checkpoint: The checkpoint.
        metric: Name of the metric.
        value: Its value, which is not NaN.
    """

    checkpoint: Checkpoint
    metric: str
    value: float

    def to_json(self) -> list[Any]:
        # JSON has no infinity.
        return [*_fields(self.checkpoint), _MEASURED, f"{self.value!r} {self.metric}"]


Note: TypeAlias = Resumes | Mark | Drained | Measured


@dataclass(frozen=True, slots=True)
class Trust:
    """Merged notes on the checkpoints of a session.

    Attributes:
        resumes: Starts in vain, by checkpoint.
        marks: Marks, by checkpoint.
        drained: Checkpoints that were drained to shared storage. No decision depends on them.
        measured: Metrics, by checkpoint. Only retention depends on them.
    """

    resumes: Mapping[Checkpoint, Resumes] = field(default_factory=dict)
    marks: Mapping[Checkpoint, Mark] = field(default_factory=dict)
    drained: frozenset[Checkpoint] = frozenset()
    measured: Mapping[Checkpoint, Measured] = field(default_factory=dict)

    @classmethod
    def of(cls, notes: Iterable[Note]) -> Trust:
        """Merge notes in any order: the largest count and the strongest mark of each checkpoint.

        A node that was wiped or absent has fewer notes than others, so it never overrides them.
        """
        resumes: dict[Checkpoint, Resumes] = {}
        marks: dict[Checkpoint, Mark] = {}
        drained: set[Checkpoint] = set()
        measured: dict[Checkpoint, Measured] = {}
        for note in notes:
            if isinstance(note, Resumes):
                known = resumes.setdefault(note.checkpoint, note)
                resumes[note.checkpoint] = max(known, note, key=lambda n: (n.count, n.most))
            elif isinstance(note, Drained):
                drained.add(note.checkpoint)
            elif isinstance(note, Measured):
                other = measured.setdefault(note.checkpoint, note)
                # All notes of one save are equal; this only makes the order total.
                measured[note.checkpoint] = max(other, note, key=lambda m: (m.metric, m.value))
            else:
                stands = marks.setdefault(note.checkpoint, note)
                marks[note.checkpoint] = max(stands, note, key=_strength)
        return cls(resumes, marks, frozenset(drained), measured)

    @property
    def notes(self) -> list[Note]:
        """The merged notes, in the form that :meth:`of` takes."""
        drained = sorted(self.drained, key=_fields)
        marks, measured = self.marks.values(), self.measured.values()
        return [*self.resumes.values(), *marks, *map(Drained, drained), *measured]

    def count(self, checkpoint: Checkpoint) -> int:
        """Return the number of starts that resumed from a checkpoint in vain."""
        return self.resumes[checkpoint].count if checkpoint in self.resumes else 0

    def marked(self, kind: MarkKind) -> dict[Checkpoint, Mark]:
        """Return the checkpoints with a kind of mark."""
        return {c: mark for c, mark in self.marks.items() if mark.kind == kind}

    @property
    def most(self) -> int | None:
        """Largest limit of starts in vain among the notes; ``None`` if there are none."""
        return max((noted.most for noted in self.resumes.values()), default=None)

    @property
    def frontier(self) -> int:
        """Iteration above which a complete checkpoint is progress; -1 if every one is.

        It is the highest iteration that the job resumed from in vain or has quarantined.
        """
        tried = (*self.resumes, *self.marked("quarantined"))
        return max((checkpoint.iteration for checkpoint in tried), default=-1)

    def to_json(self) -> list[Any]:
        return [note.to_json() for note in self.notes]

    @classmethod
    def from_json(cls, fields: Any) -> Trust:
        """Decode the result of :meth:`to_json`; raises MismatchError for anything else."""
        if not isinstance(fields, list):
            raise MismatchError(f"{fields!r:.80} tells of no checkpoints")
        return cls.of(map(parse_note, fields))


@dataclass(frozen=True, slots=True)
class Choice:
    """Complete checkpoints, divided by the action of a restart.

    Attributes:
        usable: Checkpoints that the restart tries, in that order: those that are marked bad last.
        quarantined: Checkpoints that it puts in quarantine, with the reasons.
        exhausted: Checkpoints that it neither moves nor takes by itself, with the reasons: each was
            resumed from in vain too often, but the nodes have no other to take instead.
    """

    usable: tuple[Checkpoint, ...]
    quarantined: Mapping[Checkpoint, str]
    exhausted: Mapping[Checkpoint, str]


def parse_note(fields: Any) -> Note:
    """Decode the result of a note's ``to_json``; raises MismatchError for anything else."""
    try:
        epoch, sequence, iteration, world_size, first, second = fields
    except (TypeError, ValueError) as error:
        raise MismatchError(f"{fields!r:.80} tells of no checkpoint: {error}") from error
    is_text = first in (*get_args(MarkKind), _DRAINED, _MEASURED) and isinstance(second, str)
    numbers = [epoch, sequence, iteration, world_size, *([] if is_text else [first, second])]
    # type(), because isinstance(True, int) holds.
    if set(map(type, numbers)) != {int} or not 0 <= min(numbers) <= max(numbers) < _LIMIT:
        raise MismatchError(f"{fields!r:.200} tells of no checkpoint")
    if not 0 < world_size <= MOST_RANKS or (not is_text and min(first, second) < 1):
        raise MismatchError(f"{fields!r:.200} tells of no starts of a job")
    checkpoint = Checkpoint(Generation(epoch, sequence), iteration, world_size)
    if first == _DRAINED:
        return Drained(checkpoint)
    if first == _MEASURED:
        return _parse_measured(checkpoint, second)
    return Mark(checkpoint, first, second) if is_text else Resumes(checkpoint, first, second)


def _parse_measured(checkpoint: Checkpoint, text: str) -> Measured:
    value, _, metric = text.partition(" ")
    try:
        measured = Measured(checkpoint, metric, float(value))
    except ValueError as error:
        raise MismatchError(f"{text!r:.200} is no metric: {error}") from error
    if isnan(measured.value) or not 0 < len(metric) <= LONGEST_METRIC:
        raise MismatchError(f"{text!r:.200} is no metric")
    return measured


def choose(
    complete: Sequence[Checkpoint],
    trust: Trust,
    most: int | None,
) -> Choice:
    """Choose what a restart may take.

    Args:
        complete: The complete checkpoints, in the order in which a restart would try them.
        trust: Notes on the checkpoints.
        most: Number of starts in vain at which a checkpoint is given up; ``None`` for never.
    """
    marked = trust.marked("quarantined")
    spent = {
        checkpoint
        for checkpoint in complete
        if most is not None and trust.count(checkpoint) >= most
    }
    bad = trust.marked("bad")
    usable = [c for c in complete if c not in spent and c not in marked]
    # The sort keeps the given order among the sound and among the bad checkpoints.
    usable.sort(key=bad.__contains__)
    # A checkpoint gives way only to one of the same world size, since a job of another size cannot
    # load it.
    can_do_without = {checkpoint.world_size for checkpoint in usable}
    quarantined = {c: marked[c].why for c in complete if c in marked}
    exhausted: dict[Checkpoint, str] = {}
    for checkpoint in complete:
        if checkpoint in spent and checkpoint not in marked:
            why = resumed_in_vain(trust.count(checkpoint))
            gives_way = checkpoint.world_size in can_do_without
            (quarantined if gives_way else exhausted)[checkpoint] = why
    return Choice(tuple(usable), quarantined, exhausted)


def resumed_in_vain(count: int) -> str:
    """Return the reason for messages, from a number of starts."""
    return f"the job was resumed from it {count} time{'s'[: count != 1]} and made no progress"


def is_orderly(error: BaseException | None) -> bool:
    """Return whether a job that ends with this error, or without one, was meant to end."""
    if isinstance(error, SystemExit):
        return error.code in (None, 0)
    return error is None or isinstance(error, KeyboardInterrupt)


def _strength(mark: Mark) -> tuple[int, str]:
    # The reason only makes the order total.
    return get_args(MarkKind).index(mark.kind), mark.why


def _fields(checkpoint: Checkpoint) -> list[int]:
    return [*checkpoint.generation, checkpoint.iteration, checkpoint.world_size]
