"""Multi-threaded copies of host memory, and copies that also hash the blocks of an image.

Python threads call ``memmove``, which releases the GIL, on pieces: torch's own multi-threaded
copies stall for up to a second when another process keeps a core busy. Each block of an image is
hashed right after its copy, while the block is in the cache. That takes about 15 ms per 1.5 GB with
two threads; hashing it later, from memory, would take a core from training for 70 ms (AMD EPYC,
1 MiB of L2 cache for each core).
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

T = TypeVar("T")


def default_copy_threads() -> int:
    """Return this rank's part of the node's cores, at most 4: more threads add nothing."""
    cores = len(os.sched_getaffinity(0))
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return max(1, min(4, cores // ranks))


class Copier:
    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads or default_copy_threads()
        self._shares: Sequence[Task[None]] = ()
        self._left: Iterator[Any] = iter(())

    def share(
        self, pieces: Iterable[T], work: Callable[[Iterator[T]], None], keep: Any = None
    ) -> None:
        """Call ``work`` in all threads at once, the caller's included, and wait for all of them.

        It takes pieces from its iterator until none is left, a thread raises, or the caller is
        interrupted, which is raised once all threads have ended. Until then ``keep`` is alive.
        """
        self.stop()
        # One iterator shared by the threads balances them; next() on it is atomic under the GIL.
        waiting = list(pieces)
        left = self._left = iter(waiting)
        others = range(min(self._threads, len(waiting)) - 1)
        # Assigned before the first thread starts, so that stop() ends all of them on an interrupt.
        shares = self._shares = [Task(partial(_take_part, work, left, keep)) for _ in others]
        try:
            # No thread can start while the interpreter exits: the caller then does all the work.
            with suppress(RuntimeError):
                for share in shares:
                    # A daemon thread would end the process with SIGABRT if the interpreter exited
                    # between the end of the work and the end of the thread.
                    share.start("localckpt-copy", daemon=False)
            work(left)
        finally:
            self.stop()
        for share in shares:
            share.take_result()

    def stop(self) -> None:
        """Let no thread begin another piece, and wait for all; an interrupt is raised then."""
        deque(self._left, maxlen=0)
        end_all(self._shares)
        self._shares = ()


def _take_part(work: Callable[[Iterator[T]], None], left: Iterator[T], keep: Any) -> None:
    try:
        work(left)
    except BaseException:
        deque(left, maxlen=0)
        raise


class BlockCopies:
    """Copies of the same runs ``(offset, nbytes)`` of host memory into an image, at each save."""

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
        """Copy all runs from the addresses of ``sources``, whose memory ``keep`` owns.

        With a hasher, which follows the copies, all else must be in the image already.
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
        """Cut the runs into pieces by block: ``(run, bytes skipped, position, nbytes)``."""
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
