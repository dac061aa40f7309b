"""Threads, and waits for them that neither a signal handler nor an interrupt can break.

The standard library's events and futures are Python code under a lock, for which a signal handler
that sets one may wait; its exit waits for threads as long as they run.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from typing import Any, Generic, TypeVar, cast
from weakref import finalize

T = TypeVar("T")

# Longest waits for a thread that is to begin, and for the end of one whose task is over.
_STARTED_S, _ENDING_S = 10.0, 5.0


class Latch:
    """Event that is set once, also in a signal handler."""

    def __init__(self) -> None:
        self._is_set = False
        # One lock for each wait: taken by the waiting thread, released by set().
        self._waits: deque[threading.Lock] = deque()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """Set the latch, and end all waits for it. May be called again."""
        self._is_set = True
        for held in tuple(self._waits):
            # Another thread may have set the latch at the same time.
            with suppress(RuntimeError):
                held.release()

    def _at_fork_reinit(self) -> None:
        """Forget the waits, which a fork does not have; threading calls it."""
        self._waits.clear()

    def wait(self, timeout_s: float | None = None, *others: Latch) -> bool:
        """Wait until this latch, or one of some others, is set; return whether one is.

        Raises the error of an :class:`Abort` that is set, and that the call is made inside of.
        """
        latches = (self, *others, *aborts())
        # Not a SimpleQueue, which waits for ever if a short timeout passes while it is entered.
        held = threading.Lock()
        held.acquire()
        try:
            for latch in latches:
                latch._waits.append(held)
            # In this order: a set() after the look finds the lock. A list, since a generator would
            # swallow an interrupt that comes while it is deallocated.
            if True not in [latch._is_set for latch in latches]:
                held.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s))
        finally:
            for latch in latches:
                with suppress(ValueError):
                    latch._waits.remove(held)
        if True in [latch._is_set for latch in (self, *others)]:
            return True
        raise_if_aborted()
        return False


class Abort(Latch):
    """Latch that ends all waits of threads inside of ``with abort:``, with an error of its own."""

    def __init__(self, error: Callable[[], Exception]) -> None:
        super().__init__()
        self.error = error
        self._inside: list[int] = []

    def __enter__(self) -> None:
        self._inside.append(threading.get_ident())
        _ambient.aborts = (*aborts(), self)

    def __exit__(self, *_: object) -> None:
        _ambient.aborts = aborts()[:-1]
        self._inside.remove(threading.get_ident())

    def is_left(self) -> bool:
        """Return whether no other thread is inside."""
        return all(thread == threading.get_ident() for thread in tuple(self._inside))


# What the calls under way in each thread are made inside of.
_ambient = threading.local()


def aborts() -> tuple[Abort, ...]:
    """Return those that this thread is inside of."""
    inside: tuple[Abort, ...] = getattr(_ambient, "aborts", ())
    return inside


class Shielded:
    """Context of what has to be done even if the call that it is a part of is aborted."""

    def __enter__(self) -> None:
        self._aborts, _ambient.aborts = aborts(), ()

    def __exit__(self, *_: object) -> None:
        _ambient.aborts = self._aborts


def raise_if_aborted() -> None:
    """Raise the error of an :class:`Abort` that is set, and that the call is made inside of."""
    for abort in aborts():
        if abort.is_set():
            raise abort.error()


class _Started(Latch):
    """Latch of a start: a thread without memory for its first frame ends without a word."""

    def wait(self, timeout_s: float | None = None, *others: Latch) -> bool:
        if not super().wait(_STARTED_S if timeout_s is None else timeout_s, *others):
            raise RuntimeError(f"a new thread did not begin within {_STARTED_S:g} s")
        return True


class _Thread(threading.Thread):
    """Thread whose start waits by a latch, so that an interrupt of it leaves no lock behind."""

    def __init__(self, task: Task[Any], name: str, is_awaited: bool) -> None:
        # Python's own wait for threads that are no daemons has no deadline.
        super().__init__(target=task.run, name=name, daemon=True)
        self._started = _Started()
        self.over, self.is_awaited = task.over, is_awaited

    def run(self) -> None:
        # Here, where no interrupt comes.
        for other in tuple(_threads):
            if other.over.is_set() and not other.is_alive():
                _threads.pop(other, None)
        super().run()


class Ending:
    """Work that ends, and the error that it failed with, there before it is over."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.over = Latch()

    def done(self) -> bool:
        return self.over.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        return self.over.wait(timeout_s)


