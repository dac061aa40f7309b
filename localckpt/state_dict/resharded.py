"""Tensors of a state that is filled with parts of saved shards, whatever ranks saved them.

Its free parts are made anew from outlines: containers as they were saved, of meta tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from localckpt.errors import MismatchError
from localckpt.memory.tensor_bytes import copy_values, integer_view, is_flat, narrowed
from localckpt.state_dict.basic import PlainState, TensorAwareStateDict
from localckpt.state_dict.boxes import Box, Rectangle, local_starts, private_box
from localckpt.state_dict.containers import (
    children_of,
    joined,
    map_tensors,
    merged_values,
    named_tensors,
    named_values,
    with_children,
)
from localckpt.state_dict.replicated import Replicated, without_marker, without_markers
from localckpt.state_dict.stateful import Freedom, ParametersOfStates, TensorKind
from localckpt.state_dict.targets import find_overlaps, find_targets
from localckpt.state_dict.values import Placeholder, Unit, above, placed, root_of


class WantedTensor(NamedTuple):
    """Tensor that is to be filled, and the part of a global tensor that it is."""

    box: Box
    tensor: torch.Tensor

    @property
    def key(self) -> str:
        return self.box.key

    @property
    def dtype(self) -> str:
        return str(self.tensor.dtype).removeprefix("torch.")

    def place_of(self, rectangle: Rectangle) -> torch.Tensor:
        """View a rectangle of the global tensor in this one."""
        local = self.tensor.detach()
        local = local[(None,) * (len(self.box.shape) - local.dim())]
        return narrowed(local, local_starts(self.box.runs, *rectangle), rectangle.sizes)


def find_wanted(state: Any) -> list[WantedTensor]:
    """Find the tensors of a state that can be filled; those of which no part is known are whole."""
    targets = find_targets(state)
    wanted = []
    private: set[str] = set()
    for tensor in targets.tensors:
        if tensor.is_meta:
            continue
        if (box := targets.boxes.get(id(tensor))) is not None:
            wanted.append(WantedTensor(box, tensor))
        elif (key := targets.names.get(id(tensor))) is not None:
            require_one(key, private)
            wanted.append(WantedTensor(private_box(key, tensor.shape), tensor))
    return wanted


def beside(
    wanted: Sequence[WantedTensor], saved_as: Mapping[str, str], expanded: Collection[str]
) -> tuple[list[WantedTensor], list[tuple[WantedTensor, torch.Tensor]]]:
    """Put new tensors in the places of those that are expanded, or were saved in another dtype.

    Returns the tensors to fill, and pairs of a tensor and the new one whose values it then takes.
    """
    result, pairs = [], []
    for one in wanted:
        dtype, given = saved_as.get(one.key, one.dtype), one.tensor
        if is_expanded(given) and one.key not in expanded:
            raise MismatchError(
                f"the state to load into was left as it is: items of {one.key!r} share memory, as "
                f"expand() makes them, and were saved apart. Give a clone() of it"
            )
        if dtype != one.dtype or is_expanded(given):
            values = torch.empty(given.shape, dtype=getattr(torch, dtype), device=given.device)
            pairs.append((one, values))
            one = one._replace(tensor=values)
        result.append(one)
    return result, pairs


def take_values(pairs: Iterable[tuple[WantedTensor, torch.Tensor]]) -> None:
    # Else tensors that were made in inference mode could not be changed.
    with torch.inference_mode():
        for one, values in pairs:
            given = one.tensor
            for dim, (size, stride) in enumerate(zip(given.shape, given.stride(), strict=True)):
                if size > 1 and not stride:
                    first, items = values.narrow(dim, 0, 1), integer_view(values)
                    if not torch.equal(items, integer_view(first).expand_as(items)):
                        raise MismatchError(
                            f"items of {one.key!r} share memory, as expand() makes them, and were "
                            f"saved with different values. Other tensors are filled. Give a "
                            f"clone() of it"
                        )
                    given, values = given.narrow(dim, 0, 1), first
            if given.dtype == values.dtype:
                copy_values(given, values)
            else:
                given.copy_(values)


def require_one(key: str, found: set[str]) -> None:
    """Note the path of a tensor."""
    if key in found:
        raise MismatchError(
            f"{key!r} is the path of two tensors, as keys with dots in them, or numbers beside "
            f"their texts, make it: only as many ranks as have saved them, with the same sharding, "
            f"can load them. Nothing was changed. Save them under other keys"
        )
    found.add(key)


def is_expanded(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and any(
        size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def overlapping_keys(wanted: Sequence[WantedTensor]) -> list[tuple[str, str]]:
    return find_overlaps((w.key, w.tensor) for w in wanted if is_flat(w.tensor))


def with_values(state: TensorAwareStateDict, units: Sequence[Unit]) -> Any:
    """Return a state with saved values in their places, in copies of its own containers."""
    try:
        root = placed(without_markers(root_of(state)), units)
    except LookupError as error:
        raise MismatchError(
            f"the state to load into differs from the saved one, and was left as it is: it has no "
            f"place for {error}, a value that was saved. Give a state whose containers are at "
            f"least those of the saved one"
        ) from error
    if isinstance(state, PlainState):
        return PlainState(root)
    result = copy.copy(state)
    if "state_dict" in vars(state):
        vars(result)["state_dict"] = root
    else:
        vars(result).update(root)
    return result


def outlines_of(
    root: Any, free: Freedom, rules: Collection[str], kind_of: Callable[[int], TensorKind]
) -> list[Unit]:
    """Outline the free parts of a saved state.

    ``rules`` are key prefixes of values that the caller has a rule for, and ``kind_of`` returns the
    dtype and the global shape of the tensor of a number.
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
        is_divided = joined(place) in above_rules
        children = children_of(value)
        if children is None or not (is_divided or named_values(value, (Placeholder,))):
            return None
        return with_children(value, {k: outline(child, (*place, k)) for k, child in children})

    found: list[Unit] = []

    def find(value: Any, place: tuple[Any, ...]) -> None:
        if place and free.covers(joined(place)):
            found.append(Unit(place, outline(value, place)))
        elif isinstance(value, dict):
            for key, child in value.items():
                find(child, (*place, key))

    find(root, ())
    return found


