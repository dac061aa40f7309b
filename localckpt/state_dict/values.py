"""Values of a saved state that belong to no global tensor, read without making its tensors.

A state that another number of ranks saved cannot be rebuilt: its DTensors name a mesh of ranks that
are not there. Its skeleton is read with a placeholder for each tensor, and for each value that is
made of tensors; what is left are values, by their places in the containers.
"""

from __future__ import annotations

import copy
import io
import pickle
import sys
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple

import torch

from localckpt.errors import CheckpointingException, RestoreError
from localckpt.failure_texts import with_class
from localckpt.state_dict.basic import TensorAwareStateDict
from localckpt.state_dict.containers import (
    LEAVES,
    children_of,
    joined,
    map_tensors,
    named_values,
    prefix_in,
)
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.skeleton import checked_maker

__all__ = [
    "Ignored",
    "Place",
    "Placeholder",
    "Unit",
    "above",
    "found_at",
    "key_of",
    "left_as_given",
    "placed",
    "read_tree",
    "root_of",
    "units_of",
    "with_tensors",
]

Place = tuple[Any, ...]
"""Keys and indices that lead from a state to a value in it."""


@dataclass(frozen=True, slots=True)
class Placeholder:
    """Stands for a tensor, or for a value that is made of tensors.

    Attributes:
        numbers: Numbers of the tensors in the image; none for a ShardedTensor without shards.
        is_dtensor: True for the local tensor of a DTensor.
    """

    numbers: tuple[int, ...]
    is_dtensor: bool = False


class Unit(NamedTuple):
    """Value that is given, kept or dropped as a whole.

    Attributes:
        place: Place in the state.
        value: The value; a :class:`Placeholder` for a tensor that the table of boxes does not have.
    """

    place: Place
    value: Any

    @property
    def key(self) -> str:
        """Dotted path of the value."""
        return key_of(self.place)


def key_of(place: Place) -> str:
    """Return the dotted path of a place in a state."""
    return joined(place)


def root_of(state: Any) -> Any:
    """Return the containers of a state; of a wrapper those in it."""
    if not isinstance(state, TensorAwareStateDict):
        return state
    inside = vars(state)
    return inside.get("state_dict", inside)


def read_tree(
    skeleton: bytes, allowed: SafeGlobals, tensor: Callable[[int], torch.Tensor | None]
) -> Any:
    """Rebuild the object graph of a skeleton that was checked, with placeholders in it.

    Args:
        skeleton: The pickle.
        allowed: Allow-list for the classes and functions in the pickle.
        tensor: Returns the tensor of a number; ``None`` for a placeholder.

    Raises:
        UnsafeGlobalError: The pickle names a class or function that is not allowed.
        RestoreError: An object cannot be made.
    """
    try:
        return _TreeUnpickler(io.BytesIO(skeleton), allowed, tensor).load()
    except CheckpointingException:
        raise
    except Exception as error:
        raise RestoreError(
            f"the values of the state cannot be rebuilt: {with_class(error)}"
        ) from error


class _TreeUnpickler(pickle.Unpickler):
    def __init__(
        self,
        file: io.BytesIO,
        allowed: SafeGlobals,
        tensor: Callable[[int], torch.Tensor | None],
    ) -> None:
        super().__init__(file)
        self._allowed = allowed
        self._tensor = tensor

    def find_class(self, module: str, name: str) -> Any:
        found = self._allowed.find(module, name)
        if module.startswith("torch.distributed"):
            # Meshes and placements of ranks that are not there.
            return Ignored
        if name in _MAKES_TENSORS.get(module, ()):
            # A rank may have no shard of a ShardedTensor.
            is_tensor = module == "localckpt.state_dict.sharded"
            make = checked_maker(found)
            return lambda *arguments: _made_of(arguments, make, is_tensor=is_tensor)
        if module == "localckpt.state_dict.marks":
            return _leave
        return found

    def persistent_load(self, pid: Any) -> Any:
        tensor = self._tensor(pid)
        return Placeholder((pid,)) if tensor is None else tensor


