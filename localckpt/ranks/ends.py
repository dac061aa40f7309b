"""Ends of calls, as ranks report them, and what that is for all of them: plain data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from localckpt.errors import MismatchError
from localckpt.failure_texts import ranks_named, with_class
from localckpt.ranks.failure import Failure

if TYPE_CHECKING:
    from localckpt.ranks.ranks import Ranks

__all__ = ["NO_FUNCTION", "CallEnd", "decide_end", "failure_of"]

NO_FUNCTION = "no function"
"""Name of a call that has nothing to do on a rank."""


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The end of one call on one rank, for messages and the judge.

    Attributes:
        number: Number of the call in its queue.
        name: What the call does.
        failure: What it failed with; ``None`` if it did not.
        value: What came of it; anything that JSON can carry.
        iteration: Iteration that the call saves; ``None`` for a call that is no save.
    """

    number: int
    name: str
    failure: Failure | None = None
    value: Any = None
    iteration: int | None = None

    @classmethod
    def of(
        cls,
        number: int,
        name: str,
        error: BaseException | None,
        report: Callable[[], Any] | None = None,
        iteration: int | None = None,
    ) -> CallEnd:
        """Describe a call that is over; ``report()`` gives the value of one that did not fail."""
        value = None
        if error is None and report is not None:
            try:
                value = report()
            except Exception as failure:  # noqa: BLE001 - raised on every rank
                error = failure
        if error is None:
            return cls(number, name, None, value, iteration)
        failed = replace(Failure.of(error), text=with_class(error))
        return cls(number, name, failed, None, iteration)

    def to_json(self) -> list[Any]:
        failure = None if self.failure is None else self.failure.to_json()
        return [self.number, self.name, failure, self.value, self.iteration]

    @classmethod
    def from_json(cls, fields: list[Any]) -> CallEnd:
        number, name, failure, *rest = fields
        return cls(number, name, None if failure is None else Failure.from_json(failure), *rest)


def failure_of(ends: Sequence[CallEnd], ranks: Sequence[int]) -> Failure | None:
    """Return the failure that every rank raises; ``None`` if the call succeeded."""
    # A rank that has nothing to write takes part with no function.
    names = {end.name for end in ends} - {NO_FUNCTION}
    if len({end.number for end in ends}) > 1 or len(names) > 1:
        at: dict[str, list[int]] = {}
        for rank, end in zip(ranks, ends, strict=True):
            at.setdefault(f"at call {end.number} ({end.name})", []).append(rank)
        where = ", ".join(
            f"{ranks_named(those)} {'is' if len(those) == 1 else 'are'} {call}"
            for call, those in at.items()
        )
        text = (
            f"the ranks do not finalize the same call: {where}. Every rank must schedule the same "
            f"calls in the same order. The oldest of these was not finalized"
        )
        return Failure(MismatchError.__name__, text)
    failures = {
        rank: end.failure for rank, end in zip(ranks, ends, strict=True) if end.failure is not None
    }
    if not failures:
        return None
    first = next(end for end in ends if end.failure is not None)
    joint = Failure.joint(f"call {first.number} ({first.name}) failed on ", failures)
    text = f"{joint.text}. It was finalized on no rank; further calls can be scheduled"
    return replace(joint, text=text)


def decide_end(ranks: Ranks, what: str, end: CallEnd | None) -> bool:
    """Decide whether a call is over on all ranks; raise what it failed with on any."""
    own = None if end is None else end.to_json()

    def judge(ends: list[Any]) -> bool:
        if None in ends:
            return False
        failure = failure_of([CallEnd.from_json(end) for end in ends], ranks.global_ranks)
        if failure is not None:
            raise failure.error()
        return True

    return ranks.decide(what, lambda: own, judge)
