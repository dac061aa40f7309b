"""Copies host memory into an image block by block, and hashes each block while it is in the cache.

Hashed behind training, a block has to come from memory once more, which takes a core from it for 70
ms per 1.5 GB; here it is some 15 ms for two threads (AMD EPYC, 1 MiB of L2 cache for each core).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from localckpt.state_dict.copying import Copier
from localckpt.state_dict.digests import (
    BLOCK_NBYTES,
    DIGEST_NBYTES,
    BlockHasher,
    digests_nbytes,
)
from localckpt.state_dict.host_memory import address_of

__all__ = ["BlockCopies"]


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
        """For each block the pieces of runs in it: ``(run, bytes skipped, position, nbytes)``."""
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
