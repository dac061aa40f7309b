"""Trust in checkpoints: how often each was resumed from in vain, and how each is marked.

Plain values and pure decisions, without torch. Every node keeps notes of both beside its shards;
what the nodes know is merged, the same on all ranks, and decides what a restart may take.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from localckpt.errors import MismatchError
from localckpt.ids import MOST_DIGITS, MOST_RANKS, Checkpoint, Generation

__all__ = [
    "Choice",
    "Mark",
    "MarkKind",
    "Resumes",
    "Trust",
    "choose",
    "is_orderly",
    "parse_note",
    "resumed_in_vain",
]

MarkKind = Literal["quarantined"]
"""Kinds of marks."""

_LIMIT = 10**MOST_DIGITS
_WHY_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Resumes:
    """Number of starts of the job that resumed from a checkpoint and made no progress.

    Attributes:
        checkpoint: The checkpoint.
        count: The number, at least 1.
        most: Number at which the job gives the checkpoint up.
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
        kind: ``"quarantined"``: it is not to be found again.
        why: Reason, for people.
    """

    checkpoint: Checkpoint
    kind: MarkKind
    why: str

    def to_json(self) -> list[Any]:
        return [*_fields(self.checkpoint), self.kind, self.why[:_WHY_CHARACTERS]]


@dataclass(frozen=True, slots=True)
class Trust:
    """Everything that is known of a session's checkpoints beside their shards.

    Attributes:
        resumes: Starts in vain, by checkpoint.
        marks: Marks, by checkpoint.
    """

    resumes: Mapping[Checkpoint, Resumes] = field(default_factory=dict)
    marks: Mapping[Checkpoint, Mark] = field(default_factory=dict)

    @classmethod
    def of(cls, notes: Iterable[Resumes | Mark]) -> Trust:
        """Merge notes, in whatever order: the largest number counts, and the strongest mark.

        A node that was wiped, or away, knows less than others, never better.
        """
        resumes: dict[Checkpoint, Resumes] = {}
        marks: dict[Checkpoint, Mark] = {}
        for note in notes:
            if isinstance(note, Resumes):
                known = resumes.setdefault(note.checkpoint, note)
                resumes[note.checkpoint] = max(known, note, key=lambda n: (n.count, n.most))
            else:
                stands = marks.setdefault(note.checkpoint, note)
                marks[note.checkpoint] = max(stands, note, key=_strength)
        return cls(resumes, marks)

    @property
    def notes(self) -> list[Resumes | Mark]:
        """The notes that make it."""
        return [*self.resumes.values(), *self.marks.values()]

    def count(self, checkpoint: Checkpoint) -> int:
        """Number of starts that resumed from a checkpoint in vain."""
        return self.resumes[checkpoint].count if checkpoint in self.resumes else 0

    def marked(self, kind: MarkKind) -> dict[Checkpoint, Mark]:
        """The checkpoints with a kind of mark."""
        return {c: mark for c, mark in self.marks.items() if mark.kind == kind}

    @property
    def most(self) -> int | None:
        """Number of starts in vain at which the job that counted gives up; ``None`` for none."""
        return max((noted.most for noted in self.resumes.values()), default=None)

    @property
    def frontier(self) -> int:
        """Iteration above which a complete checkpoint is progress; -1 if any is.

        The job has been there before: it was resumed from there in vain, or has given it up.
        """
        tried = (*self.resumes, *self.marked("quarantined"))
        return max((checkpoint.iteration for checkpoint in tried), default=-1)

    def to_json(self) -> list[Any]:
        return [note.to_json() for note in self.notes]

    @classmethod
    def from_json(cls, fields: Any) -> Trust:
        """Read what :meth:`to_json` gave; raises MismatchError for anything else."""
        if not isinstance(fields, list):
            raise MismatchError(f"{fields!r:.80} tells of no checkpoints")
        return cls.of(map(parse_note, fields))


@dataclass(frozen=True, slots=True)
class Choice:
    """Complete checkpoints, by what a restart does with them.

    Attributes:
        usable: Those that it tries, in their order.
        quarantined: Those that it puts in quarantine, and why.
        exhausted: Those that it leaves where they are and does not take by itself, and why: each
            was resumed from in vain too often, and the nodes have none to take in its place.
    """

    usable: tuple[Checkpoint, ...]
    quarantined: Mapping[Checkpoint, str]
    exhausted: Mapping[Checkpoint, str]


def parse_note(fields: Any) -> Resumes | Mark:
    """Read what the ``to_json`` of a note gave; raises MismatchError for anything else."""
    try:
        epoch, sequence, iteration, world_size, first, second = fields
    except (TypeError, ValueError) as error:
        raise MismatchError(f"{fields!r:.80} tells of no checkpoint: {error}") from error
    is_mark = first in get_args(MarkKind) and isinstance(second, str)
    numbers = [epoch, sequence, iteration, world_size, *([] if is_mark else [first, second])]
    # JSON's true is an int to Python.
    if set(map(type, numbers)) != {int} or not 0 <= min(numbers) <= max(numbers) < _LIMIT:
        raise MismatchError(f"{fields!r:.200} tells of no checkpoint")
    if not 0 < world_size <= MOST_RANKS or (not is_mark and min(first, second) < 1):
        raise MismatchError(f"{fields!r:.200} tells of no starts of a job")
    checkpoint = Checkpoint(Generation(epoch, sequence), iteration, world_size)
    return Mark(checkpoint, first, second) if is_mark else Resumes(checkpoint, first, second)


def choose(
    complete: Sequence[Checkpoint],
    trust: Trust,
    most: int | None,
    current: Checkpoint | None = None,
) -> Choice:
    """Choose what a restart may take.

    Args:
        complete: The complete checkpoints, in the order in which a restart would try them.
        trust: What is known of them.
        most: Number of starts in vain at which a checkpoint is given up; ``None`` for never.
        current: The checkpoint that this start has resumed from, which counts as a start in vain
            only once it is over.
    """
    marked = trust.marked("quarantined")
    spent = {
        checkpoint
        for checkpoint in complete
        if most is not None and trust.count(checkpoint) - (checkpoint == current) >= most
    }
    usable = [c for c in complete if c not in spent and c not in marked]
    # Only as many ranks as saved a checkpoint can load it.
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
    """Text for a number of starts."""
    return f"the job was resumed from it {count} time{'s'[: count != 1]} and made no progress"


def is_orderly(error: BaseException | None) -> bool:
    """Return whether a job that ends with an error, or none, ends because somebody wanted it to."""
    if isinstance(error, SystemExit):
        return error.code in (None, 0)
    return error is None or isinstance(error, KeyboardInterrupt)


def _strength(mark: Mark) -> tuple[int, str]:
    # The reason only makes the order total.
    return get_args(MarkKind).index(mark.kind), mark.why


def _fields(checkpoint: Checkpoint) -> list[int]:
    return [*checkpoint.generation, checkpoint.iteration, checkpoint.world_size]
