"""Life of an object that one process makes, and closes: also where an interrupt comes."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from localckpt.errors import CheckpointingException

F = TypeVar("F", bound=Callable[..., Any])


class OfOneProcess:
    """Base of what only the process that made it may use, which messages call a ``_noun``."""

    _noun: str

    def __init__(self) -> None:
        self._process = os.getpid()
        self._closed = False
        # Name of the call that was interrupted, which closed the object.
        self._interrupted = ""

    @property
    def _is_fork(self) -> bool:
        return os.getpid() != self._process

    def _check_usable(self, *, also_closed: bool = False) -> None:
        """Refuse a call in a fork, after an interrupt, and of what is closed."""
        if self._is_fork:
            raise CheckpointingException(
                f"this {self._noun} belongs to process {self._process}, of which this one is a "
                f"fork: use it there. Nothing was changed"
            )
        if self._interrupted:
            raise CheckpointingException(
                f"{self._interrupted}() of this {self._noun} was interrupted on this rank, and the "
                f"other ranks may wait for it: make a new one, on every rank. Checkpoints saved "
                f"before are as they were"
            )
        if self._closed and not also_closed:
            raise CheckpointingException(
                f"this {self._noun} is closed; make another, on every rank. Checkpoints saved "
                f"before are as they were"
            )


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
