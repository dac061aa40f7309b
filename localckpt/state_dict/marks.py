"""Python attributes of tensors, such as ``parameter.tensor_model_parallel``.

Public ones with plain data are saved with the tensor. Others belong to the program that set them;
torch and its frameworks keep internal state under names with an underscore.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_LEAVES = (
    *(type(None), bool, int, float, complex, str, bytes),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)
_CONTAINERS = (list, tuple, set, frozenset)


def marks_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the attributes of a tensor that are saved with it."""
    # A short cut for most tensors, since training waits for this.
    if not tensor.__dict__:
        return {}
    return {name: value for name, value in _attributes(tensor) if _is_data(value)}


def unsaved_marks(tensor: torch.Tensor) -> dict[str, type]:
    """Return the public attributes of a tensor that are not saved, with their classes."""
    saved = marks_of(tensor)
    return {name: type(value) for name, value in _attributes(tensor) if name not in saved}


def set_marks(tensor: torch.Tensor, marks: Mapping[str, Any]) -> None:
    if not isinstance(tensor, torch.Tensor) or type(marks) is not dict:
        raise TypeError(f"attributes of a tensor are set on a {type(tensor).__name__}")
    for name, value in marks.items():
        if type(name) is not str or name[:1] == "_" or not _is_data(value):
            raise TypeError(f"an attribute {name!r} of a tensor is a {type(value).__name__}")
    vars(tensor).update(marks)


def _attributes(tensor: torch.Tensor) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(tensor).items() if name[:1] != "_"]


def _is_data(value: Any) -> bool:
    waiting, seen = [value], set()
    while waiting:
        item = waiting.pop()
        if type(item) in _LEAVES or id(item) in seen:
            continue
        # Each container is visited once: a small pickle can describe endlessly nested ones.
        seen.add(id(item))
        if type(item) is dict:
            waiting += [*item.keys(), *item.values()]
        elif type(item) in _CONTAINERS:
            waiting += item
        else:
            return False
    return True
