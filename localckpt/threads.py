"""Threads and waits for them that an interrupt of the main thread cannot break.

Python raises KeyboardInterrupt, and any other exception of a signal handler, in the main thread,
between any two of its instructions. The waits of the standard library (events, conditions, futures,
joining a thread) are Python code under a lock. An interrupt inside them can leave that lock taken
for ever, release it while another thread holds it, so that this thread fails, or make a running
thread count as ended. The waits here take no lock that another thread needs.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from queue import SimpleQueue
from typing import Any, Generic, TypeVar, cast
from weakref import finalize, ref

__all__ = [
    "KeptThread",
    "Latch",
    "SerialThread",
    "Task",
    "end_all",
    "exit_by",
    "interrupt_behind",
    "run_interruptibly",
    "wait_for_any",
]

T = TypeVar("T")


class Latch:
    """Event that is set once. A wait for it can be interrupted at any moment."""

    def __init__(self) -> None:
        self._is_set = False
        # One lock for each wait: taken by the waiting thread, released by set().
        self._waits: deque[threading.Lock] = deque()

    def is_set(self) -> bool:
        """Return whether the latch was set."""
        return self._is_set

    def set(self) -> None:
        """Set the latch, and end all waits for it. May be called again."""
        self._is_set = True
        for held in tuple(self._waits):
            # Another thread may have set the latch at the same time.
            with suppress(RuntimeError):
                held.release()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the latch is set.

        Args:
            timeout_s: Deadline in seconds; ``None`` for no deadline.

        Returns:
            True if the latch is set.
        """
        return wait_for_any([self], timeout_s)


def wait_for_any(latches: Sequence[Latch], timeout_s: float | None = None) -> bool:
    """Wait until one of several latches is set; see :meth:`Latch.wait`."""
    if _is_any_set(latches):
        return True
    held = threading.Lock()
    held.acquire()
    try:
        # Before the second check, so that a set() after that check finds the lock and releases it.
        for latch in latches:
            latch._waits.append(held)
        if not _is_any_set(latches):
            held.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s))
    finally:
        for latch in latches:
            with suppress(ValueError):
                latch._waits.remove(held)
    return _is_any_set(latches)


def _is_any_set(latches: Sequence[Latch]) -> bool:
    # A list, no generator: an interrupt while a generator is deallocated would be lost.
    return True in [latch._is_set for latch in latches]


