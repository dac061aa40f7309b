"""Walks through nested containers: tensors by path, and copies around other values."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

import torch

LEAVES = frozenset({int, float, bool, str, bytes, complex, type(None)})
"""Classes of most values of a large state; none of these values contains others."""


def named_tensors(state: Any) -> list[tuple[str, torch.Tensor]]:
    """Return each tensor in a state's containers with its path; twice if in two places."""
    return named_values(state, (torch.Tensor,))


def named_values(
    state: Any,
    wanted: tuple[type, ...],
    above: str = "",
    take: Callable[[Any, list[Any]], bool] | None = None,
) -> list[tuple[str, Any]]:
    """Return each value of the wanted classes with its path; the walk does not go into these.

    Nor does it go into what ``take`` returns true for, given a value and its keys.
    """
    if isinstance(state, wanted):
        return [(above, state)]
    found: list[tuple[str, Any]] = []
    _find_values(state, wanted, [above] if above else [], set(), found, take)
    return found


def _find_values(
    value: Any,
    wanted: tuple[type, ...],
    keys: list[Any],
    inside: set[int],
    found: list[tuple[str, Any]],
    take: Callable[[Any, list[Any]], bool] | None,
) -> None:
    if take is not None and take(value, keys):
        return
    items = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | list | tuple) and LEAVES.issuperset(map(type, items)):
        return
    children = children_of(value)
    if children is None or id(value) in inside:
        return
    inside.add(id(value))
    keys.append(None)
    for key, child in children:
        if type(child) in LEAVES:
            continue
        keys[-1] = key
        if isinstance(child, wanted):
            found.append((joined(keys), child))
        elif not isinstance(child, torch.Tensor):
            _find_values(child, wanted, keys, inside, found, take)
    keys.pop()
    inside.discard(id(value))


def joined(keys: Iterable[Any]) -> str:
    """Join keys to the dotted path of a value in a state."""
    path = ""
    for key in keys:
        path = f"{path}.{key}" if path else str(key)
    return path


def prefix_in(name: str, names: Container[str]) -> str | None:
    """Return the longest of some names that a name is, or is below; all are below ``""``."""
    while name not in names:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return name


def children_of(value: Any) -> Iterator[tuple[Any, Any]] | None:
    """Return the keys and members of a dict, list, tuple or dataclass; ``None`` for others."""
    if isinstance(value, dict):
        return iter(value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return zip(value._fields, value, strict=True)
    if isinstance(value, (list, tuple)):
        return iter(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
    return None


def merged_values(one: Any, other: Any) -> Any:
    """Merge nested dicts and lists that differ between ranks; of other values the first counts."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one | {key: merged_values(one.get(key), member) for key, member in other.items()}
    if type(one) is list and type(other) is list:
        members = map(merged_values, one, other)
        return [*members, *one[len(other) :], *other[len(one) :]]
    return other if one is None else one


def with_children(container: Any, children: Mapping[Any, Any]) -> Any:
    """Return a copy of a container with other members in places of :func:`children_of`."""
    if isinstance(container, tuple):
        members = list(container)
        fields = getattr(container, "_fields", range(len(members)))
        for key, child in children.items():
            members[fields.index(key)] = child
        return getattr(container, "_make", type(container))(members)
    return _filled(copy.copy(container), children)


def _filled(container: Any, children: Mapping[Any, Any]) -> Any:
    for key, child in children.items():
        if isinstance(container, dict | list):
            container[key] = child
        else:
            # The class's own __setattr__ raises if the dataclass is frozen.
            object.__setattr__(container, key, child)
    return container


def map_tensors(state: Any, replace: Callable[[Any], Any], leaf: type = torch.Tensor) -> Any:
    """Copy the containers of ``state``, each once, with values of type ``leaf`` replaced."""
    return _map(state, replace, leaf, {})


def _map(value: Any, replace: Callable[[Any], Any], leaf: type, done: dict[int, Any]) -> Any:
    # A nested function that calls itself would keep the values until a garbage collection.
    if isinstance(value, leaf):
        return replace(value)
    if id(value) in done:
        return done[id(value)]
    members = children_of(value)
    if members is None:
        return value
    if isinstance(value, tuple):
        children = {key: _map(child, replace, leaf, done) for key, child in members}
        return done.setdefault(id(value), with_children(value, children))
    # Noted before its members, of which one may hold it.
    result = done[id(value)] = copy.copy(value)
    return _filled(result, {key: _map(child, replace, leaf, done) for key, child in members})
