"""Verified parts of an image: ranges of its bytes, each block checked before a byte of it is given.

Restoring a state, draining a shard and an elastic load all read images here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from localckpt.memory.digests import BLOCK_NBYTES, BlockHasher
from localckpt.state_dict.header import ImageHeader
from localckpt.state_dict.source import PIECE_NBYTES, Filled, Places, ShardSource, scatter

__all__ = ["ImageParts"]


class ImageParts:
    """Parts of one image; its methods are called by one thread.

    Args:
        source: Source of the image's bytes; the caller closes it.
        header: Header of the image.

    Raises:
        CorruptShardError: The image ends before its digests; methods raise it for a damaged block.
        StorageError: The medium failed; methods raise it, too.
    """

    def __init__(self, source: ShardSource, header: ImageHeader) -> None:
        self._source = source
        self._end = header.digests_start
        self._hasher = BlockHasher(header.identity)
        self._digests = memoryview(bytes(source.read(header.digests_start, header.nbytes)))
        # The last piece that was read: small tensors lie side by side, and one read serves many.
        self._start, self._piece = 0, memoryview(b"")

    def pieces(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield bytes ``[start, stop)`` before the digests, in order.

        Each piece is valid until the next one is asked for, or another method is called.
        """
        while start < stop:
            if not self._start <= start < self._start + len(self._piece):
                self._fetch(start)
            piece = self._piece[start - self._start : stop - self._start]
            yield piece
            start += len(piece)

    def read_into(self, start: int, memory: memoryview) -> None:
        """Copy as many bytes before the digests as ``memory`` has room for."""
        done = 0
        for piece in self.pieces(start, start + len(memory)):
            scatter(piece, [memory[done : done + len(piece)]])
            done += len(piece)

    def read(self, start: int, stop: int) -> memoryview:
        """Return bytes ``[start, stop)`` before the digests in memory of their own."""
        memory = memoryview(bytearray(stop - start))
        self.read_into(start, memory)
        return memory

    def stream(self, places: Places, filled: Filled, starts: Sequence[int] | None = None) -> None:
        """Copy all bytes before the digests into memory that the reader chooses.

        Args:
            places, starts: As for :meth:`ShardSource.stream`.
            filled: Called after a piece was copied and verified.
        """

        def verified(start: int, parts: list[memoryview]) -> None:
            self._hasher.check(start, parts, self._digests)
            filled(start, parts)

        self._forget()
        self._source.stream(self._end, places, verified, starts)

    def _fetch(self, wanted: int) -> None:
        self._forget()
        start = wanted // BLOCK_NBYTES * BLOCK_NBYTES
        piece = self._source.read(start, min(start + PIECE_NBYTES, self._end))
        self._hasher.check(start, [piece], self._digests)
        self._start, self._piece = start, piece

    def _forget(self) -> None:
        # A source gives its last piece until the next is read.
        self._piece = memoryview(b"")
