"""Objects beside tensors: what ``torch.save`` made of them, loaded without running other code."""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from localckpt.errors import CheckpointingException, UnsafeGlobalError

__all__ = ["load_object", "require_loadable"]

# torch keeps what may be named in a list of the process.
_ALLOWING = threading.Lock()
# What torch says of such an integer.
_LONG_INTEGER = f"Unsupported operand {pickle.LONG4[0]}"


def load_object(name: str, stream: io.BytesIO, safe_globals: Sequence[Any]) -> Any:
    """Load what ``torch.save`` wrote.

    Args:
        name: Name of the value in the state.
        stream: The bytes.
        safe_globals: Classes and functions that it may name, beyond torch's own.

    Raises:
        UnsafeGlobalError: It names another; the message says how to allow it.
        CheckpointingException: It holds what is not loaded from files.
    """
    try:
        stream.seek(0)
        with _allowing(safe_globals):
            if unsafe := torch.serialization.get_unsafe_globals_in_checkpoint(stream):
                raise UnsafeGlobalError(
                    f"{name} refers to {', '.join(sorted(unsafe))}, which may not be loaded from a "
                    f"file. If you trust it, pass safe_globals=[...] or call "
                    f"torch.serialization.add_safe_globals([...]), when saving and when loading"
                )
            stream.seek(0)
            return torch.load(stream, map_location="cpu", weights_only=True)
    except CheckpointingException:
        raise
    except Exception as error:
        # A class that is allowed may raise anything.
        raise CheckpointingException(
            f"{name} cannot be loaded from a file: {_reason(error)}"
        ) from error


def require_loadable(name: str, stream: io.BytesIO, safe_globals: Sequence[Any]) -> None:
    """Refuse to save what :func:`load_object` refuses to load; by loading it.

    Raises:
        UnsafeGlobalError: As for :func:`load_object`.
        CheckpointingException: As for :func:`load_object`; the message says what to save instead.
    """
    try:
        load_object(name, stream, safe_globals)
    except UnsafeGlobalError:
        raise
    except CheckpointingException as error:
        raise CheckpointingException(
            f"{error}. So it is not saved: save plain lists, dicts, numbers and text in its place, "
            f"or have it hold state_dict() and load_state_dict()"
        ) from error


@contextmanager
def _allowing(safe_globals: Sequence[Any]) -> Iterator[None]:
    """Have torch take these, too. Those that the program has allowed itself stay allowed."""
    if not safe_globals:
        yield
        return
    with _ALLOWING:
        known = torch.serialization.get_safe_globals()
        with torch.serialization.safe_globals([g for g in safe_globals if g not in known]):
            yield


def _reason(error: Exception) -> str:
    """Text of an error, without torch's advice to load without checks."""
    text = str(error).rpartition("WeightsUnpickler error:")[2].strip().partition("\n")[0]
    if text == _LONG_INTEGER:
        return "it holds an integer of more than 255 bytes"
    return f"{type(error).__name__}: {text}"
