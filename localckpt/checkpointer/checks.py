"""Check of a training state once it is captured: are its parameters finite, and the caller's own.

The check reads the memory that is about to be written, behind training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from localckpt.checkpointer.parts import ModulePart
from localckpt.state_dict.replicated import without_marker
from localckpt.state_dict.views import find_not_finite

__all__ = ["Check", "combined_check"]

Check = Callable[[Mapping[str, torch.Tensor]], str | None]


def combined_check(parts: Mapping[str, Any], check: Check | None, *, finite: bool) -> Check | None:
    """Return one check of all that is asked for; ``None`` if nothing is.

    Args:
        parts: Parts of the state by name; looked at when a state is checked.
        check: The caller's own.
        finite: Whether the parameters of all modules must be finite. Their buffers need not be: a
            mask is made of infinite values.
    """
    if not finite:
        return check

    def check_all(tensors: Mapping[str, torch.Tensor]) -> str | None:
        unmarked = {key: without_marker(part) for key, part in parts.items()}
        modules = {key: part for key, part in unmarked.items() if isinstance(part, ModulePart)}
        prefixes = tuple(f"{key}." for key in modules)
        buffers = {
            f"{key}.{name}"
            for key, part in modules.items()
            for name, _ in part.module.named_buffers()
        }
        parameters = {
            name: tensor
            for name, tensor in tensors.items()
            if name.startswith(prefixes) and name not in buffers
        }
        found = find_not_finite(parameters)
        return found if found is not None or check is None else check(tensors)

    return check_all
