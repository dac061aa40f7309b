"""Life of an object that one process makes, aborts and closes: also where an interrupt comes."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from localckpt.errors import AbortedError, CheckpointingException
from localckpt.threads import Abort
from localckpt.waiting import wait_until

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])


class OfOneProcess:
    """Base of what only the process that made it may use, which messages call a ``_noun``."""

    _noun: str
    _after_abort = "call rejoin() once the process group is made anew, or close()"

    def __init__(self) -> None:
        self._process = os.getpid()
        self.begin_life()

    def begin_life(self) -> None:
        """Begin again, as if nothing was interrupted or aborted."""
        self._closed = False
        # Whether all that belongs to a group of ranks is freed, to be made again by rejoin().
        self._has_left = False
        # Name of the call that was interrupted, which closed the object.
        self._interrupted = ""
        # No method of this object, which would be a cycle.
        self._abort = Abort(functools.partial(_aborted, self._noun, self._after_abort))

    @property
    def _is_fork(self) -> bool:
        return os.getpid() != self._process

    def abort(self, within_s: float = 2.0) -> None:
        """End at once what waits for other ranks or for storage, from any thread, at any moment.

        A call under way raises AbortedError, and so does each that follows, until the object is
        closed or joined again. It tells no other rank to do the same. May be called twice.

        Args:
            within_s: How long to wait for the end of calls that other threads are in, in seconds.
                One that hangs in the operating system is left there, and the log says so.
        """
        if self._is_fork:
            return
        self._abort.set()
        self._end_waits()
        if not wait_until(self._abort.is_left, within_s):
            logger.warning(
                "a call of this %s has not ended %g s after abort(): does its storage answer?",
                *(self._noun, within_s),
            )

    def _end_waits(self) -> None:
        """End the waits of threads that no call of this object is made in."""

    def _begin_rejoin(self) -> None:
        """Refuse to join again what is closed, and abort what is under way."""
        self._check_usable(also_closed=True)
        if self._closed:
            self._check_usable()
        self.abort()

    def _fail_rejoin(self) -> None:
        """Be as before an attempt to join again, which failed."""
        self._has_left = True
        self._abort.set()

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
        if self._abort.is_set() and not also_closed:
            raise self._abort.error()


def _aborted(noun: str, what_to_do: str) -> AbortedError:
    return AbortedError(
        f"this {noun} was aborted: {what_to_do}. Checkpoints saved before are as they were"
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
            with self._abort:
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
