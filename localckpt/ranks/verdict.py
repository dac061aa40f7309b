"""Reports of ranks, and the root's verdict on them: JSON, of which nothing is executed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localckpt.errors import MismatchError
from localckpt.failure_texts import said_by, short, with_short_texts
from localckpt.ranks.deadline import Deadline
from localckpt.ranks.failure import Failure
from localckpt.ranks.values import Message

REFUSED = "refused"
"""Kind of the call of a rank that could not make its part: it fails whatever the others call."""

# Texts in a larger report are cut; one that still takes more cannot be sent.
_LARGE_NBYTES, _MOST_NBYTES = 1 << 20, 16 << 20


@dataclass(frozen=True, slots=True)
class PerRank:
    """A verdict with a part, JSON or a :class:`Message`, for each rank of the group."""

    common: Any
    parts: Mapping[int, Any]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end of a round: a value, or a failure in its place, which ``late`` ranks raise as well.

    ``given_up`` is the call in which the others did not wait any longer. ``parts`` are packed, and
    sent apart.
    """

    value: Any = None
    failure: Failure | None = None
    late: tuple[int, ...] = ()
    parts: Mapping[int, bytes] | None = None
    given_up: str = ""

    @classmethod
    def of(cls, judged: Any) -> Verdict:
        if not isinstance(judged, PerRank):
            return cls(_as_received(judged))
        parts = {rank: _packed_part(part) for rank, part in judged.parts.items()}
        return cls(_as_received(judged.common), parts=parts)

    def to_json(self) -> list[Any]:
        failure = self.failure and self.failure.to_json()
        return [self.value, failure, list(self.late), self.parts is not None, self.given_up]

    @classmethod
    def received(cls, fields: list[Any], part: Callable[[], bytes | None]) -> Verdict:
        """The verdict as one rank has it; ``part`` gives that rank's part."""
        value, failure, late, has_parts, given_up = fields
        value = [value, _unpacked_part(part())] if has_parts else value
        failure = failure and Failure.from_json(failure)
        return cls(value, failure, tuple(late), given_up=given_up)


@dataclass(frozen=True, slots=True)
class Call:
    """One rank's call of a round; see :meth:`Ranks.decide`."""

    what: str
    failure: Failure | None
    result: Any
    judge: Callable[[list[Any]], Any]
    deadline: Deadline
    grace_s: float = 0.0
    kind: str = ""
    order: int | None = None

    @property
    def data(self) -> bytes | None:
        return self.result.data if isinstance(self.result, Message) else None

    def report(self) -> list[Any]:
        """Describe the call: name, failure, result, bytes beside the report, kind, and order."""
        data = self.data
        record = self.result if data is None else self.result.record
        nbytes = None if data is None else len(data)
        failure = self.failure and self.failure.to_json()
        what, kind = short(self.what), short(self.kind or self.what)
        report = [what, failure, record, nbytes, kind, self.order]
        if (size := len(json.dumps(report))) > _LARGE_NBYTES:
            report = with_short_texts(report)
            size = len(json.dumps(report))
        if size <= _MOST_NBYTES:
            return report
        text = (
            f"could not {self.what}: this rank has {size} bytes to tell the others, and "
            f"{_MOST_NBYTES} can be sent. What was saved before stands"
        )
        return [what, Failure(MismatchError.__name__, text).to_json(), None, None, kind, self.order]


def to_all(shape: Any) -> dict[str, Any]:
    """Options of a decision that gives the reports that are not empty, of few ranks, to all."""

    def judge(reports: list[Any]) -> list[Any]:
        return [[rank, report] for rank, report in enumerate(reports) if report]

    read = shaped([(int, shape)])
    return {"judge": judge, "read": lambda reports: dict(read(reports))}


def shaped(shape: Any) -> Callable[[Any], Any]:
    """Return what reads a verdict of one shape, and refuses others.

    A shape is a class, ``(shape, ...)`` for a list of as many members, ``[shape]`` for one of any
    number, or ``{key: shape}`` for a dict with at least these keys.
    """

    def read(value: Any) -> Any:
        _require_shape(value, shape)
        return value

    return read


def _require_shape(value: Any, shape: Any) -> None:
    kind = {tuple: list}.get(type(shape), type(shape))
    if kind not in (list, dict):
        if not isinstance(value, shape):
            raise ValueError(f"a {type(value).__name__} in place of a {shape}")
        return
    if type(value) is not kind or (type(shape) is tuple and len(value) != len(shape)):
        raise ValueError(f"a {type(value).__name__} in place of {shape}")
    if kind is dict:
        pairs = [(value[key], shape[key]) for key in shape]
    else:
        pairs = [(v, shape[n if type(shape) is tuple else 0]) for n, v in enumerate(value)]
    for member, inner in pairs:
        _require_shape(member, inner)


def judge_reports(
    call: Call, reports: list[Any], data: Mapping[int, bytes], ranks: Sequence[int]
) -> tuple[Verdict, Exception | None]:
    orders, kinds = [order for *_, order in reports], {kind for *_, kind, _ in reports}
    if REFUSED in kinds and (failure := joint_failure(call.what, reports, ranks)) is not None:
        return Verdict(failure=failure), None
    is_apart = len(set(orders)) > 1 and None not in orders
    if len(kinds) > 1 or is_apart:
        at = said_by({rank: report[0] for rank, report in zip(ranks, reports, strict=True)})
        text = (
            f"the ranks do not do the same: {at}. All "
            f"ranks must make the same calls in the same order. What was saved before stands"
        )
        ahead: list[int] = []
        if len(kinds) == 1:
            ahead = [r for r, order in zip(ranks, orders, strict=True) if order == max(orders)]
        if 2 * len(ahead) < len(ranks):
            # No few ranks have made a call alone: the ranks are at variance.
            ahead = []
        # Those ahead wait in the next round for the others.
        return Verdict(failure=Failure(MismatchError.__name__, text), late=tuple(ahead)), None
    if (failure := joint_failure(call.what, reports, ranks)) is not None:
        return Verdict(failure=failure), None
    results = [
        report[2] if report[3] is None else Message(report[2], data.get(rank, b""))
        for rank, report in enumerate(reports)
    ]
    try:
        return Verdict.of(call.judge(results)), None
    except Exception as error:  # noqa: BLE001 - raised on all ranks
        return Verdict(failure=Failure.of(error)), error


def joint_failure(what: str, reports: Sequence[Any], ranks: Sequence[int]) -> Failure | None:
    """Describe the failures of all ranks that have reported one; ``None`` if none has."""
    failures = {
        rank: Failure.from_json(report[1])
        for rank, report in zip(ranks, reports, strict=True)
        if report is not None and report[1] is not None
    }
    return Failure.joint(f"could not {what}: ", failures) if failures else None


def _packed_part(part: Any) -> bytes:
    record, data = (part.record, part.data) if isinstance(part, Message) else (part, None)
    return Message([record, data is not None], data or b"").to_bytes()


def _unpacked_part(packed: bytes | None) -> Any:
    if packed is None:
        return None
    message = Message.from_bytes(packed)
    record, has_data = message.record
    return Message(record, message.data) if has_data else record


def _as_received(value: Any) -> Any:
    """A value as other ranks receive it, on the rank that gives it as well."""
    return json.loads(json.dumps(value))
