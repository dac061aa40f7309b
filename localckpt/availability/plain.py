"""Records of ranks as plain data for JSON, and back, by the annotations of their fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache, partial
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


@cache
def _reader(kind: Any) -> Callable[[Any], Any] | None:
    """Return the function that reads a value of a kind; ``None`` if it is one as it is."""
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin is UnionType:
        (read,) = (_reader(of) for of in inner if of is not NoneType)
        return read and (lambda value: None if value is None else read(value))
    if origin is Mapping:
        read_key, read_value = (_reader(of) or _itself for of in inner)
        return lambda pairs: {read_key(key): read_value(value) for key, value in pairs}
    if origin is Sequence or (origin is tuple and inner[-1] is ...):
        of_each = _reader(inner[0])
        return tuple if of_each is None else lambda values: tuple(map(of_each, values))
    if origin is tuple:
        readers = [_reader(of) or _itself for of in inner]
        return lambda values: tuple(
            read(value) for read, value in zip(readers, values, strict=True)
        )
    if hasattr(origin, "from_json"):
        of_its_own: Callable[[Any], Any] = origin.from_json
        return of_its_own
    return partial(_made, kind) if is_dataclass(kind) or hasattr(kind, "_fields") else None


def _itself(value: Any) -> Any:
    return value


def _made(kind: Any, values: Any) -> Any:
    readers = _readers(kind)
    if len(values) != len(readers):
        few = "not enough" if len(values) < len(readers) else "too many"
        raise ValueError(f"{few} values for a {kind.__name__}: {len(values)} of {len(readers)}")
    pairs = zip(readers, values, strict=True)
    return kind(*(value if read is None else read(value) for read, value in pairs))


@cache
def _readers(kind: Any) -> tuple[Callable[[Any], Any] | None, ...]:
    return tuple(map(_reader, _kinds(kind).values()))


@cache
def _kinds(record: Any) -> dict[str, Any]:
    """Return the kind of each field of a dataclass or named tuple."""
    hints = get_type_hints(record)
    names = getattr(record, "_fields", None) or [field.name for field in fields(record)]
    return {name: hints[name] for name in names}
