"""Copies host memory at the speed of memory.

Plain threads around ``memmove`` with the GIL released, in pieces: torch's own multi-threaded copies
stall for up to a second when another process keeps a core busy.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from localckpt.threads import Task, end_all

__all__ = ["Copier", "default_copy_threads"]

T = TypeVar("T")

_PIECE_NBYTES = 8 << 20


def default_copy_threads() -> int:
    """The node's cores shared among its ranks; more than 4 threads add nothing."""
    cores = len(os.sched_getaffinity(0))
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return max(1, min(4, cores // ranks))


class Copier:
    """Runs many memory copies with a few threads.

    Args:
        threads: How many; ``None`` for :func:`default_copy_threads`.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads or default_copy_threads()
        self._pool = _LastingThreads()
        self._shares: Sequence[Task[None]] = ()
        self._left: Iterator[Any] = iter(())

    def copy(self, jobs: Iterable[tuple[int, int, int]], keep: Any = None) -> None:
        """Carry out ``(destination address, source address, bytes)`` copies; returns when done.

        Args:
            jobs: Destinations must not overlap.
            keep: What owns the memory on both sides; it lives until no thread copies any more.
        """
        self.share([piece for job in jobs for piece in _pieces(job)], _copy_pieces, keep)

    def share(
        self, pieces: Iterable[T], work: Callable[[Iterator[T]], None], keep: Any = None
    ) -> None:
        """Call ``work`` in all threads at once, the caller's among them; returns when all have.

        When one of them raises, or the caller is interrupted, they begin no further piece, and it
        is raised here once none of them works any more.

        Args:
            pieces: What there is to do; ``work`` takes pieces from it until none is left.
            work: Does them.
            keep: What it works on; it lives until no thread works any more.
        """
        self.settle()
        # One iterator shared by the threads balances them; next() on it is atomic under the GIL.
        left = self._left = iter(list(pieces))
        if self._threads == 1:
            work(left)
            return
        parts = range(self._threads - 1)
        # Known before the first one begins: what is interrupted here is settled all the same.
        shares = self._shares = [Task(partial(_take_part, work, left, keep)) for _ in parts]
        try:
            self._pool.submit(shares)
            work(left)
        finally:
            self.settle()
        for share in shares:
            share.take_result()

    def settle(self) -> None:
        """Begin no further piece, and return when no thread works any more.

        Raises:
            BaseException: The interrupt that came meanwhile, once no thread works any more.
        """
        deque(self._left, maxlen=0)
        end_all(self._shares)
        self._shares = ()

    def close(self) -> None:
        """End the threads."""
        self.settle()
        self._pool.close()
        self._pool = _LastingThreads()


class _LastingThreads:
    """A few threads that wait for tasks. They do not keep the interpreter from ending."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Task[None] | None] = SimpleQueue()
        self._threads: list[Task[None]] = []

    def submit(self, tasks: Sequence[Task[None]]) -> None:
        """Have tasks carried out, by as many threads. A task that no thread takes is not begun."""
        while len(self._threads) < len(tasks):
            # Noted first, so that an interrupt leaves no thread that :meth:`close` does not end.
            self._threads.append(Task(self._serve))
            self._threads[-1].start("localckpt-copy", daemon=True)
        for task in tasks:
            self._tasks.put(task)

    def close(self) -> None:
        """End the threads."""
        for _ in self._threads:
            self._tasks.put(None)
        end_all(self._threads)

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            task.run()
            del task


def _take_part(work: Callable[[Iterator[T]], None], left: Iterator[T], keep: Any) -> None:
    try:
        work(left)
    except BaseException:
        deque(left, maxlen=0)
        raise


def _pieces(job: tuple[int, int, int]) -> Sequence[tuple[int, int, int]]:
    destination, source, nbytes = job
    if nbytes <= _PIECE_NBYTES:
        return (job,)
    return [
        (destination + done, source + done, min(_PIECE_NBYTES, nbytes - done))
        for done in range(0, nbytes, _PIECE_NBYTES)
    ]


def _copy_pieces(pieces: Iterator[tuple[int, int, int]]) -> None:
    memmove = ctypes.memmove
    for destination, source, nbytes in pieces:
        memmove(destination, source, nbytes)
