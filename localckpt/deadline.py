"""A call that may never return, made so that whoever waits for it can stop waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from localckpt.errors import CheckpointingException

__all__ = ["begin", "within"]

T = TypeVar("T")


def within(timeout_s: float, call: Callable[[], T], stop: Callable[[], None] | None = None) -> T:
    """What ``call()`` returns, or raises, in a thread of its own.

    Args:
        timeout_s: The longest wait for it, in seconds.
        call: What is called.
        stop: Makes it end sooner; called when the wait for it is interrupted, as by Ctrl-C.

    Raises:
        TimeoutError: It has not returned in time. It goes on, and its outcome is lost.
        CheckpointingException: No thread can be had.
    """
    thread, outcome = _start(call)
    try:
        return outcome.result(timeout_s)
    except BaseException:
        # For a call that is over, there is nothing to stop.
        if stop is not None:
            stop()
        raise
    finally:
        if outcome.done():
            # It has nothing left to do but to end.
            thread.join()
        # An error keeps the frames that it came through: it must not be in one of them itself.
        del outcome


def begin(call: Callable[[], T]) -> Future[T]:
    """Start ``call()`` in a thread of its own, which does not keep the interpreter from ending.

    Raises:
        CheckpointingException: No thread can be had.
    """
    return _start(call)[1]


def _start(call: Callable[[], T]) -> tuple[threading.Thread, Future[T]]:
    outcome: Future[T] = Future()
    # A daemon: what never returns must not keep the interpreter from ending.
    thread = threading.Thread(
        target=_carry_out, args=(call, outcome), name="localckpt-within", daemon=True
    )
    try:
        thread.start()
    except RuntimeError as error:
        raise CheckpointingException(
            f"this process cannot start a thread ({error}): raise the limit on its processes "
            f"(ulimit -u, or the container's pids limit)"
        ) from error
    return thread, outcome


def _carry_out(call: Callable[[], T], outcome: Future[T]) -> None:
    try:
        outcome.set_result(call())
    except BaseException as error:  # noqa: BLE001 - raised by whoever waits for it
        outcome.set_exception(error)
    finally:
        del outcome
