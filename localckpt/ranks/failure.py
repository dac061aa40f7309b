"""Errors in plain data, as they go to other ranks: one on one rank is the same on all."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from localckpt import errors
from localckpt.errors import CheckpointingException, PeerLostError
from localckpt.failure_texts import described, said_by

__all__ = ["Attempt", "Failure", "forget_frames"]

_PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True, slots=True)
class Failure:
    """An error in plain data.

    Attributes:
        kind: Name of the nearest class of :mod:`localckpt.errors`.
        text: The message, with the class of an error that is not one of localckpt's own.
        fields: The error's attributes that are plain values.
    """

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
    """Drop the variables of the calls that failed, images among them; those that run keep theirs.

    An exception that is kept in a variable of a call that it came through would keep all of them
    until Python looks for cycles.
    """
    while failure is not None:
        traceback.clear_frames(failure.__traceback__)
        # Not its context, which may be an error that the trainer is about to handle.
        failure = failure.__cause__
