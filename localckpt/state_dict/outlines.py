"""Outlines of the free parts of saved states: their containers, with a meta tensor for each tensor.

Another number of ranks makes its own free parts from them, exactly as they were saved: values and
tensors of what is given take part only where they are as the saved ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from localckpt.errors import MismatchError
from localckpt.memory.tensor_bytes import is_flat
from localckpt.state_dict.containers import children_of, map_tensors, named_tensors, named_values
from localckpt.state_dict.optimizer_states import ParametersOfStates
from localckpt.state_dict.replicated import Replicated, without_marker, without_markers
from localckpt.state_dict.resharded import is_expanded
from localckpt.state_dict.stateful import Freedom, TensorKind
from localckpt.state_dict.targets import find_overlaps
from localckpt.state_dict.values import Placeholder, Unit, above, key_of, placed

__all__ = ["merged", "outlines_of", "values_below", "with_outlines"]


def outlines_of(
    root: Any, free: Freedom, rules: Collection[str], kind_of: Callable[[int], TensorKind]
) -> list[Unit]:
    """Outline the free parts of a saved state.

    Args:
        root: Containers of the state, with placeholders.
        free: Names that are free.
        rules: Key prefixes of values that the caller has a rule for.
        kind_of: Returns the dtype and the global shape of the tensor of a number.
    """
    made: dict[int, torch.Tensor] = {}
    above_rules = above(rules)

    def tensor(placeholder: Placeholder) -> torch.Tensor | None:
        if len(placeholder.numbers) != 1:
            return None
        (number,) = placeholder.numbers
        if number not in made:
            dtype, shape = kind_of(number)
            made[number] = torch.empty(shape, dtype=dtype, device="meta")
        return made[number]

    def outline(value: Any, place: tuple[Any, ...]) -> Any:
        if isinstance(value, Placeholder):
            return tensor(value)
        is_divided = key_of(place) in above_rules
        children = children_of(value)
        if children is None or not (is_divided or named_values(value, (Placeholder,))):
            return None
        return _with_children(value, {k: outline(child, (*place, k)) for k, child in children})

    found: list[Unit] = []

    def find(value: Any, place: tuple[Any, ...]) -> None:
        if place and free.covers(key_of(place)):
            found.append(Unit(place, outline(value, place)))
        elif isinstance(value, dict):
            for key, child in value.items():
                find(child, (*place, key))

    find(root, ())
    return found


def values_below(root: Any, free: Freedom, is_value: Callable[[int], bool]) -> set[int]:
    """Return the numbers of tensors that are loaded as values, in free parts of a saved state.

    Those are the tensors that others are made of.

    Args:
        root: Containers of the state, with placeholders.
        free: Names that are free.
        is_value: Whether the tensor of a number is a value, too.

    Raises:
        MismatchError: A DTensor is made of several tensors: its part of them is not known.
    """
    numbers: set[int] = set()
    for path, placeholder in named_values(root, (Placeholder,)):
        if not free.covers(path):
            continue
        if len(placeholder.numbers) > 1:
            if placeholder.is_dtensor:
                raise MismatchError(
                    f"{path!r} is a DTensor of a class that is made of several tensors: only as "
                    f"many ranks as have saved it, with the same sharding, can load it. Nothing "
                    f"was changed"
                )
            numbers.update(placeholder.numbers)
        numbers.update(filter(is_value, placeholder.numbers))
    return numbers


def merged(outlines: Iterable[Sequence[Unit]]) -> list[Unit]:
    """Merge outlines that differ between the ranks that saved them."""
    of_places: dict[tuple[Any, ...], Any] = {}
    for units in outlines:
        for place, outline in units:
            of_places[place] = _merged(of_places.get(place), outline)
    return [Unit(place, outline) for place, outline in of_places.items()]


def with_outlines(
    state: Any, outlines: Iterable[Unit], free: Freedom, parameters: ParametersOfStates
) -> Any:
    """Return a state to load into whose free parts are as they were saved.

    A tensor is the given one, if that has the saved dtype and shape and its memory to itself; else
    it is a new one, sharded as the parameter of its key is.

    Args:
        state: States of the values to load into; its containers are not changed.
        outlines: Outlines of the free parts.
        free: Names that are free.
        parameters: Parameters that tensors belong to.
    """
    given = dict(named_tensors(without_markers(state)))
    local = {name: getattr(tensor, "_local_tensor", tensor) for name, tensor in given.items()}
    usable = {name for name, tensor in local.items() if _is_plain(tensor)}
    flat = ((name, local[name]) for name in usable if is_flat(local[name]))
    usable -= {name for pair in find_overlaps(flat) for name in pair}
    made: dict[int, torch.Tensor] = {}

    def target(key: str, saved: torch.Tensor) -> torch.Tensor:
        own = given.get(key)
        kind = saved.dtype, tuple(saved.shape)
        if own is not None:
            own_kind = own.dtype, tuple(own.shape)
            if (key in usable and own_kind == kind) or not free.allows(key, kind, own_kind):
                return own
        like = parameters.of(key)
        if like is not None and like.shape == saved.shape:
            return torch.empty_like(like.detach(), dtype=saved.dtype)
        return torch.empty(saved.shape, dtype=saved.dtype)

    units = []
    for place, outline in outlines:
        if place[0] not in state:
            continue
        for name, saved in named_tensors({key_of(place): outline}):
            if id(saved) not in made:
                made[id(saved)] = target(name, saved)
        units.append(Unit(place, map_tensors(outline, lambda saved: made[id(saved)])))
    return _replaced(state, units, free)


def _is_plain(tensor: torch.Tensor) -> bool:
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_meta
    return is_plain and tensor.layout is torch.strided and not is_expanded(tensor)


def _replaced(state: Mapping[Any, Any], units: Iterable[Unit], free: Freedom) -> dict[Any, Any]:
    """Return a state with other free parts, in copies of its containers."""
    result = dict(state)
    of_keys: dict[Any, list[Unit]] = {}
    for (key, *names), value in units:
        of_keys.setdefault(key, []).append(Unit(tuple(names), value))
    for key, parts in of_keys.items():
        own = without_marker(state[key])
        if isinstance(own, Mapping) and not free.covers(key_of((key,))):
            own = {n: v for n, v in own.items() if not free.covers(key_of((key, n)))}
        value = placed(own, parts)
        marker = state[key]
        is_marked = isinstance(marker, Replicated)
        result[key] = Replicated(value, marker.ranks) if is_marked else value
    return result


def _with_children(container: Any, children: Mapping[Any, Any]) -> Any:
    """Return a container of the same kind with other members."""
    return placed(container, [Unit((key,), child) for key, child in children.items()])


def _merged(one: Any, other: Any) -> Any:
    if isinstance(one, dict) and isinstance(other, dict):
        return one | {key: _merged(one.get(key), member) for key, member in other.items()}
    if type(one) is list and type(other) is list:
        members = map(_merged, one, other)
        return [*members, *one[len(other) :], *other[len(one) :]]
    return other if one is None else one