class Task(Generic[T]):
    """Work for another thread: run once, or cancelled before it begins.

    Args:
        work: Function to call. The reference to it is dropped once the task has ended.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._result: T | None = None
        self._error: BaseException | None = None
        # setdefault() decides who runs or cancels the task: the first caller. Unlike a lock, an
        # interrupted caller can ask again.
        self._taken: dict[str, object] = {}
        self._is_started = False
        self.over = Latch()
        """Set once the work returned or raised, or the task was cancelled."""

    @property
    def error(self) -> BaseException | None:
        """Error that the work raised; ``None`` if it raised none or has not ended."""
        return self._error

    def start(self, name: str, *, daemon: bool) -> None:
        """Run the task in a new thread.

        Args:
            name: Name of the thread.
            daemon: True if the interpreter may exit without waiting for the thread; else see
                :func:`exit_by`.

        Raises:
            RuntimeError: No thread can be started; call :meth:`run` instead.
            BaseException: An interrupt. The task may run or not: call :func:`end_all`.
        """
        if not daemon:
            _awaited_at_exit[id(self)] = self
        try:
            # Python's own wait for threads that are no daemons has no deadline.
            _Thread(target=self.run, name=name, daemon=True).start()
        except RuntimeError:
            _awaited_at_exit.pop(id(self), None)
            raise
        self._is_started = True

    def run(self) -> None:
        """Run the task in this thread, unless another thread has begun it or it was cancelled."""
        me, work = object(), self._work
        try:
            if work is not None and self._taken.setdefault("by", me) is me:
                self._result = work()
        except BaseException as error:  # noqa: BLE001 - raised by result() and take_result()
            self._error = error
        finally:
            if self._taken.get("by") is me:
                self._work = None
                self.over.set()
                _awaited_at_exit.pop(id(self), None)
            # These variables would form a cycle with the error, whose traceback keeps this frame.
            del self, work

    def done(self) -> bool:
        """Return whether the work returned or raised, or the task was cancelled."""
        return self.over.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the task, and return whether it has ended."""
        return self.over.wait(timeout_s)

    def result(self, timeout_s: float | None = None) -> T:
        """Return what the work returned.

        Args:
            timeout_s: Deadline in seconds; ``None`` for no deadline.

        Raises:
            TimeoutError: The deadline passed first; the task goes on.
            BaseException: Error that the work raised.
        """
        try:
            if not self.wait(timeout_s):
                raise TimeoutError(f"it was not over after {timeout_s:g} s")
            if self._error is not None:
                raise self._error
            return cast(T, self._result)
        finally:
            # This variable would form a cycle with the error, whose traceback keeps this frame.
            del self

    def take_result(self, timeout_s: float | None = None) -> T:
        """Return what the work returned, and drop its error; can be called once.

        For a caller with the task in a local variable: the error's traceback keeps the caller's
        frame, so a task that kept the error would form a cycle with it.
        """
        if not self.wait(timeout_s):
            raise TimeoutError(f"it was not over after {timeout_s:g} s")
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error
        return cast(T, self._result)

    def begins(self) -> bool:
        """Return whether the task has begun or will begin; cancel it if its start was interrupted.

        A started thread may take a while until it begins the task.
        """
        if not self._is_started:
            self.call_off()
        return self._is_started or self._taken["by"] is not None

    def call_off(self) -> bool:
        """Cancel the task if it has not begun, and return whether it is not running."""
        if self._taken.setdefault("by", None) is None:
            self._work = None
            self.over.set()
            _awaited_at_exit.pop(id(self), None)
        return self.done()


_awaited_at_exit: dict[int, Task[Any]] = {}
# A fork has none of these threads.
os.register_at_fork(after_in_child=_awaited_at_exit.clear)
_exit_at = inf


def exit_by(at: float) -> None:
    """Have the interpreter's exit wait for threads no longer than until a time.

    Without it the exit waits for all threads that are no daemons. A thread that is left behind, as
    in a system call on storage that hangs, ends with the process.

    Args:
        at: The time, by ``time.monotonic()``.
    """
    global _exit_at
    _exit_at = at


# Exit functions run in reverse order. The one for all finalizers is registered with the first
# finalizer, and closes what tasks use, so register it before the wait for the tasks.
finalize(Latch, int)


@atexit.register
def _await_at_exit() -> None:
    while True:
        tasks = [task for task in tuple(_awaited_at_exit.values()) if task.begins()]
        left = [task for task in tasks if not task.done()]
        if not left or time.monotonic() >= _exit_at:
            return
        left[0].wait(None if _exit_at == inf else _exit_at - time.monotonic())


