"""Work in other threads, waited for so that an interrupt of the trainer breaks nothing.

Python delivers Ctrl-C, and whatever else a signal handler raises, to the main thread alone, between
any two of its instructions. The waits of the standard library (events, conditions, futures, joining
a thread) are Python code under a lock. An interrupt within them can leave that lock taken for ever,
release it for the thread that holds it, which then fails, or make a thread that runs count as
over. The waits here take no lock that another thread needs.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar, cast

__all__ = [
    "Latch",
    "SerialThread",
    "Task",
    "end_all",
    "interrupt_behind",
    "run_interruptibly",
    "wait_for_any",
]

T = TypeVar("T")


class Latch:
    """An event that happens once. A wait for it can be interrupted at any moment."""

    def __init__(self) -> None:
        self._is_set = False
        # A lock for each wait: taken by the wait, released by whoever sets the latch.
        self._waits: deque[threading.Lock] = deque()

    def is_set(self) -> bool:
        """Return whether the latch was set."""
        return self._is_set

    def set(self) -> None:
        """Let it happen, and end all waits for it. May be called again."""
        self._is_set = True
        for held in tuple(self._waits):
            # Another thread may have set the latch at the same time.
            with suppress(RuntimeError):
                held.release()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it happens.

        Args:
            timeout_s: The longest wait, in seconds; ``None`` for any.

        Returns:
            Whether it has happened.
        """
        return wait_for_any([self], timeout_s)


def wait_for_any(latches: Sequence[Latch], timeout_s: float | None = None) -> bool:
    """Wait until one of several events happens; see :meth:`Latch.wait`."""
    if _is_any_set(latches):
        return True
    held = threading.Lock()
    held.acquire()
    try:
        # Before the second look: whoever sets a latch after that look finds the lock.
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
    # No generator: an interrupt that comes when one is dropped is lost.
    return True in [latch._is_set for latch in latches]


class Task(Generic[T]):
    """Work for another thread: carried out once, or called off before it begins.

    Args:
        work: What is to be done. What it refers to is let go of once it is over.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._result: T | None = None
        self._error: BaseException | None = None
        # Filled once, by whoever comes first; unlike a lock it can be asked again.
        self._taken: dict[str, object] = {}
        self._is_started = False
        self.over = Latch()
        """Set once it is over, well or badly, or called off."""

    @property
    def error(self) -> BaseException | None:
        """Error that the work raised; ``None`` while the task is not over, too."""
        return self._error

    def start(self, name: str, *, daemon: bool) -> None:
        """Have it carried out by a thread of its own.

        Args:
            name: Of the thread.
            daemon: Whether the interpreter may end without waiting for it.

        Raises:
            RuntimeError: No thread can be had; :meth:`run` does it in this one.
            BaseException: An interrupt; :func:`end_all` returns when the task does not run.
        """
        _Thread(target=self.run, name=name, daemon=daemon).start()
        self._is_started = True

    def run(self) -> None:
        """Carry it out in this thread, unless another one has begun to, or it was called off."""
        me, work = object(), self._work
        try:
            if work is not None and self._taken.setdefault("by", me) is me:
                self._result = work()
        except BaseException as error:  # noqa: BLE001 - raised by whoever wants the result
            self._error = error
        finally:
            if self._taken.get("by") is me:
                self._work = None
                self.over.set()
            # Else the error would keep itself, and what was worked on, by these variables.
            del self, work

    def done(self) -> bool:
        """Return whether the task is over, well or badly, or called off."""
        return self.over.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for its end, in seconds; whether it came in time."""
        return self.over.wait(timeout_s)

    def result(self, timeout_s: float | None = None) -> T:
        """Return what the work returned.

        Args:
            timeout_s: The longest wait for its end, in seconds; ``None`` for any.

        Raises:
            TimeoutError: It was not over in time, and goes on.
            BaseException: What the work raised.
        """
        try:
            if not self.wait(timeout_s):
                raise TimeoutError(f"it was not over after {timeout_s:g} s")
            if self._error is not None:
                raise self._error
            return cast(T, self._result)
        finally:
            # Else the error would keep itself by this variable.
            del self

    def take_result(self, timeout_s: float | None = None) -> T:
        """Return what the work returned, and keep no error, so that this can be called once.

        For callers who keep the task in a variable, which the frames of the error keep.
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
        """Return whether it has begun or will begin; call it off if :meth:`start` was interrupted.

        A thread that was started may take a while until it begins the task.
        """
        if not self._is_started:
            self.call_off()
        return self._is_started or self._taken["by"] is not None

    def call_off(self) -> bool:
        """Let it not begin; whether nothing of it runs now."""
        if self._taken.setdefault("by", None) is None:
            self._work = None
            self.over.set()
        return self.done()


class _Thread(threading.Thread):
    """A thread that begins even when the start of it is interrupted.

    Its starter waits for it to begin, and it says so, by an event: with the one of the standard
    library an interrupt of the starter could leave the thread waiting there for ever.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._started = _Begun()


class _Begun(Latch):
    """A latch in the place of a thread's event."""

    def _at_fork_reinit(self) -> None:
        self._waits.clear()


def end_all(
    tasks: Sequence[Task[Any]],
    stop: Callable[[], None] | None = None,
    interrupt: BaseException | None = None,
) -> None:
    """Return when none of the tasks runs; those that have not begun are called off.

    Args:
        tasks: They end by themselves.
        stop: Makes them end sooner; called when this thread is interrupted.
        interrupt: One that came already.

    Raises:
        BaseException: The interrupt that came first, once none of the tasks runs.
    """
    while not all(task.done() for task in tasks):
        try:
            if interrupt is not None and stop is not None:
                stop()
            for task in tasks:
                if not task.call_off():
                    task.wait()
        except BaseException as error:  # noqa: BLE001 - raised once none of them runs
            interrupt = interrupt or error
    if interrupt is not None:
        try:
            raise interrupt
        finally:
            # Else it would keep itself by this variable.
            del interrupt


class SerialThread:
    """Thread that carries out tasks one after another, and lives only while there is work.

    An idle one holds no thread, and the interpreter's exit waits for the tasks that were submitted.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._waiting: deque[Task[Any]] = deque()
        self._runner: Task[None] | None = None

    def submit(self, task: Task[Any]) -> None:
        """Have a task carried out after those that were submitted before.

        Raises:
            RuntimeError: No thread can be had. The task was not submitted.
        """
        with self._lock:
            self._waiting.append(task)
            try:
                self._have_runner()
            except RuntimeError:
                self._waiting.remove(task)
                raise

    def close(self) -> None:
        """Return when all that was submitted is over."""
        while (runner := self._runner) is not None:
            with self._lock:
                self._have_runner()
            runner.wait()

    def _have_runner(self) -> None:
        # One whose start was interrupted is called off: it may never begin.
        if self._runner is None or self._runner.call_off():
            runner = self._runner = Task(lambda: self._run_waiting(runner))
            # Not a daemon: the interpreter must not take memory away that is in use.
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
    task = Task(work)
    try:
        # Not a daemon: the interpreter must not end while it is inside of a library.
        task.start("localckpt-interruptible", daemon=False)
        task.wait()
    except RuntimeError:
        # No thread can be had, as while the interpreter ends: then nothing can end it sooner.
        task.run()
    except BaseException as interrupt:
        end_all([task], stop, interrupt)
        raise
    return task.take_result()


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
