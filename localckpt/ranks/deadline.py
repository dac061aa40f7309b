"""A call that may never return, made so that whoever waits for it can stop waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from localckpt.errors import CheckpointingException
from localckpt.threads import Task

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
    task = begin(call)
    try:
        return task.take_result(timeout_s)
    except BaseException:
        # For a call that is over, there is nothing to stop.
        if stop is not None:
            stop()
        raise


def begin(call: Callable[[], T]) -> Task[T]:
    """Start ``call()`` in a thread of its own, which does not keep the interpreter from ending.

    Raises:
        CheckpointingException: No thread can be had.
    """
    task = Task(call)
    try:
        # A daemon: what never returns must not keep the interpreter from ending.
        task.start("localckpt-within", daemon=True)
    except RuntimeError as error:
        task.call_off()
        raise CheckpointingException(
            f"this process cannot start a thread ({error}): raise the limit on its processes "
            f"(ulimit -u, or the container's pids limit)"
        ) from error
    return task
