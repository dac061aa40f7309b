"""Exchange of images whose receivers still have older ones: only changed blocks are sent.

Each receiver first sends the digests of what it has, and each sender which blocks are changed. The
sizes of both messages follow from that of the image.
"""

from __future__ import annotations

from collections.abc import Sequence

from localckpt.memory.digests import (
    DIGEST_NBYTES,
    HeldBlocks,
    block_ranges,
    covered_nbytes,
    digests_nbytes,
)
from localckpt.ranks.deadline import Deadline
from localckpt.replication.progress import Receives, Sends
from localckpt.replication.transport import Transport
from localckpt.state_dict.source import MemorySource, ShardSource, views_last
from localckpt.storage.write import StagedImage


def exchange_changed(
    transport: Transport,
    sends: Sends,
    receives: Receives,
    held: Sequence[HeldBlocks],
    deadline: Deadline,
) -> int:
    """Exchange images as :meth:`Transport.exchange` does, and return how many bytes were sent.

    ``held`` describes what is in the memory of each of ``receives``. Where it is not as described,
    the image does not verify in the end, which is for the caller to see.
    """
    asked = [(to, _memory(HeldBlocks(), source.nbytes)) for to, source in sends]
    described = [
        (peer, MemorySource(_memory(blocks, len(view))))
        for (peer, view), blocks in zip(receives, held, strict=True)
    ]
    transport.exchange(described, asked, deadline.left_s)
    try:
        changed = [
            HeldBlocks.unpacked(packed).changed(source.read, covered_nbytes(source.nbytes))
            for (_, source), (_, packed) in zip(sends, asked, strict=True)
        ]
    except BaseException:
        # Else the peers would wait for what does not come.
        transport.abort()
        raise
    flags = [
        (to, MemorySource(memoryview(chosen)))
        for (to, _), chosen in zip(sends, changed, strict=True)
    ]
    chosen_by_peers = [(peer, memoryview(bytearray(_num_blocks(len(v))))) for peer, v in receives]
    transport.exchange(flags, chosen_by_peers, deadline.left_s)
    parts = [
        (to, _Part(source, start, stop))
        for (to, source), chosen in zip(sends, changed, strict=True)
        for start, stop in _ranges(chosen, source.nbytes)
    ]
    places = [
        # An older image that is not in memory has no blocks, so a new one comes as a whole.
        (peer, view if isinstance(view, StagedImage) else view[start:stop])
        for (peer, view), (_, chosen) in zip(receives, chosen_by_peers, strict=True)
        for start, stop in _ranges(chosen, len(view))
    ]
    transport.exchange(parts, places, deadline.left_s)
    return sum(part.nbytes for _, part in parts)


class _Part:
    """Source of a part of an image."""

    def __init__(self, source: ShardSource, start: int, stop: int) -> None:
        self._source, self._start = source, start
        self.nbytes, self.threads = stop - start, source.threads
        self.views_last = views_last(source)

    def read(self, start: int, stop: int) -> memoryview:
        return self._source.read(self._start + start, self._start + stop)

    def read_into(self, start: int, parts: Sequence[memoryview]) -> None:
        self._source.read_into(self._start + start, parts)

    def close(self) -> None:
        """Do nothing: the image is the caller's."""


def _memory(held: HeldBlocks, image_nbytes: int) -> memoryview:
    return memoryview(held.packed(covered_nbytes(image_nbytes)))


def _num_blocks(image_nbytes: int) -> int:
    return digests_nbytes(covered_nbytes(image_nbytes)) // DIGEST_NBYTES


def _ranges(chosen: bytearray | memoryview, image_nbytes: int) -> list[tuple[int, int]]:
    """Return the bytes of chosen blocks, and of the digests, which always change."""
    covered = covered_nbytes(image_nbytes)
    ranges = block_ranges(chosen, covered)
    start = ranges.pop()[0] if ranges and ranges[-1][1] == covered else covered
    return [*ranges, (start, image_nbytes)]
