"""Objects beside tensors: what ``torch.save`` made of them, loaded without running other code."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import torch

from localckpt.errors import UnsafeGlobalError

__all__ = ["load_object", "require_safe"]


def require_safe(name: str, stream: io.BytesIO, safe_globals: Sequence[Any]) -> None:
    """Refuse what :func:`load_object` would refuse.

    Args:
        name: Of the object in the state.
        stream: What ``torch.save`` wrote.
        safe_globals: Classes and functions that it may name, beyond torch's own.

    Raises:
        UnsafeGlobalError: It names another; the message says how to allow it.
    """
    stream.seek(0)
    with torch.serialization.safe_globals(list(safe_globals)):
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(stream)
    if unsafe:
        raise UnsafeGlobalError(
            f"{name} refers to {', '.join(unsafe)}, which may not be loaded from a file. If you "
            f"trust it, pass safe_globals=[...] or call "
            f"torch.serialization.add_safe_globals([...]), when saving and when loading"
        )


def load_object(name: str, stream: io.BytesIO, safe_globals: Sequence[Any]) -> Any:
    """The object that was saved; raises as :func:`require_safe`."""
    require_safe(name, stream, safe_globals)
    stream.seek(0)
    with torch.serialization.safe_globals(list(safe_globals)):
        return torch.load(stream, map_location="cpu", weights_only=True)
