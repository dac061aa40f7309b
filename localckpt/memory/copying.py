"""Copies of host memory at the speed of memory, and of runs of it into the blocks of an image.

Plain threads around ``memmove`` with the GIL released, in pieces: torch's own multi-threaded copies
stall for up to a second when another process keeps a core busy. A block of an image is hashed while
it is in the cache: behind training it would have to come from memory once more, which takes a core
from training for 70 ms per 1.5 GB; here it is some 15 ms for two threads (AMD EPYC, 1 MiB of L2
cache for each core).
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from localckpt.memory.digests import (
    BLOCK_NBYTES,
    DIGEST_NBYTES,
    BlockHasher,
    digests_nbytes,
)
from localckpt.memory.host_memory import address_of
from localckpt.threads import Task, end_all

__all__ = ["BlockCopies", "Copier", "default_copy_threads"]

T = TypeVar("T")

_PIECE_NBYTES = 8 << 20


def default_copy_threads() -> int:
    """The node's cores shared among its ranks; more than 4 threads add nothing."""
    cores = len(os.sched_getaffinity(0))
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return max(1, min(4, cores // ranks))


class Copier:
    """Copier of much memory with a few threads, which live as long as one call does.

    Args:
        threads: How many; ``None`` for :func:`default_copy_threads`.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads or default_copy_threads()
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
        self.stop()
        # One iterator shared by the threads balances them; next() on it is atomic under the GIL.
        waiting = list(pieces)
        left = self._left = iter(waiting)
        others = range(min(self._threads, len(waiting)) - 1)
        # Known before the first one begins: what is interrupted here is stopped all the same.
        shares = self._shares = [Task(partial(_take_part, work, left, keep)) for _ in others]
        try:
            # None can be had while the interpreter is leaving: then the caller does it all.
            with suppress(RuntimeError):
                for share in shares:
                    # Not a daemon: it would end the process with SIGABRT if the interpreter's exit
                    # came in the moment between the end of the work and that of the thread.
                    share.start("localckpt-copy", daemon=False)
            work(left)
        finally:
            self.stop()
        for share in shares:
            share.take_result()

    def stop(self) -> None:
        """Begin no further piece, and return when no thread works any more.

        Raises:
            BaseException: The interrupt that came meanwhile, once no thread works any more.
        """
        deque(self._left, maxlen=0)
        end_all(self._shares)
        self._shares = ()


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


class BlockCopies:
    """Runs of host memory that belong into the tensor data of an image, save after save.

    Args:
        runs: ``(offset, nbytes)`` of each in the data; none overlaps another.
    """

    def __init__(self, runs: Iterable[tuple[int, int]]) -> None:
        self._runs = tuple(runs)
        self._data_start = -1
        self._blocks: dict[int, list[tuple[int, int, int, int]]] = {}

    def copy(
        self,
        image: memoryview,
        data_start: int,
        covered_nbytes: int,
        sources: Sequence[int],
        copier: Copier,
        hasher: BlockHasher | None,
        keep: Any = None,
    ) -> None:
        """Copy all runs.

        Args:
            image: Writable. Everything but the runs is in it already, if it is to be hashed.
            data_start: Where the tensor data begins in it.
            covered_nbytes: How much of it the digests cover, which follow them.
            sources: Where each run lies in memory.
            copier: Its threads share the work.
            hasher: Writes the digests; ``None`` to leave them out.
            keep: What owns the memory of the sources; it lives until no thread reads it any more.
        """
        cut = self._cut(data_start)
        count = digests_nbytes(covered_nbytes) // DIGEST_NBYTES
        wanted = cut if hasher is None else range(count)
        base = address_of(image)

        def work(left: Iterator[tuple[int, Sequence[tuple[int, int, int, int]]]]) -> None:
            memmove = ctypes.memmove
            for index, pieces in left:
                for run, skipped, position, nbytes in pieces:
                    memmove(base + position, sources[run] + skipped, nbytes)
                if hasher is not None:
                    hasher.fill_block(image, covered_nbytes, index)

        copier.share([(index, cut.get(index, ())) for index in wanted], work, (image, keep))

    def _cut(self, data_start: int) -> dict[int, list[tuple[int, int, int, int]]]:
        """Pieces of the runs in each block: ``(run, bytes skipped, position, nbytes)``."""
        if data_start != self._data_start:
            blocks: dict[int, list[tuple[int, int, int, int]]] = {}
            for run, (offset, nbytes) in enumerate(self._runs):
                begin, end = data_start + offset, data_start + offset + nbytes
                position = begin
                while position < end:
                    index = position // BLOCK_NBYTES
                    stop = min(end, (index + 1) * BLOCK_NBYTES)
                    piece = (run, position - begin, position, stop - position)
                    blocks.setdefault(index, []).append(piece)
                    position = stop
            self._blocks, self._data_start = blocks, data_start
        return self._blocks
