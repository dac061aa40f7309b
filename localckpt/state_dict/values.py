"""Values of a saved state that belong to no global tensor, read without making its tensors.

The skeleton, whose DTensors name a mesh of ranks that are not there, is read with placeholders for
tensors. Values are known by their places, and have digests that are equal in all processes.
"""

from __future__ import annotations

import inspect
import io
import struct
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import torch
import xxhash

from localckpt.errors import CheckpointingException, RestoreError
from localckpt.failure_texts import with_class
from localckpt.memory.tensor_bytes import composing, flat_bytes
from localckpt.state_dict.basic import TensorAwareStateDict
from localckpt.state_dict.containers import (
    children_of,
    joined,
    map_tensors,
    named_values,
    prefix_in,
    with_children,
)
from localckpt.state_dict.global_view import megatron_classes
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.skeleton import checked_maker
from localckpt.state_dict.unpickler import Ignored, Unpickler

Place = tuple[Any, ...]
"""Keys and indices that lead from a state to a value in it."""


@dataclass(frozen=True, slots=True)
class Placeholder:
    """Stands for a tensor, or for a value that is made of the tensors of some ``numbers``."""

    numbers: tuple[int, ...]
    is_dtensor: bool = False


class Unit(NamedTuple):
    """Value, or placeholder of a tensor, that is given, kept or dropped as a whole."""

    place: Place
    value: Any

    @property
    def key(self) -> str:
        return joined(self.place)


def root_of(state: Any) -> Any:
    """Return the containers of a state; of a wrapper those in it."""
    if not isinstance(state, TensorAwareStateDict):
        return state
    inside = vars(state)
    return inside.get("state_dict", inside)


def read_tree(
    skeleton: bytes, allowed: SafeGlobals, tensor: Callable[[int], torch.Tensor | None]
) -> Any:
    """Rebuild the object graph of a checked skeleton, with placeholders for no tensor."""

    def find(module: str, name: str) -> Any:
        found = allowed.find(module, name)
        if module.startswith("torch.distributed"):
            # Meshes and placements of ranks that are not there.
            return Ignored
        if name in _MAKES_TENSORS.get(module, ()):
            # A rank may have no shard of a ShardedTensor.
            is_tensor = module == "localckpt.state_dict.sharded"
            make = checked_maker(found)
            return lambda *arguments: _made_of(arguments, make, is_tensor=is_tensor)
        return _leave if module == "localckpt.state_dict.marks" else found

    def tensor_or_placeholder(number: int) -> Any:
        value = tensor(number)
        return Placeholder((number,)) if value is None else value

    try:
        return Unpickler(io.BytesIO(skeleton), find, tensor_or_placeholder).load()
    except CheckpointingException:
        raise
    except Exception as error:
        raise RestoreError(
            f"the values of the state cannot be rebuilt: {with_class(error)}"
        ) from error


_MAKES_TENSORS = {
    "torch._tensor": ("_rebuild_from_type_v2",),
    "torch._utils": ("_rebuild_sparse_tensor", "_rebuild_wrapper_subclass"),
    "localckpt.state_dict.skeleton": ("_restore_subclass",),
    "localckpt.state_dict.sharded": ("restore_sharded",),
}


def _leave(*_: Any) -> None:
    """Replace the call that gives attributes to a tensor."""


def _made_of(arguments: Sequence[Any], make: Callable[..., Any], *, is_tensor: bool) -> Any:
    """A placeholder for a tensor, or a value that is made of placeholders; else the value."""
    match arguments:
        # A short cut for nearly all, DTensors without attributes: a restart waits for this.
        case _, _, _, (None, {"_local_tensor": Placeholder() as local, "_spec": Ignored()}):
            return Placeholder(local.numbers, is_dtensor=True)
    found = [part for _, part in named_values(arguments, (Placeholder, Ignored))]
    numbers = [n for part in found if isinstance(part, Placeholder) for n in part.numbers]
    if not (found or is_tensor):
        return make(*arguments)
    return Placeholder(tuple(numbers), any(isinstance(part, Ignored) for part in found))


def units_of(
    root: Any, boxed: Callable[[int], bool], rules: Collection[str]
) -> tuple[list[Unit], list[Unit]]:
    """Divide the values of a state that belong to no global tensor, by key prefixes of rules.

    Returns values that a rule is for, each the whole value at the key of the rule where that holds
    no part of a global tensor; and all others, the largest that hold no tensor, or one tensor.
    """
    ruled: list[Unit] = []
    others: list[Unit] = []
    megatron = megatron_classes()
    above_rules = above(rules)

    def divide(place: Place, value: Any) -> None:
        if isinstance(value, Placeholder):
            if not all(map(boxed, value.numbers)):
                (others if prefix_in(joined(place), rules) is None else ruled).append(
                    Unit(place, value)
                )
            return
        if isinstance(value, megatron):
            inner = value.data
            if isinstance(inner, Placeholder):
                divide((*place, "data"), inner)
            return
        held = [part for _, part in named_values(value, (Placeholder,))]
        key = joined(place)
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


