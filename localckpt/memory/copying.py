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
from itertools import repeat
from operator import setitem
from typing import Any, NamedTuple, TypeVar, cast

from localckpt.memory.digests import BLOCK_NBYTES
from localckpt.memory.host_memory import address_of, memory_at
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


# Below this size to release the GIL takes longer than to copy.
_SMALL_NBYTES = 64 << 10
_FEW = 8


class _Block(NamedTuple):
    """Pieces of runs in one block: ``(run, bytes skipped, position, nbytes)``."""

    large: list[tuple[int, int, int, int]]
    small: list[tuple[int, int, int, int]]
    places: list[slice]
    """Places of the small ones in the block."""


class BlockCopies:
    """Copies of the same runs ``(offset, nbytes)`` of host memory into an image, at each save.

    One call of C copies all small pieces in a block, and keeps the GIL. Blocks with many of them
    are left to the calling thread, since two threads would wait for each other.
    """

    def __init__(self, runs: Iterable[tuple[int, int]]) -> None:
        self._runs = tuple(runs)
        self._data_start = -1
        self._blocks: dict[int, _Block] = {}
        # Views of the sources of small pieces. They keep no memory alive, and are read in calls
        # with the same sources only.
        self._views: dict[int, list[memoryview]] = {}
        self._sources: Sequence[int] = ()

    def copy(
        self,
        memory: memoryview,
        data_start: int,
        sources: Sequence[int],
        copier: Copier,
        digest: Callable[[int, memoryview], None] | None = None,
        keep: Any = None,
        first: int = 0,
    ) -> None:
        """Copy the runs in the blocks of an image that ``memory`` is, from block ``first`` on.

        Args:
            data_start: Where the data begins in the image.
            sources: Addresses of the runs, whose memory ``keep`` owns.
            digest: Called with the number of each block and the block, once all is copied; what is
                no run must be there already. The last block may be short.
        """
        self._cut(data_start)
        self._view(sources)
        blocks, views = self._blocks, self._views
        wanted = range(first, first + -(-len(memory) // BLOCK_NBYTES))
        base = address_of(memory) - first * BLOCK_NBYTES

        def work(left: Iterator[int]) -> None:
            memmove, put = ctypes.memmove, cast("Callable[..., None]", setitem)
            for index in left:
                start = (index - first) * BLOCK_NBYTES
                place = memory[start : start + BLOCK_NBYTES]
                if (block := blocks.get(index)) is not None:
                    for run, skipped, position, nbytes in block.large:
                        memmove(base + position, sources[run] + skipped, nbytes)
                    deque(map(put, repeat(place), block.places, views[index]), maxlen=0)
                if digest is not None:
                    digest(index, place)

        alone = [i for i in wanted if i in blocks and len(blocks[i].small) > _FEW]
        copier.share(sorted({*wanted}.difference(alone)), work, (memory, keep))
        work(iter(alone))

    def _cut(self, data_start: int) -> None:
        if data_start == self._data_start:
            return
        self._blocks, self._data_start, self._sources = {}, data_start, ()
        for run, (offset, nbytes) in enumerate(self._runs):
            begin, end = data_start + offset, data_start + offset + nbytes
            position = begin
            while position < end:
                index = position // BLOCK_NBYTES
                stop = min(end, (index + 1) * BLOCK_NBYTES)
                block = self._blocks.setdefault(index, _Block([], [], []))
                piece = run, position - begin, position, stop - position
                if stop - position < _SMALL_NBYTES:
                    block.small.append(piece)
                    skipped = index * BLOCK_NBYTES
                    block.places.append(slice(position - skipped, stop - skipped))
                else:
                    block.large.append(piece)
                position = stop

    def _view(self, sources: Sequence[int]) -> None:
        if sources is self._sources or sources == self._sources:
            return
        self._views = {
            index: [memory_at(sources[run] + skipped, n) for run, skipped, _, n in block.small]
            for index, block in self._blocks.items()
        }
        self._sources = sources
