"""Refusal of a state that could not be loaded again, with the place of each reason in the state.

A save runs the checks of a load on the same bytes, and searches for places only when they fail.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy
import torch

from localckpt.errors import CheckpointingException, CorruptShardError, UnsafeGlobalError
from localckpt.state_dict.containers import children_of, joined
from localckpt.state_dict.pickles import MAX_DEPTH
from localckpt.state_dict.safe_globals import Name, SafeGlobals
from localckpt.state_dict.skeleton import Taken, take_tensors
from localckpt.state_dict.unpickler import check_skeleton

_MOST_LEVELS = 100
_MOST_PLACES = 50


def take_or_refuse(state: Any, allowed: SafeGlobals) -> Taken:
    """Split a state that is to be saved into skeleton and tensors."""
    try:
        return take_tensors(state)
    except CheckpointingException as error:
        raise _refusal(state, allowed, error) from error


def require_loadable(state: Any, skeleton: bytes, allowed: SafeGlobals) -> frozenset[Name]:
    """Check a skeleton as a load does, and return what the pickle names."""
    try:
        return _check(skeleton, allowed)
    except (UnsafeGlobalError, CorruptShardError) as error:
        raise _refusal(state, allowed, error) from None


def _check(skeleton: bytes, allowed: SafeGlobals) -> frozenset[Name]:
    # Before Python 3.14, the recursion limit also bounds how deep a pickler writes nested values.
    limited = sys.version_info < (3, 14) and sys.getrecursionlimit() <= MAX_DEPTH
    return check_skeleton(skeleton, allowed, depth_is_limited=limited).names


def _refusal(
    state: Any, allowed: SafeGlobals, error: CheckpointingException
) -> CheckpointingException:
    places: dict[Name | str, str] = {}
    _find(state, (), allowed, places, set())
    placed = {reason: f"{reason} (at {p!r})" if p else str(reason) for reason, p in places.items()}
    names = [reason for reason in places if isinstance(reason, Name)]
    others = [text for reason, text in placed.items() if isinstance(reason, str)]
    if not names and not others:
        return error
    texts = []
    if others:
        texts.append(f"the state cannot be saved: {'; '.join(others)}")
    if names:
        texts.append(str(allowed.refusal(names, [placed[name] for name in names])))
    kind = UnsafeGlobalError if names else CheckpointingException
    return kind(". Also, ".join(texts))


def _find(
    value: Any,
    keys: tuple[Any, ...],
    allowed: SafeGlobals,
    places: dict[Name | str, str],
    inside: set[int],
) -> frozenset[Name | str]:
    """Record the innermost place of each reason inside a value, and return all its reasons."""
    reasons = _reasons(value, allowed)
    if not reasons or id(value) in inside:
        return reasons
    noted: set[Name | str] = set()
    if len(keys) < _MOST_LEVELS:
        inside.add(id(value))
        for key, child in _parts_of(value):
            # Stop once every reason has a place. A value that cannot be pickled hides all reasons
            # behind it, so only names are known to be complete.
            is_noted = reasons <= noted and all(isinstance(reason, Name) for reason in reasons)
            if is_noted or len(places) >= _MOST_PLACES:
                break
            noted |= _find(child, (*keys, key), allowed, places, inside)
        inside.discard(id(value))
    for reason in sorted(reasons - noted, key=str):
        # The text of a part that cannot be pickled is recorded at that part, not again here.
        if isinstance(reason, Name) or not noted:
            places.setdefault(reason, joined(keys).removeprefix("state_dict."))
    return reasons


def _reasons(value: Any, allowed: SafeGlobals) -> frozenset[Name | str]:
    """Return the reasons why a value could not be loaded again; empty if it could."""
    try:
        taken = take_tensors(value)
        if taken.has_objects:
            _check(taken.skeleton, allowed)
    except UnsafeGlobalError as error:
        return frozenset(error.names)
    except CorruptShardError as error:
        return frozenset({f"{type(value).__name__} could not be loaded again ({error})"})
    except CheckpointingException as error:
        return frozenset({f"{type(value).__name__} cannot be pickled: {error.__cause__ or error}"})
    return frozenset()


def _parts_of(value: Any) -> Iterator[tuple[Any, Any]]:
    children = children_of(value)
    if children is not None:
        yield from children
    elif isinstance(value, set | frozenset):
        yield from enumerate(value)
    if isinstance(value, defaultdict):
        yield "default_factory", value.default_factory
    # Classes of arrays are refused as they are, whatever attributes they have.
    if not isinstance(value, type | torch.Tensor | numpy.ndarray) and isinstance(
        attributes := getattr(value, "__dict__", None), dict
    ):
        yield from attributes.items()
