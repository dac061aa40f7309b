"""Copies host memory at the speed of memory.

Plain threads around ``memmove`` with the GIL released, in pieces: torch's own multi-threaded copies
stall for up to a second when another process keeps a core busy.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

__all__ = ["Copier", "default_copy_threads"]

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

    def copy(self, jobs: Iterable[tuple[int, int, int]]) -> None:
        """Carry out ``(destination address, source address, bytes)`` copies; returns when done.

        The memory on both sides must stay alive meanwhile, and destinations must not overlap.
        """
        # One iterator shared by the threads balances them; next() on it is atomic under the GIL.
        pieces = iter([piece for job in jobs for piece in _pieces(job)])
        self.share(lambda: _copy_pieces(pieces))

    def share(self, work: Callable[[], None]) -> None:
        """Call ``work`` in all threads at once, the caller's among them; returns when all have."""
        if self._threads == 1:
            work()
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads - 1, "localckpt-copy")
        others = [self._pool.submit(work) for _ in range(self._threads - 1)]
        try:
            work()
        finally:
            # None of them may still write to memory that is given up.
            wait(others)
        for other in others:
            other.result()

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


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