class Task(Ending, Generic[T]):
    """Work for another thread: run once, or cancelled before it begins."""

    def __init__(self, work: Callable[[], T]) -> None:
        super().__init__()
        self._work: Callable[[], T] | None = work
        self._result: T | None = None
        # The first to set its key runs or cancels the task; unlike a lock, it can ask again.
        self._taken: dict[str, object] = {}

    def start(self, name: str, *, daemon: bool) -> None:
        """Run the task in a new thread, which exit awaits unless it is a ``daemon``.

        Raises RuntimeError where no thread can be started; one that begins late may still run it.
        """
        thread = _Thread(self, name, is_awaited=not daemon)
        _threads[thread] = None
        try:
            thread.start()
        except RuntimeError:
            _threads.pop(thread, None)
            raise
        except BaseException:
            # The thread may run already.
            self.call_off()
            raise

    def run(self) -> None:
        """Run the task in this thread, unless another one has begun or cancelled it."""
        me, work = object(), self._work
        if work is None or self._taken.setdefault("by", me) is not me:
            return
        try:
            self._result = work()
        except BaseException as error:  # noqa: BLE001 - raised by result()
            self.error = error
        finally:
            self._end()
            # These variables would form a cycle with the error, whose traceback keeps this frame.
            del self, work

    def result(self, timeout_s: float | None = None) -> T:
        """Return what the work returned, or raise its error, or TimeoutError."""
        try:
            if not self.wait(timeout_s):
                raise TimeoutError(f"it was not over after {timeout_s:g} s")
            if self.error is not None:
                raise self.error
            return cast(T, self._result)
        finally:
            del self

    def take_result(self, timeout_s: float | None = None) -> T:
        """Return the result once, for a caller whose frame, and so its error, holds the task."""
        try:
            return self.result(timeout_s)
        finally:
            self.error = None

    def call_off(self) -> bool:
        """Cancel the task if it has not begun, and return whether it is not running."""
        if self._taken.setdefault("by", None) is None:
            self._end()
        return self.done()

    def _end(self) -> None:
        self._work = None
        self.over.set()


class SerialThread:
    """Thread for one task after another, in the order in which one thread submits them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._last = Latch()
        self._last.set()

    def submit(self, task: Task[Any]) -> None:
        """Queue a task; raises RuntimeError, and leaves it out, where no thread can be started."""
        before, over, submitted = self._last, Latch(), deque([task])

        def run() -> None:
            before.wait()
            # No variable has the task: the traceback of its error keeps the frame of this call.
            submitted.popleft().run()
            over.set()

        Task(run).start(self._name, daemon=False)
        self._last = over

    def run(self, task: Task[Any]) -> None:
        """Run a task in the calling thread, after those that were submitted."""
        self._last.wait()
        self._last = over = Latch()
        try:
            task.run()
        finally:
            over.set()

    def close(self, timeout_s: float | None = None) -> bool:
        return self._last.wait(timeout_s)


def end_all(tasks: Sequence[Task[Any]]) -> None:
    """Cancel the tasks that have not begun, wait for the others, and then raise an interrupt."""
    interrupts = deque[BaseException](maxlen=1)
    with Shielded():
        while running := [task for task in tasks if not task.call_off()]:
            try:
                running[0].wait()
            except BaseException as interrupt:  # noqa: BLE001 - raised once no task runs
                interrupts.append(interrupt)
    if interrupts:
        raise interrupts.pop()


# In the order in which they were started.
_threads: dict[_Thread, None] = {}
# A fork has none of these threads.
os.register_at_fork(after_in_child=_threads.clear)
_exit_at = inf


def exit_by(at: float) -> None:
    """Have the exit wait for no thread beyond a time by ``time.monotonic()``."""
    global _exit_at
    _exit_at = at


# Exit functions run in reverse order, and that of finalizers closes what tasks use.
finalize(Latch, int)


@atexit.register
def _await_at_exit() -> None:
    while running := [t for t in tuple(_threads) if t.is_awaited and not t.over.is_set()]:
        left_s = _exit_at - time.monotonic()
        if left_s <= 0:
            return
        running[0].over.wait(None if left_s == inf else left_s)
    for thread in tuple(_threads):
        if thread.over.is_set() and thread.is_alive():
            # One that is about to end would end the process by SIGABRT, were it cut off there.
            thread.join(min(_ENDING_S, max(0.0, _exit_at - time.monotonic())))
