"""Deadlines, calls that may never return, and messages about long waits for other ranks.

The calls, of which a caller can stop to wait, ask storage, C code, or the job's key-value store.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import TypeVar

import torch.distributed as dist

from localckpt.errors import CheckpointingException, MismatchError, PeerLostError, StorageError
from localckpt.failure_texts import short
from localckpt.threads import Latch, Task, aborts, end_all
from localckpt.waiting import wait_until

T = TypeVar("T")

logger = logging.getLogger(__name__)

# The first message about a wait.
_SILENT_S = 5.0
# Storage that answers does so by then, and nobody is asked whether that is still wanted.
_SOON_S = 0.1
# This process may have been stopped meanwhile, and the thread with it.
_LAST_LOOK_S = 0.5
# Errors of whoever takes apart what is no report, no verdict and no name.
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError)


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
    """Let no deadline that is made from now on be later than a time by ``time.monotonic()``."""
    global _latest
    _latest = at


def within(timeout_s: float, call: Callable[[], T]) -> T:
    """Return what ``call()`` returns in a thread of its own, which goes on after a TimeoutError."""
    return begin(call).take_result(Deadline.after(timeout_s).left_s)


def answered(
    what: str,
    place: object,
    timeout_s: float,
    call: Callable[[], T],
    given_up: Callable[[], bool] = lambda: False,
) -> T:
    """Return what a call returns that waits for storage, in a thread of its own if one can be had.

    Raises StorageError, "could not <what> <place>", after ``timeout_s``, or once it is
    ``given_up``; what the call does after that must do no harm.
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
    """Return what ``call()`` returns, which may wait in C code until it is interrupted, or aborted.

    Then it is told to stop.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not (is_main or aborts()):
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


class Patience:
    """Back-off of the messages about one wait, warnings if it began in the main thread."""

    def __init__(self, rank: int, what: str, level: int | None = None) -> None:
        self._rank, self._what = rank, what
        is_training = threading.current_thread() is threading.main_thread()
        self._level = level or (logging.WARNING if is_training else logging.INFO)
        self.renew()

    def renew(self) -> None:
        """Note that what was waited for has come, and that more is waited for."""
        self._began, self._next_s = time.monotonic(), _SILENT_S

    def left_s(self, whom: Callable[[], str]) -> float:
        """Log the wait for ``whom()`` if it is time; return the seconds until the next message."""
        waited_s = time.monotonic() - self._began
        if waited_s >= self._next_s:
            self._next_s = 2 * waited_s
            logger.log(
                self._level,
                "rank %d has waited %.0f s to %s, for %s",
                *(self._rank, waited_s, self._what, whom()),
            )
        return self._next_s - waited_s

    def until(
        self,
        holds: Callable[[], bool],
        timeout_s: float,
        whom: Callable[[], str],
        *,
        longest_s: float = 0.25,
    ) -> bool:
        def is_over() -> bool:
            if not (is_met := holds()):
                self.left_s(whom)
            return is_met

        return wait_until(is_over, timeout_s, longest_s=longest_s)

    def wait(
        self, wait: Callable[[float], bool], timeout_s: float, whom: Callable[[], str]
    ) -> bool:
        """Wait for another thread, logged; ``wait(seconds)`` returns whether it is over."""
        until = time.monotonic() + timeout_s
        while not wait(min(max(0.0, until - time.monotonic()), self.left_s(whom))):
            if time.monotonic() >= until:
                return False
        return True

    @contextmanager
    def beside(self, whom: Callable[[], str]) -> Iterator[None]:
        """Context for waits in C code, which a thread logs."""
        over = Latch()

        def log() -> None:
            while not over.wait(self.left_s(whom)):
                pass

        begin(log)
        try:
            yield
        finally:
            over.set()


class StoreWait:
    """A wait for other ranks, ``begun`` by a thread once nothing else is left, and abandoned."""

    def __init__(self, abandoned: Latch | None = None) -> None:
        self.begun = Latch()
        self.abandoned = abandoned or Latch()


def ask_store(phase: str, limit_s: float, call: Callable[[], T]) -> T:
    """Return what a call that talks to the job's store returns, made in another thread."""
    with store_errors(phase, limit_s):
        return within(limit_s, call)


def ask_until_stopped(
    phase: str,
    limit_s: float,
    call: Callable[[StoreWait], T],
    stopped: Latch,
    whom: Callable[[], str],
    patience: Patience,
) -> T | None:
    """Ask the store by a call that waits there for others; ``None`` if it is ``stopped`` there."""
    wait, until = StoreWait(), time.monotonic() + limit_s
    with store_errors(phase, limit_s):
        try:
            task = begin(lambda: call(wait), "localckpt-ranks")
            patience.wait(lambda wait_s: task.over.wait(wait_s, stopped), limit_s, whom)
            if stopped.is_set():
                # Other ranks are to see what the call does before it waits.
                task.over.wait(max(0.0, until - time.monotonic()), wait.begun)
                if not task.done() and wait.begun.is_set():
                    wait.abandoned.set()
                    return None
            elif not task.wait(_LAST_LOOK_S):
                raise TimeoutError(f"not for {limit_s:.1f} s")
            return task.take_result(0)
        except BaseException:
            wait.abandoned.set()
            raise


@contextmanager
def store_errors(phase: str, limit_s: float = 0.0) -> Iterator[None]:
    """Raise errors of the store as PeerLostError, and of values that are none as MismatchError."""
    try:
        yield
    except (TimeoutError, dist.DistError) as error:
        # torch's text goes on with the frames of its C++ code.
        why = str(error).partition("\n")[0]
        raise store_is_silent(phase, why or f"not for {limit_s:g} s") from error
    except _UNREADABLE as error:
        raise MismatchError(
            f"could not {phase}: a value in the job's key-value store is none that a rank puts "
            f"there ({type(error).__name__}: {short(str(error))}). Does another program write to "
            f"that store, or run the ranks different versions of localckpt? What was saved before "
            f"stands"
        ) from error


def store_is_silent(phase: str, why: str) -> PeerLostError:
    error = PeerLostError(
        f"could not {phase}: the job's key-value store does not answer ({why}). The process that "
        f"hosts it, most often on the first node, has probably died, or cannot be reached from "
        f"here; restart the job. What was saved before stands."
    )
    error.outcome_unknown = True
    return error
