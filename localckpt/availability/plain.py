"""Records of ranks as plain data for JSON, and back, by the annotations of their fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints


class Record:
    """Base of a dataclass that ranks send each other.

    Its fields are plain values, other dataclasses and named tuples, objects with a ``from_json`` of
    their own, and tuples or mappings of these.
    """

    __slots__ = ()

    def to_json(self) -> list[Any]:
        return _values(self)

    @classmethod
    def from_json(cls, values: Any) -> Self:
        """Read the result of :meth:`to_json`; raises ValueError or TypeError for other values."""
        made: Self = _made(cls, values)
        return made


def _plain(value: Any) -> Any:
    if hasattr(value, "to_json"):
        return value.to_json()
    if isinstance(value, Mapping):
        return [[_plain(key), _plain(of)] for key, of in value.items()]
    if isinstance(value, list | tuple):
        return [*map(_plain, value)]
    return _values(value) if is_dataclass(value) else value


def _values(record: Any) -> list[Any]:
    kind: Any = type(record)
    return [_plain(getattr(record, name)) for name in _kinds(kind)]


def _read(kind: Any, value: Any) -> Any:
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin is UnionType:
        (kind,) = (of for of in inner if of is not NoneType)
        return None if value is None else _read(kind, value)
    if origin is Mapping:
        return {_read(inner[0], key): _read(inner[1], of) for key, of in value}
    if origin is Sequence or (origin is tuple and inner[-1] is ...):
        return tuple(_read(inner[0], of) for of in value)
    if origin is tuple:
        return tuple(_read(of_kind, of) for of_kind, of in zip(inner, value, strict=True))
    if hasattr(origin, "from_json"):
        return origin.from_json(value)
    return _made(kind, value) if is_dataclass(kind) or hasattr(kind, "_fields") else value


def _made(kind: Any, values: Any) -> Any:
    kinds = _kinds(kind)
    if len(values) != len(kinds):
        few = "not enough" if len(values) < len(kinds) else "too many"
        raise ValueError(f"{few} values for a {kind.__name__}: {len(values)} of {len(kinds)}")
    return kind(*map(_read, kinds.values(), values))


@cache
def _kinds(record: Any) -> dict[str, Any]:
    """Return the kind of each field of a dataclass or named tuple."""
    hints = get_type_hints(record)
    names = getattr(record, "_fields", None) or [field.name for field in fields(record)]
    return {name: hints[name] for name in names}