_MAKES_TENSORS = {
    "torch._tensor": ("_rebuild_from_type_v2",),
    "torch._utils": (
        *("_rebuild_sparse_tensor", "_rebuild_nested_tensor", "_rebuild_wrapper_subclass"),
    ),
    "localckpt.state_dict.skeleton": ("_restore_subclass",),
    "localckpt.state_dict.sharded": ("restore_sharded",),
}


class Ignored:
    """Stands for an object that is made and never looked at."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass

    def __setitem__(self, _: Any, __: Any) -> None:
        pass

    def add(self, _: Any) -> None:
        pass

    def append(self, _: Any) -> None:
        pass

    def extend(self, _: Any) -> None:
        pass


def _leave(*_: Any) -> None:
    """Replace the call that gives attributes to a tensor."""


def _made_of(arguments: Sequence[Any], make: Callable[..., Any], *, is_tensor: bool) -> Any:
    """A placeholder for a tensor, or a value that is made of placeholders; else the value."""
    match arguments:
        # A short cut for nearly all, DTensors without attributes: a restart waits for this.
        case _, _, _, (None, {"_local_tensor": Placeholder() as local, "_spec": Ignored()}):
            return Placeholder(local.numbers, is_dtensor=True)
    found: list[Placeholder | Ignored] = []
    _find_parts(arguments, set(), found)
    numbers = [n for part in found if isinstance(part, Placeholder) for n in part.numbers]
    if not (found or is_tensor):
        return make(*arguments)
    return Placeholder(tuple(numbers), any(isinstance(part, Ignored) for part in found))


# Of what a DTensor is made, the values that are no containers.
_NO_PARTS = LEAVES | {type, FunctionType, torch.dtype, torch.layout, torch.device}


def _find_parts(value: Any, inside: set[int], found: list[Placeholder | Ignored]) -> None:
    """Find as :func:`named_values` does; without paths, as it is called for each DTensor."""
    kind = type(value)
    children: Iterable[Any]
    if kind is tuple or kind is list:
        children = value
    elif kind is dict:
        children = value.values()
    elif (members := children_of(value)) is not None:
        children = [child for _, child in members]
    else:
        return
    if id(value) in inside:
        return
    inside.add(id(value))
    for child in children:
        kind = type(child)
        if kind is Placeholder or kind is Ignored:
            found.append(child)
        elif kind not in _NO_PARTS:
            _find_parts(child, inside, found)
    inside.discard(id(value))


def units_of(
    root: Any, boxed: Callable[[int], bool], rules: Collection[str]
) -> tuple[list[Unit], list[Unit]]:
    """Divide the values of a state that belong to no global tensor.

    Args:
        root: Containers of the state, with placeholders.
        boxed: Whether the tensor of a number is a part of a global tensor.
        rules: Key prefixes that values below are to be taken together for.

    Returns:
        Values that a rule is for, each the whole value at the key of the rule where that holds no
        part of a global tensor; and all others, the largest that hold no tensor, or one tensor.
    """
    ruled: list[Unit] = []
    others: list[Unit] = []
    megatron = _megatron_classes()
    above_rules = above(rules)

    def divide(place: Place, value: Any) -> None:
        if isinstance(value, Placeholder):
            if not all(map(boxed, value.numbers)):
                (others if prefix_in(key_of(place), rules) is None else ruled).append(
                    Unit(place, value)
                )
            return
        if isinstance(value, megatron):
            inner = value.data
            if isinstance(inner, Placeholder):
                divide((*place, "data"), inner)
            return
        held = [part for _, part in named_values(value, (Placeholder,))]
        key = key_of(place)
        rule = prefix_in(key, rules)
        is_private = not any(boxed(n) for part in held for n in part.numbers)
        if rule is not None and is_private and (key == rule or not held):
            ruled.append(Unit(place, value))
            return
        below = key in above_rules
        children = None if value is None else children_of(value)
        if children is None or not (held or below):
            others.append(Unit(place, value))
            return
        members = list(children)
        if not members:
            others.append(Unit(place, value))
        for name, child in members:
            divide((*place, name), child)

    divide((), root)
    return ruled, others


def _megatron_classes() -> tuple[Any, ...]:
    module = sys.modules.get("megatron.core.dist_checkpointing.mapping")
    return () if module is None else (module.ShardedTensor,)


def with_tensors(value: Any, tensor: Callable[[int], torch.Tensor]) -> Any:
    """Return a value with tensors in place of its placeholders.

    Raises:
        RestoreError: A value in it is made of several tensors.
    """

    def replace(part: Placeholder) -> torch.Tensor:
        if len(part.numbers) != 1:
            raise RestoreError("a value made of several tensors cannot be rebuilt by itself")
        return tensor(part.numbers[0])

    return map_tensors(value, replace, Placeholder)


def above(names: Iterable[str]) -> set[str]:
    """Return all that some dotted names are below."""
    found: set[str] = set()
    for name in names:
        while name and (name := name.rpartition(".")[0]) not in found:
            found.add(name)
    return found


def found_at(root: Any, keys: Collection[str]) -> dict[str, Unit]:
    """Return the values at dotted paths of a state, by these, where there are any."""
    on_the_way = above(keys)
    found: dict[str, Unit] = {}

    def find(value: Any, place: Place) -> None:
        if (key := key_of(place)) in keys and place:
            found[key] = Unit(place, value)
        if key in on_the_way:
            for name, child in children_of(value) or ():
                find(child, (*place, name))

    find(root, ())
    return found


def left_as_given(
    state: Any, parts: Container[str], keys: Collection[str]
) -> tuple[list[Unit], frozenset[str]]:
    """Find what stays as it is in a state that is loaded into.

    Args:
        state: The state.
        parts: Names of its parts.
        keys: Keys of the values that are not loaded.

    Returns:
        These values; and the parts of which all stays, since their states would lack something.
    """
    found = found_at(state, keys)
    whole = {prefix_in(key, parts) for key in keys if key in parts or key not in found}
    return list(found.values()), frozenset(part for part in whole if part is not None)


def placed(root: Any, units: Sequence[Unit]) -> Any:
    """Return the containers of a state with values in their places, in copies of containers.

    Args:
        root: The containers; they are not changed.
        units: The values.

    Raises:
        LookupError: The containers have no such place; its text is the place's key.
    """
    return _placed(root, units, ())


def _placed(root: Any, units: Sequence[Unit], above: Place) -> Any:
    """Return a part of a state with values in their places; ``above`` is the part's place."""

    def lacking(key: Any) -> LookupError:
        return LookupError(key_of((*above, key)))

    below: dict[Any, list[Unit]] = {}
    for place, value in units:
        if not place:
            return value
        below.setdefault(place[0], []).append(Unit(place[1:], value))
    if not below:
        return root
    if isinstance(root, dict):
        result = copy.copy(root)
        for key, inner in below.items():
            if key not in root and (deeper := next((p for p, _ in inner if p), None)):
                raise lacking(key_of((key, *deeper)))
            result[key] = _placed(root.get(key), inner, (*above, key))
        return result
    if isinstance(root, list | tuple) and not hasattr(root, "_fields"):
        members = list(root)
        for key, inner in below.items():
            if type(key) is not int or not 0 <= key < len(members):
                raise lacking(key)
            members[key] = _placed(members[key], inner, (*above, key))
        return members if isinstance(root, list) else tuple(members)
    if names := getattr(root, "_fields", ()):
        if unknown := sorted(map(str, below.keys() - set(names))):
            raise lacking(unknown[0])
        fields = {
            key: _placed(getattr(root, str(key)), inner, (*above, key))
            for key, inner in below.items()
        }
        return type(root)(*(fields.get(key, getattr(root, key)) for key in names))
    if children_of(root) is None:
        raise lacking(next(iter(below)))
    result = copy.copy(root)
    for key, inner in below.items():
        if not hasattr(root, str(key)):
            raise lacking(key)
        object.__setattr__(result, key, _placed(getattr(root, key), inner, (*above, key)))
    return result
