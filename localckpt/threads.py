"""Threads that are over before their memory goes, also when the trainer is interrupted.

Python delivers Ctrl-C, and whatever else a signal handler raises, to the main thread alone, between
any two of its instructions, and not while it waits inside of a library.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["interrupt_behind", "join_all", "run_interruptibly"]

T = TypeVar("T")


def interrupt_behind(
    error: BaseException | None, outer: BaseException | None
) -> BaseException | None:
    """The interrupt that an error comes of, if any.

    Python's own waits, and libraries that call back, make other errors of some interrupts.

    Args:
        error: What was raised.
        outer: What was being handled before, which has nothing to do with it.
    """
    while error is not None and error is not outer:
        if not isinstance(error, Exception):
            return error
        error = error.__cause__ or error.__context__
    return None


def join_all(threads: Sequence[threading.Thread], stop: Callable[[], None] | None = None) -> None:
    """Return when all threads are over, whatever comes.

    Args:
        threads: Those that were started; they end by themselves.
        stop: Makes them end sooner; called when this thread is interrupted.

    Raises:
        BaseException: The interrupt that came meanwhile, once all threads are over.
    """
    interrupt: BaseException | None = None
    while any(thread.is_alive() for thread in threads):
        try:
            if interrupt is not None and stop is not None:
                stop()
            for thread in threads:
                thread.join()
        except BaseException as error:  # noqa: BLE001 - raised once all threads are over
            interrupt = interrupt or error
    if interrupt is not None:
        try:
            raise interrupt
        finally:
            # Else it would keep itself by this variable.
            del interrupt


def run_interruptibly(work: Callable[[], T], stop: Callable[[], None]) -> T:
    """Call ``work`` so that an interrupt of the main thread ends it, even inside of a library.

    Args:
        work: May wait for a long time where Python does not see it. It runs in another thread if
            this is the main thread, which alone is interrupted.
        stop: Makes ``work`` return or raise soon.

    Returns:
        What ``work`` returns.

    Raises:
        BaseException: What ``work`` raises, or the interrupt, once ``work`` is over.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    outcome: Future[T] = Future()
    # Not a daemon: the interpreter must not end while it is inside of a library.
    thread = threading.Thread(
        target=_carry_out, args=(work, outcome), name="localckpt-interruptible", daemon=False
    )
    try:
        thread.start()
    except RuntimeError:
        # No thread can be had, as while the interpreter ends: then nothing can end it sooner.
        return work()
    join_all([thread], stop)
    try:
        return outcome.result(0)
    finally:
        # An error keeps the frames that it came through: it must not be in one of them itself.
        del outcome


def _carry_out(work: Callable[[], T], outcome: Future[T]) -> None:
    try:
        outcome.set_result(work())
    except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
        outcome.set_exception(error)
    finally:
        del outcome