def with_tensors(value: Any, tensor: Callable[[int], torch.Tensor]) -> Any:
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


def left_as_given(
    state: Any, parts: Container[str], keys: Collection[str]
) -> tuple[list[Unit], frozenset[str]]:
    """Find values that are not loaded, and the parts of which all stays: they would lack some."""
    on_the_way = above(keys)
    found: dict[str, Unit] = {}

    def find(value: Any, place: Place) -> None:
        if (key := joined(place)) in keys and place:
            found[key] = Unit(place, value)
        if key in on_the_way:
            for name, child in children_of(value) or ():
                find(child, (*place, name))

    find(state, ())
    whole = {prefix_in(key, parts) for key in keys if key in parts or key not in found}
    return list(found.values()), frozenset(part for part in whole if part is not None)


def placed(root: Any, units: Sequence[Unit], above: Place = ()) -> Any:
    """Return the part of a state at a place with values in it, in copies of its containers."""
    below: dict[Any, list[Unit]] = {}
    for place, value in units:
        if not place:
            return value
        below.setdefault(place[0], []).append(Unit(place[1:], value))
    children = dict(children_of(root) or ())
    changed = {}
    for key, inner in below.items():
        deeper = next((place for place, _ in inner if place), ())
        # A dict may get new members, but what is not there has no place for others.
        if key not in children and (deeper or not isinstance(root, dict)):
            raise LookupError(joined((*above, key, *deeper)))
        changed[key] = placed(children.get(key), inner, (*above, key))
    return with_children(root, changed) if changed else root


# Deeper values are unequal to all others: rather an error that names them than no end.
_MAX_DEPTH = 200
_PLAIN = (bool, int, str, bytes, type(None))


def digest_of(value: Any, of_placeholder: Callable[[Placeholder], str]) -> str:
    return str(_digest(value, of_placeholder, 0).hexdigest())


def _digest(value: Any, of_placeholder: Callable[[Placeholder], str], depth: int) -> Any:
    kind = type(value)
    hasher = xxhash.xxh3_64(f"{kind.__module__}.{kind.__qualname__}|".encode())
    if depth > _MAX_DEPTH:
        hasher.update(str(id(value)).encode())
        return hasher

    def inner(part: Any) -> bytes:
        return bytes(_digest(part, of_placeholder, depth + 1).digest())

    if kind is float:
        hasher.update(struct.pack("<d", value))
    elif kind is str:
        hasher.update(value.encode(errors="surrogatepass"))
    elif kind is bytes:
        hasher.update(value)
    elif kind in _PLAIN:
        hasher.update(repr(value).encode())
    elif kind is Placeholder:
        hasher.update(of_placeholder(value).encode())
    elif isinstance(value, torch.Tensor):
        _add_tensor(hasher, value)
    elif isinstance(value, torch.Generator):
        hasher.update(str(value.device).encode())
        _add_tensor(hasher, value.get_state())
    elif kind is numpy.ndarray and not value.dtype.hasobject:
        hasher.update(f"{value.dtype.str}{value.shape}".encode())
        hasher.update(numpy.ascontiguousarray(value).tobytes())
    elif isinstance(value, dict) and not hasattr(value, "__dict__"):
        for item in sorted(inner(key) + inner(member) for key, member in value.items()):
            hasher.update(item)
    elif kind in (set, frozenset):
        for item in sorted(map(inner, value)):
            hasher.update(item)
    elif kind in (list, tuple) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        for member in value:
            hasher.update(inner(member))
    elif isinstance(value, type) or inspect.isroutine(value):
        hasher.update(f"{value.__module__}.{value.__qualname__}".encode())
    else:
        _add_object(hasher, value, inner)
    return hasher


def _add_object(hasher: Any, value: Any, inner: Callable[[Any], bytes]) -> None:
    """Add an object by what pickle would make it of."""
    reduced = value.__reduce_ex__(4)
    if isinstance(reduced, str):
        hasher.update(reduced.encode())
        return
    make, arguments, *rest = (*reduced, None, None, None)[:5]
    hasher.update(f"{make.__module__}.{make.__qualname__}".encode())
    members = [] if rest[1] is None else list(rest[1])
    items = [] if rest[2] is None else dict(rest[2])
    for part in (tuple(arguments), rest[0], members, items):
        hasher.update(inner(part))


def _add_tensor(hasher: Any, tensor: torch.Tensor) -> None:
    shape = tensor.numel() if tensor.is_nested else tuple(tensor.shape)
    hasher.update(f"{tensor.dtype}{shape}{tensor.layout}".encode())
    if tensor.is_meta:
        return
    if (parts := composing(tensor)) is not None:
        for part in parts:
            _add_tensor(hasher, part)
        return
    run = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    hasher.update(flat_bytes(run).numpy())
