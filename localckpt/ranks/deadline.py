"""Deadlines, and calls that may never return, made so that their caller can stop waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import TypeVar

from localckpt.errors import CheckpointingException, StorageError
from localckpt.threads import Task, end_all
from localckpt.waiting import wait_until

T = TypeVar("T")

# Storage that answers does so by then, and nobody is asked whether that is still wanted.
_SOON_S = 0.1


@dataclass(frozen=True, slots=True)
class Deadline:
    """The end of a wait: ``at`` by the monotonic clock, ``timeout_s`` after it began."""

    timeout_s: float
    at: float

    @classmethod
    def after(cls, timeout_s: float) -> Deadline:
        """Make the deadline that is ``timeout_s`` from now, or that of :func:`end_waits_by`."""
        now = time.monotonic()
        timeout_s = max(0.0, min(timeout_s, _latest - now))
        return cls(timeout_s, now + timeout_s)

    @property
    def left_s(self) -> float:
        return max(0.0, self.at - time.monotonic())

    @property
    def waited_s(self) -> float:
        return min(self.timeout_s, time.monotonic() - (self.at - self.timeout_s))


_latest = inf


def end_waits_by(at: float) -> None:
    """Let no deadline that is made from now on be later than a time by ``time.monotonic()``.

    For a job that is asked to stop; infinity lets deadlines be as they are.
    """
    global _latest
    _latest = at


def within(timeout_s: float, call: Callable[[], T]) -> T:
    """Return what ``call()`` returns, or raise what it raises, in a thread of its own.

    After a TimeoutError the call goes on, and its outcome is lost.
    """
    return begin(call).take_result(Deadline.after(timeout_s).left_s)


def answered(
    what: str,
    place: object,
    timeout_s: float,
    call: Callable[[], T],
    given_up: Callable[[], bool] = lambda: False,
) -> T:
    """Return what a call returns that waits for storage, which may never answer.

    Raises StorageError, "could not <what> <place>", after ``timeout_s``, or once it is
    ``given_up``. The call is made in a thread of its own, if one can be had; what it does after its
    deadline must do no harm.
    """
    task, waits_s = Task(call), Deadline.after(timeout_s).left_s
    try:
        task.start("localckpt-storage", daemon=True)
    except RuntimeError:
        task.run()
    try:
        if not task.wait(min(waits_s, _SOON_S)):
            wait_until(lambda: task.done() or given_up(), waits_s)
    except BaseException:
        # Whoever is interrupted finds nothing under way, unless the storage is slow.
        task.wait(_SOON_S)
        raise
    if task.done():
        return task.take_result()
    is_given_up = given_up()
    when = "before the job was told to stop" if is_given_up else f"within {waits_s:.3g} s"
    error = StorageError(
        f"could not {what} {place}: the storage did not answer {when}. Checkpoints saved before "
        f"are as they were"
    )
    error.is_given_up = is_given_up
    raise error


def interruptible(call: Callable[[], T], stop: Callable[[], None]) -> T:
    """Return what ``call()`` returns, which may wait for long in C code.

    An interrupt of the main thread, which Python handles in no C code, has ``stop()`` end it soon.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    task = Task(call)
    try:
        # Not a daemon: the interpreter must not exit while the thread is inside a C library.
        task.start("localckpt-interruptible", daemon=False)
        task.wait()
    except RuntimeError:
        # No thread can start, as while the interpreter exits. An interrupt then ends nothing early.
        task.run()
    except BaseException:
        stop()
        end_all([task])
        raise
    return task.take_result()


def begin(call: Callable[[], T], name: str = "localckpt-within") -> Task[T]:
    """Start ``call()`` in a thread of its own, which does not keep the interpreter from ending."""
    task = Task(call)
    try:
        # A daemon: what never returns must not keep the interpreter from ending.
        task.start(name, daemon=True)
    except RuntimeError as error:
        task.call_off()
        raise CheckpointingException(
            f"this process cannot start a thread ({error}): raise the limit on its processes "
            f"(ulimit -u, or the container's pids limit)"
        ) from error
    return task
