"""Errors in plain data, as they go to other ranks: one on one rank is the same on all.

Among them are those about ranks that did not come, and the failures of calls behind training.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from localckpt import errors
from localckpt.errors import CheckpointingException, MismatchError, PeerLostError
from localckpt.failure_texts import described, ranks_named, said_by, with_class

SLOW = "If the ranks are alive but slow, give a longer timeout; else restart the job."
"""Advice on the topic ``slow``, on ranks that did not come."""

NAMED = 16
"""So many ranks are named in a message."""

OPENING = -1
"""Number of the round in which ranks open their part of the store, the first of all."""

NO_FUNCTION = "no function"
"""Name of a call that has nothing to do on a rank."""

_PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True, slots=True)
class Failure:
    """An error in plain data; ``kind`` names the nearest class of :mod:`localckpt.errors`."""

    kind: str
    text: str
    fields: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        names = (c.__name__ for c in type(error).__mro__)
        kind = next((n for n in names if n in errors.__all__), CheckpointingException.__name__)
        fields = {k: v for k, v in vars(error).items() if isinstance(v, _PLAIN)}
        return cls(kind, described(error), fields if kind == type(error).__name__ else {})

    @classmethod
    def from_json(cls, fields: list[Any]) -> Failure:
        kind, text, attributes = fields
        if kind not in errors.__all__ or type(text) is not str:
            raise ValueError(f"{kind!r:.100} is no error of localckpt")
        plain = {k: v for k, v in attributes.items() if k.isidentifier() and isinstance(v, _PLAIN)}
        return cls(kind, text, {k: v for k, v in plain.items() if not k.startswith("_")})

    def to_json(self) -> list[Any]:
        return [self.kind, self.text, self.fields]

    def error(self) -> CheckpointingException:
        raised: CheckpointingException = getattr(errors, self.kind)(self.text)
        for name, value in self.fields.items():
            setattr(raised, name, value)
        return raised

    @classmethod
    def joint(cls, begin: str, failures: Mapping[int, Failure]) -> Failure:
        """Describe what went wrong on several ranks: ``begin``, the ranks, and what each says."""
        # Peers of a rank that failed for a reason of its own have lost it: that says nothing more.
        causes = {r: f for r, f in failures.items() if f.kind != PeerLostError.__name__}
        causes = causes or dict(failures)
        first = next(iter(causes.values()))
        kinds = {failure.kind for failure in causes.values()}
        alike = all(failure.fields == first.fields for failure in causes.values())
        texts = said_by({rank: failure.text for rank, failure in causes.items()})
        advised = (f.fields for f in causes.values() if "advice" in f.fields)
        fields = {k: v for f in advised for k, v in f.items() if k in ("topic", "advice")}
        if len(kinds) > 1:
            return cls(CheckpointingException.__name__, f"{begin}{texts}", fields)
        return cls(first.kind, f"{begin}{texts}", first.fields if alike else fields)


class Attempt:
    """Keeps the exception of what is done inside until it is reported to the other ranks."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self._result: Any = None

    @classmethod
    def at(cls, work: Callable[[], Any]) -> Attempt:
        with cls() as attempt:
            attempt.of(work())
        return attempt

    def of(self, result: Any) -> Attempt:
        """Have other ranks get a result, unless there is a failure; return the attempt."""
        self._result = result
        return self

    def take(self) -> tuple[Exception | None, Any]:
        """Return failure and result, and keep neither."""
        taken = self.failure, self._result
        self.failure = self._result = None
        return taken

    @property
    def succeeded(self) -> bool:
        return self.failure is None

    @property
    def error_text(self) -> str | None:
        return None if self.failure is None else described(self.failure)

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, Exception):
            self.failure = error
            return True
        return False


def forget_frames(failure: BaseException | None) -> None:
    """Drop the variables of the calls that failed: images, and the exception itself, in a cycle."""
    while failure is not None:
        traceback.clear_frames(failure.__traceback__)
        # Not its context, which may be an error that the trainer is about to handle.
        failure = failure.__cause__


@dataclass(slots=True)
class Place:
    """A rank among those of a group (``ranks`` of the job), and its words on the others.

    ``forgotten`` is, on the root, the first round of which anything is left in the store.
    """

    rank: int
    ranks: Sequence[int]
    root: int = 0
    hint: Callable[[], str] = str
    forgotten: int = OPENING

    @property
    def is_root(self) -> bool:
        return self.rank == self.root

    @property
    def me(self) -> int:
        return self.ranks[self.rank]

    def failed(self, what: str, failure: Failure) -> Failure:
        return Failure.joint(f"could not {what}: ", {self.me: failure})

    def late(
        self, what: str, late: Sequence[int], seen: Mapping[int, str], waited_s: float
    ) -> Failure:
        """Describe ranks that have not reported in time; ``seen`` has their last calls."""
        waited = f"rank {self.me} waited {round(waited_s, 2):g} s to {what}"
        advice = f"{SLOW}{self.hint()}"
        return _lost(f"{waited}, and {named(late, seen)} did not come", advice)

    def too_late(self, what: str, late: Sequence[int]) -> Failure:
        """Tell this rank, which is among ``late``, that the others did not wait for it."""
        others = ranks_named(rank for rank in self.ranks if rank != self.me)
        missing = [rank for rank in late if rank != self.me]
        named = ", ".join(f"rank {rank}" for rank in missing[:NAMED])
        nor = f", and {named} had not come either" if missing else ""
        return _lost(
            f"rank {self.me} came too late to {what}: the others ({others}) were not all waiting "
            f"any more{nor}"
        )

    def closed(self, name: str) -> Failure:
        return _lost(f"rank {self.me} closed {name!r} before all ranks had opened it")

    def left(self, what: str) -> Failure:
        return _lost(f"could not {what}: rank {self.me} has left before all ranks had come", "")

    def unknown(self, what: str, waited_s: float) -> Failure:
        text = (
            f"could not {what}: all ranks had done their part, and rank {self.ranks[self.root]} "
            f"has not said after {waited_s:g} s what came of it. Whether it was done is not known; "
            f"what was saved before stands. find_latest() will tell"
        )
        return Failure(PeerLostError.__name__, text, {"outcome_unknown": True})


def named(late: Sequence[int], seen: Mapping[int, str]) -> str:
    """Return ranks that have not come in words, with the call in which each was last seen."""
    texts = [f"rank {rank} (last seen: {seen.get(rank, 'not seen yet')})" for rank in late]
    texts[NAMED:] = [f"{len(late) - NAMED} more"] * (len(late) > NAMED)
    return ", ".join(texts)


def _lost(text: str, advice: str = SLOW) -> Failure:
    advised = {"topic": "slow", "advice": advice} if advice else {}
    return Failure(PeerLostError.__name__, f"{text}. What was saved before stands", advised)


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The end of one call on one rank; ``value`` is anything that JSON can carry."""

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
