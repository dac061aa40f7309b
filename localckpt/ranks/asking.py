"""Calls that talk to the job's store: their deadline, and their errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

from localckpt.errors import MismatchError, PeerLostError
from localckpt.failure_texts import short
from localckpt.ranks.deadline import begin, within
from localckpt.threads import Latch

T = TypeVar("T")

# This process may have been stopped meanwhile, and the thread with it.
_LAST_LOOK_S = 0.5
# Errors of whoever takes apart what is no report, no verdict and no name.
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError)


class StoreWait:
    """A wait for other ranks, in a thread that its starter may abandon.

    ``begun`` is set once the thread has nothing left to do but to wait.
    """

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
    tell: Callable[[], float],
) -> T | None:
    """Ask the store as :func:`ask_store`, by a call that waits there for other ranks.

    A call that waits when it is ``stopped``, or interrupted, is abandoned, and ``None`` is
    returned. ``tell`` logs whom the wait is for if it is long, in this thread, and returns when to
    call it again, in seconds.
    """
    wait, until = StoreWait(), time.monotonic() + limit_s
    with store_errors(phase, limit_s):
        try:
            task = begin(lambda: call(wait), "localckpt-ranks")
            while not task.done() and not stopped.is_set() and time.monotonic() < until:
                task.over.wait(min(max(0.0, until - time.monotonic()), tell()), stopped)
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
    """Raise errors of the job's store as a :class:`PeerLostError`; see :func:`ask_store`.

    What is there and cannot be read, since no rank has put it there, is a :class:`MismatchError`.
    """
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
    """The error for a job's store that does not answer."""
    error = PeerLostError(
        f"could not {phase}: the job's key-value store does not answer ({why}). The process that "
        f"hosts it, most often on the first node, has probably died, or cannot be reached from "
        f"here; restart the job. What was saved before stands."
    )
    error.outcome_unknown = True
    return error