def values_below(root: Any, free: Freedom, is_value: Callable[[int], bool]) -> set[int]:
    """Return the numbers of tensors that are loaded as values, in free parts of a saved state.

    Those are the tensors that others are made of, and those for which ``is_value`` holds.
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
            of_places[place] = merged_values(of_places.get(place), outline)
    return [Unit(place, outline) for place, outline in of_places.items()]


def with_outlines(
    state: Any, outlines: Iterable[Unit], free: Freedom, parameters: ParametersOfStates
) -> Any:
    """Return a state to load into whose free parts are as they were saved, in new containers.

    A tensor is the given one, if that has the saved dtype and shape and its memory to itself; else
    it is a new one, sharded as the parameter of its key is.
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
        for name, saved in named_tensors({joined(place): outline}):
            if id(saved) not in made:
                made[id(saved)] = target(name, saved)
        units.append(Unit(place, map_tensors(outline, lambda saved: made[id(saved)])))
    return _replaced(state, units, free)


def _is_plain(tensor: torch.Tensor) -> bool:
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_meta
    return is_plain and tensor.layout is torch.strided and not is_expanded(tensor)


def _replaced(state: Mapping[Any, Any], units: Iterable[Unit], free: Freedom) -> dict[Any, Any]:
    result = dict(state)
    of_keys: dict[Any, list[Unit]] = {}
    for (key, *names), value in units:
        of_keys.setdefault(key, []).append(Unit(tuple(names), value))
    for key, parts in of_keys.items():
        own = without_marker(state[key])
        if isinstance(own, Mapping) and not free.covers(joined((key,))):
            own = {n: v for n, v in own.items() if not free.covers(joined((key, n)))}
        value = placed(own, parts)
        marker = state[key]
        is_marked = isinstance(marker, Replicated)
        result[key] = Replicated(value, marker.ranks) if is_marked else value
    return result
