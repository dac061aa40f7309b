"""Markers in a state: around what is equal on several ranks, and around parts of global tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from localckpt.state_dict.containers import map_tensors, named_values


@dataclass(frozen=True, slots=True)
class Replicated:
    """Part of a state whose tensors are equal on several ranks.

    Attributes:
        ranks: The ranks of the job whose parts are equal, in ascending order.
    """

    value: Any
    ranks: Sequence[int]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Plain tensor of a state, saved as such, that is a part of the global tensor of a ``key``.

    The attributes are those of Megatron-Core's ShardedTensor.
    """

    data: torch.Tensor
    key: str
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    prepend_axis_num: int = 0


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