class _Thread(threading.Thread):
    """Thread that begins even when its start is interrupted.

    ``start()`` waits for an event that the new thread sets. With the standard library's event, an
    interrupt of ``start()`` could leave the new thread waiting for the event's lock for ever.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._started = _Begun()


class _Begun(Latch):
    """Latch with the interface of ``Thread._started``."""

    def _at_fork_reinit(self) -> None:
        self._waits.clear()


def end_all(
    tasks: Sequence[Task[Any]],
    stop: Callable[[], None] | None = None,
    interrupt: BaseException | None = None,
) -> None:
    """Cancel the tasks that have not begun, and wait for the others.

    Args:
        tasks: Tasks that end by themselves.
        stop: Makes the tasks end sooner; called when this thread is interrupted.
        interrupt: Interrupt that the caller has caught already.

    Raises:
        BaseException: The first interrupt, once none of the tasks runs.
    """
    while not all(task.done() for task in tasks):
        try:
            if interrupt is not None and stop is not None:
                stop()
            for task in tasks:
                if not task.call_off():
                    task.wait()
        except BaseException as error:  # noqa: BLE001 - raised below, once no task runs
            interrupt = interrupt or error
    if interrupt is not None:
        try:
            raise interrupt
        finally:
            # This variable would form a cycle with the error, whose traceback keeps this frame.
            del interrupt


class SerialThread:
    """Queue of tasks for one thread, which exists only while there is work.

    The interpreter's exit waits for the submitted tasks.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._waiting: deque[Task[Any]] = deque()
        self._runner: Task[None] | None = None

    def submit(self, task: Task[Any]) -> None:
        """Queue a task behind those that were submitted before.

        Raises:
            RuntimeError: No thread can be started; the task was not queued.
        """
        with self._lock:
            self._waiting.append(task)
            try:
                self._have_runner()
            except RuntimeError:
                self._waiting.remove(task)
                raise

    def close(self) -> None:
        """Wait until all submitted tasks have ended."""
        while (runner := self._runner) is not None:
            with self._lock:
                self._have_runner()
            runner.wait()

    def _have_runner(self) -> None:
        # A runner that has not begun is replaced: if its start was interrupted, it never will.
        if self._runner is None or self._runner.call_off():
            runner = self._runner = Task(lambda: self._run_waiting(runner))
            # Not a daemon: the interpreter must not exit while a task uses memory.
            runner.start(self._name, daemon=False)

    def _run_waiting(self, runner: Task[None]) -> None:
        while True:
            with self._lock:
                if self._runner is not runner:
                    return
                if not self._waiting:
                    self._runner = None
                    return
                task = self._waiting.popleft()
            task.run()
            del task


class KeptThread:
    """Thread that is kept for one task after another.

    It waits for the next task until it is closed, or until nothing refers to this object any more.
    It does not keep the interpreter from ending.

    Raises:
        RuntimeError: No thread can be started.
    """

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[object] = SimpleQueue()
        # Written in C, put() is called without a moment for an interrupt. Only the thread keeps the
        # reference: it calls put() as long as there is a thread to end.
        owner = ref(self, self._tasks.put)
        self._loop = Task(partial(_run_tasks, self._tasks, owner))
        self._loop.start(name, daemon=True)

    def run(self, task: Task[Any]) -> None:
        """Run a task behind those that were given before."""
        self._tasks.put(task)

    def close(self, timeout_s: float = 0.0) -> None:
        """End the thread once the tasks that were given are over; no task may follow.

        Args:
            timeout_s: The longest wait for the end, in seconds.
        """
        self._tasks.put(None)
        self._loop.wait(timeout_s)


def _run_tasks(tasks: SimpleQueue[object], _: object) -> None:
    """Run tasks until something else is in the queue."""
    while isinstance(task := tasks.get(), Task):
        task.run()
        # This variable would keep the task's result until the next task comes.
        del task


def run_interruptibly(work: Callable[[], T], stop: Callable[[], None]) -> T:
    """Call ``work`` so that an interrupt of the main thread ends it, even inside a C library.

    Args:
        work: Function that may wait for a long time in C code, where Python handles no signals.
            The main thread runs it in another thread; any other thread calls it directly.
        stop: Makes ``work`` return or raise soon.

    Returns:
        What ``work`` returns.

    Raises:
        BaseException: Error of ``work``, or the interrupt, once ``work`` has ended.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    task = Task(work)
    try:
        # Not a daemon: the interpreter must not exit while the thread is inside a C library.
        task.start("localckpt-interruptible", daemon=False)
        task.wait()
    except RuntimeError:
        # No thread can start, as while the interpreter exits. An interrupt then ends nothing early.
        task.run()
    except BaseException as interrupt:
        end_all([task], stop, interrupt)
        raise
    return task.take_result()


def interrupt_behind(
    error: BaseException | None, outer: BaseException | None
) -> BaseException | None:
    """Return the interrupt that caused an error, if any.

    Python's waits, and libraries that call back into Python, turn some interrupts into other
    errors.

    Args:
        error: Error that was raised.
        outer: Error that was being handled already, and is not a cause of ``error``.
    """
    seen: set[int] = set()
    # A library may raise an error again from one that it caused, so that they cause each other.
    while error is not None and error is not outer and id(error) not in seen:
        if not isinstance(error, Exception):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None
