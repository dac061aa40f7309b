"""Marker around a part of a state that is equal on several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from localckpt.state_dict.containers import map_tensors, named_values


@dataclass(frozen=True, slots=True)
class Replicated:
    """Part of a state whose tensors are equal on several ranks.

    Attributes:
        ranks: The ranks of the job whose parts are equal, in ascending order.
    """

    value: Any
    ranks: Sequence[int]


def given(value: Any) -> Any:
    """Return a part of a state; in a pickle, the call that stands for a marker around it."""
    return value


def without_marker(value: Any) -> Any:
    """Return what a marker is around; other values as they are."""
    return value.value if isinstance(value, Replicated) else value


def without_markers(state: Any) -> Any:
    """Return a state with the marked parts in place of their markers, in copies of containers."""
    if isinstance(state, Replicated):
        return without_markers(state.value)
    if not named_values(state, (Replicated,)):
        return state
    return map_tensors(state, without_markers, Replicated)
