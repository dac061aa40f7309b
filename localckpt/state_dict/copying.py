"""Copies host memory at the speed of memory.

Plain threads around ``memmove`` with the GIL released, in pieces: torch's own multi-threaded copies
stall for up to a second when another process keeps a core busy.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

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
        self._pool: ThreadPoolExecutor | None = None
        self._shares: Sequence[_Share[Any]] = ()

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
        left = iter(list(pieces))
        if self._threads == 1:
            work(left)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads - 1, "localckpt-copy")
        # Known before the first one begins: what is interrupted here is settled all the same.
        shares = self._shares = [_Share(work, left, keep) for _ in range(self._threads - 1)]
        try:
            for share in shares:
                self._pool.submit(share.run)
            work(left)
        finally:
            self.settle()
        for share in shares:
            if share.error is not None:
                raise share.take_error()

    def settle(self) -> None:
        """Begin no further piece, and return when no thread works any more.

        Raises:
            BaseException: The interrupt that came meanwhile, once no thread works any more.
        """
        interrupt: BaseException | None = None
        while self._shares:
            try:
                for share in self._shares:
                    share.end()
                self._shares = ()
            except BaseException as error:  # noqa: BLE001 - raised once no thread works any more
                interrupt = interrupt or error
        if interrupt is not None:
            try:
                raise interrupt
            finally:
                # Else it would keep itself, and what is copied, by this variable.
                del interrupt

    def close(self) -> None:
        """End the threads."""
        self.settle()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


class _Share(Generic[T]):
    """One thread's part in work that several do.

    Args:
        work, left, keep: What :meth:`Copier.share` was given.
    """

    def __init__(self, work: Callable[[Iterator[T]], None], left: Iterator[T], keep: Any) -> None:
        self.error: BaseException | None = None
        self._work = work
        self._left = left
        self._keep = keep
        # Filled once, by whoever comes first; unlike a lock it can be asked again.
        self._begun: dict[str, bool] = {}
        # Held until it is over. Not an event: an interrupt makes other errors of waits for those.
        self._at_work = threading.Lock()
        self._at_work.acquire()

    def run(self) -> None:
        """Do the part, in a thread of the pool, unless :meth:`end` was called before."""
        if self._begun.setdefault("begun", True):
            try:
                self._work(self._left)
            except BaseException as error:  # noqa: BLE001 - raised by the thread that shares
                self.error = error
                deque(self._left, maxlen=0)
            finally:
                self._at_work.release()

    def take_error(self) -> BaseException:
        """The error of this part, which it does not keep: its frames keep the part."""
        assert self.error is not None
        error, self.error = self.error, None
        try:
            return error
        finally:
            del error

    def end(self) -> None:
        """Return when the part is over; it begins no further piece. May be called again."""
        deque(self._left, maxlen=0)
        if self._begun.setdefault("begun", False):
            with self._at_work:
                pass
        # A pool that has not come to this part yet must not keep the memory.
        self._keep = None


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
