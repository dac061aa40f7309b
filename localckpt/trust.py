"""Trust in checkpoints: whether a restart may take each of them, from the notes of all nodes.

Plain values and pure decisions, without torch. Every rank keeps notes beside its shards
(``storage/notes.py``). Their merger, the same on all ranks, decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any, Literal, get_args

from localckpt.errors import MismatchError
from localckpt.ids import MOST_RANKS, Checkpoint, Generation
from localckpt.lineage import are_whole

Mark = Literal["bad", "good", "quarantined"]
"""Marks of checkpoints, from the weakest to the strongest. ``"bad"``: its check found it bad.
``"good"``: the job called it good. ``"quarantined"``: it is never to be loaded again."""

LONGEST_METRIC = 200
"""Number of characters that the name of a noted metric has at most."""

_WHY_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Trust:
    """Trust in one checkpoint; MismatchError for impossible values.

    ``failed_starts`` of the job resumed from it and made no progress; it is given up at
    ``most_starts``, which is 0 if there were none. ``why`` is the reason of the mark.
    """

    failed_starts: int = 0
    most_starts: int = 0
    mark: Mark | None = None
    why: str = ""
    # No decision depends on it.
    is_drained: bool = False
    # Name and value of the metric that was given with its save, for retention alone.
    metric: tuple[str, float] | None = None

    def __post_init__(self) -> None:
        are_counts = are_whole((self.failed_starts, self.most_starts))
        is_marked = self.mark in (None, *get_args(Mark)) and isinstance(self.why, str)
        name, value = self.metric or ("none", 0.0)
        is_metric = isinstance(name, str) and 0 < len(name) <= LONGEST_METRIC
        is_value = type(value) is float and not isnan(value)
        is_valid = are_counts and is_marked and is_metric and is_value
        if not is_valid or type(self.is_drained) is not bool:
            raise MismatchError(f"{self!r:.300} tells of no checkpoint")

    def merged(self, other: Trust) -> Trust:
        """Merge what two ranks noted: the largest count, and the strongest mark.

        A node that was wiped or absent has fewer notes than others, so it never overrides them.
        """
        starts = max(
            (self.failed_starts, self.most_starts), (other.failed_starts, other.most_starts)
        )
        # The reasons, and different metrics of one save, only make the order total.
        marks, both = (None, *get_args(Mark)), (self, other)
        mark, why = max(((t.mark, t.why) for t in both), key=lambda t: (marks.index(t[0]), t[1]))
        metrics = [metric for metric in (self.metric, other.metric) if metric is not None]
        is_drained = self.is_drained or other.is_drained
        return Trust(*starts, mark, why, is_drained, max(metrics, default=None))

    def to_json(self) -> list[Any]:
        # JSON has no infinity.
        metric = self.metric and [self.metric[0], repr(self.metric[1])]
        return [
            self.failed_starts,
            self.most_starts,
            self.mark,
            self.why[:_WHY_CHARACTERS],
            int(self.is_drained),
            metric,
        ]

    @classmethod
    def from_json(cls, fields: Any) -> Trust:
        try:
            failed_starts, most_starts, mark, why, is_drained, metric = fields
            if metric is not None:
                name, value = metric
                metric = name, float(value)
            drained = {0: False, 1: True}[is_drained]
            return cls(failed_starts, most_starts, mark, why, drained, metric)
        except (TypeError, ValueError, LookupError, OverflowError) as error:
            raise MismatchError(f"{fields!r:.200} tells of no checkpoint: {error}") from error


_UNKNOWN = Trust()


class Trusts(dict[Checkpoint, Trust]):
    """Trust in the checkpoints of a session, of each that a note tells of."""

    def __missing__(self, checkpoint: Checkpoint) -> Trust:
        return _UNKNOWN

    @classmethod
    def of(cls, notes: Iterable[Mapping[Checkpoint, Trust]]) -> Trusts:
        trusts = cls()
        for noted in notes:
            for checkpoint, trust in noted.items():
                trusts[checkpoint] = trusts[checkpoint].merged(trust)
        return trusts

    def marked(self, mark: Mark) -> dict[Checkpoint, str]:
        return {c: trust.why for c, trust in self.items() if trust.mark == mark}

    @property
    def most_starts(self) -> int | None:
        """Largest limit of failed starts among the notes; ``None`` if there are none."""
        return max((trust.most_starts for trust in self.values()), default=0) or None

    @property
    def frontier(self) -> int:
        """Iteration above which a complete checkpoint is progress, as none that was tried is."""
        tried = (c for c, t in self.items() if t.failed_starts or t.mark == "quarantined")
        return max((checkpoint.iteration for checkpoint in tried), default=-1)

    def to_json(self) -> list[Any]:
        return [
            [*checkpoint.generation, checkpoint.iteration, checkpoint.world_size, *trust.to_json()]
            for checkpoint, trust in self.items()
        ]

    @classmethod
    def from_json(cls, fields: Any) -> Trusts:
        """Decode the result of :meth:`to_json`; raises MismatchError for anything else."""
        if not isinstance(fields, list):
            raise MismatchError(f"{fields!r:.80} tells of no checkpoints")
        return cls.of(map(cls._parse, fields))

    @staticmethod
    def _parse(fields: Any) -> dict[Checkpoint, Trust]:
        numbers = fields[:4] if isinstance(fields, list) else []
        if len(numbers) != 4 or not are_whole(numbers):
            raise MismatchError(f"{fields!r:.200} tells of no checkpoint")
        epoch, sequence, iteration, world_size = numbers
        if not 0 < world_size <= MOST_RANKS:
            raise MismatchError(f"{fields!r:.200} tells of no starts of a job")
        checkpoint = Checkpoint(Generation(epoch, sequence), iteration, world_size)
        return {checkpoint: Trust.from_json(fields[4:])}


@dataclass(frozen=True, slots=True)
class Choice:
    """Complete checkpoints, divided by the action of a restart, with reasons."""

    # It tries these, in that order: those that are marked bad last.
    usable: tuple[Checkpoint, ...]
    quarantined: Mapping[Checkpoint, str]
    # Resumed from in vain too often, but the nodes have no other to take instead.
    exhausted: Mapping[Checkpoint, str]


def choose(complete: Sequence[Checkpoint], trusts: Trusts, most: int | None) -> Choice:
    """Choose what a restart may take of the complete checkpoints, given in the order to try them.

    ``most`` is the number of failed starts at which one is given up; ``None`` for never.
    """
    quarantined: dict[Checkpoint, str] = {}
    spent: dict[Checkpoint, str] = {}
    usable = []
    for checkpoint in complete:
        trust = trusts[checkpoint]
        if trust.mark == "quarantined":
            quarantined[checkpoint] = trust.why
        elif most is not None and trust.failed_starts >= most:
            spent[checkpoint] = resumed_in_vain(trust.failed_starts)
        else:
            usable.append(checkpoint)
    # The sort keeps the given order among the sound and among the bad checkpoints.
    usable.sort(key=lambda checkpoint: trusts[checkpoint].mark == "bad")
    # A checkpoint gives way only to one of the same world size, since a job of another size cannot
    # load it.
    can_do_without = {checkpoint.world_size for checkpoint in usable}
    gives_way = {c: why for c, why in spent.items() if c.world_size in can_do_without}
    exhausted = {c: why for c, why in spent.items() if c not in gives_way}
    return Choice(tuple(usable), quarantined | gives_way, exhausted)


def resumed_in_vain(count: int) -> str:
    return f"the job was resumed from it {count} time{'s'[: count != 1]} and made no progress"


def is_orderly(error: BaseException | None) -> bool:
    """Return whether a job that ends with this error, or without one, was meant to end."""
    if isinstance(error, SystemExit):
        return error.code in (None, 0)
    return error is None or isinstance(error, KeyboardInterrupt)
