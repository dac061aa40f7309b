"""Names of the parts and values of a state, compared like the keys of its tensors before a load."""

from __future__ import annotations

import io
import json
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Any

import xxhash

from localckpt.state_dict.basic import BasicTensorAwareStateDict, PlainState
from localckpt.state_dict.replicated import given, without_marker, without_markers
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.stateful import Freedom
from localckpt.state_dict.unpickler import Ignored, Unpickler
from localckpt.state_dict.values import root_of

Names = dict[str, Any]
"""Names in a dict; below each those of a dict inside, else ``None``."""

# Names that are not compared by themselves: what a caller's own comparison goes by.
_BESIDE = "\0"
MODULE = "module"
"""Class of a part that is a module, of whatever class that is."""
CLASS, KEYS = f"{_BESIDE}class", f"{_BESIDE}keys"
"""Name of the class of a part, where a state has one; and of the keys of a free part's state."""
OURS = "localckpt"
"""Key of what a training loop saves beside the parts of its state."""
ABOUT, ORDER = f"{_BESIDE}about", f"{_BESIDE}order"
"""Name of what a caller says of the parts, by their names; and of the order of values in one."""
PATHS, OBJECTS = f"{_BESIDE}paths", f"{_BESIDE}objects"
"""Names of the paths of a planner's keys, and of the keys whose bytes it has made of objects."""
_MOST_KEYS = 1000

# What the dicts of a state are made of.
_CONTAINERS = (OrderedDict, defaultdict, PlainState, BasicTensorAwareStateDict, given)


def names_of(state: Any, free: Freedom) -> Names | None:
    """Return the names of a state, given by states; ``None`` unless its containers are dicts."""

    def names(value: Any, above: str) -> Names | None:
        value = without_marker(value)
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            return None
        paths = {key: f"{above}.{key}" if above else key for key in value}
        # Of a part that is free its own name counts, and what an optimizer must have.
        return {
            key: _outline(value[key]) if free.covers(path) else names(value[key], path)
            for key, path in paths.items()
            if not (above and free.covers(path))
        }

    return names(root_of(state), "")


def _outline(state: Any) -> Names | None:
    """Name the groups of an optimizer's state, and what each must have; else the keys."""
    state = without_markers(state)
    groups = state.get("param_groups") if isinstance(state, dict) else None
    if not isinstance(groups, list) or "state" not in state:
        is_small = isinstance(state, dict) and len(state) <= _MOST_KEYS
        return {KEYS: dict.fromkeys(map(str, state))} if is_small else None
    return {
        f"param_groups[{number}] of {len(group['params'])} parameters": {
            str(key): None for key in group.keys() - {"params"}
        }
        for number, group in enumerate(groups)
        if isinstance(group, dict) and isinstance(group.get("params"), list)
    }


def read_names(skeleton: bytes, allowed: SafeGlobals, free: Freedom) -> Names | None:
    """Read the names of a saved state from its skeleton, without making its objects."""

    def find(module: str, name: str) -> Any:
        found = allowed.find(module, name)
        return found if found in _CONTAINERS else Ignored

    return names_of(Unpickler(io.BytesIO(skeleton), find, lambda _: None).load(), free)


def digest_of_names(names: Names | None) -> str:
    """Digest of names, of which the order does not count."""
    return xxhash.xxh3_64_hexdigest(json.dumps(names, sort_keys=True).encode())


def only_in(
    names: Names, others: Names, *, is_strict: bool = False, above: str = ""
) -> Iterator[str]:
    """Yield the paths that others lack; a dict without names takes all unless ``is_strict``."""
    for key, below in names.items():
        if key.startswith(_BESIDE):
            continue
        inner = others.get(key)
        if key not in others:
            yield f"{above}{key}"
        elif below and (inner or (is_strict and inner is not None)):
            yield from only_in(below, inner, is_strict=is_strict, above=f"{above}{key}.")
