"""Closing of an object in one of whose calls an interrupt came."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from localckpt.errors import CheckpointingException

F = TypeVar("F", bound=Callable[..., Any])


def closed_by_interrupts(method: F) -> F:
    """Decorate a method: an exception that is no ``Exception`` has the object close itself.

    Nobody knows how far such a call was, and other ranks may wait for it. The object's
    ``_close_interrupted(call)`` frees what it can without them.
    """

    @functools.wraps(method)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        handled = sys.exception()
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:
            if interrupt_behind(error, handled) is not None:
                self._close_interrupted(method.__name__)
            raise

    return called  # type: ignore[return-value]


def was_interrupted(what: str, call: str) -> CheckpointingException:
    """Return the error of a call of an object that was closed so."""
    return CheckpointingException(
        f"{call}() of this {what} was interrupted on this rank, and the other ranks may wait for "
        f"it: make a new one, on every rank. Checkpoints saved before are as they were"
    )


def interrupt_behind(
    error: BaseException | None, outer: BaseException | None
) -> BaseException | None:
    """Return the interrupt that a library has turned into ``error``, unless into ``outer``."""
    seen: set[int] = set()
    # A library may raise an error again from one that it caused, so that they cause each other.
    while error is not None and error is not outer and id(error) not in seen:
        if not isinstance(error, Exception):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None
