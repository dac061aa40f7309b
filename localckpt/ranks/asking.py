"""Calls that talk to the job's store: their deadline, and their errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

from localckpt.errors import PeerLostError
from localckpt.ranks.deadline import begin, within
from localckpt.threads import Latch, wait_for_any

__all__ = [
    "StoreWait",
    "ask_store",
    "ask_until_stopped",
    "store_errors",
    "store_is_silent",
]

T = TypeVar("T")


class StoreWait:
    """A wait for other ranks, in a thread that its starter may abandon.

    Attributes:
        begun: Set once the thread has nothing left to do but to wait.
        abandoned: Set once nobody waits for the thread any more.
    """

    def __init__(self) -> None:
        self.begun = Latch()
        self.abandoned = Latch()


def ask_store(phase: str, limit_s: float, call: Callable[[], T]) -> T:
    """Return what a call that talks to the job's store returns.

    Args:
        phase: What is being done, for the error message.
        limit_s: The longest wait for the store, in seconds.
        call: What is called, in another thread.

    Raises:
        PeerLostError: The store cannot be reached, or has not answered in time.
    """
    with store_errors(phase, limit_s):
        return within(limit_s, call)


def ask_until_stopped(
    phase: str, limit_s: float, call: Callable[[StoreWait], T], stopped: Latch
) -> T | None:
    """As :func:`ask_store`, for a call that waits for other ranks at the store.

    Args:
        phase, limit_s: As for :func:`ask_store`.
        call: What is called, in another thread, with its wait.
        stopped: Ends the wait.

    Returns:
        What ``call`` returns; ``None`` if it was stopped while it waited. It is abandoned then, and
        when this thread is interrupted.
    """
    wait, until = StoreWait(), time.monotonic() + limit_s
    with store_errors(phase, limit_s):
        task = begin(lambda: call(wait))
        try:
            wait_for_any([task.over, stopped], limit_s)
            if not task.done() and stopped.is_set():
                # Other ranks are to see what the call does before it waits.
                wait_for_any([task.over, wait.begun], until - time.monotonic())
                if not task.done() and wait.begun.is_set():
                    wait.abandoned.set()
                    return None
            return task.take_result(0)
        except BaseException:
            wait.abandoned.set()
            raise


@contextmanager
def store_errors(phase: str, limit_s: float = 0.0) -> Iterator[None]:
    """Raise errors of the job's store as a :class:`PeerLostError`; see :func:`ask_store`."""
    try:
        yield
    except (TimeoutError, dist.DistError) as error:
        raise store_is_silent(phase, str(error) or f"not for {limit_s:g} s") from error


def store_is_silent(phase: str, why: str) -> PeerLostError:
    """The error for a job's store that does not answer."""
    error = PeerLostError(
        f"could not {phase}: the job's key-value store does not answer ({why}). The process that "
        f"hosts it, most often on the first node, has probably died, or cannot be reached from "
        f"here; restart the job. What was saved before stands."
    )
    error.outcome_unknown = True
    return error
