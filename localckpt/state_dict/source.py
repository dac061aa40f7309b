"""Where the bytes of an image can be read from: a buffer, a file, shared memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

__all__ = ["PIECE_NBYTES", "MemorySource", "ShardSource"]

PIECE_NBYTES = 4 << 20
"""Bytes that are handled at a time: whole digest blocks, and few enough for the cache."""


class ShardSource(Protocol):
    """Access to one image's bytes; one call at a time."""

    @property
    def nbytes(self) -> int:
        """Size of the image in bytes."""
        ...

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes ``[start, stop)``, valid until the next call.

        Raises:
            StorageError: The medium failed.
            CorruptShardError: The medium holds fewer bytes than the image should have.
        """
        ...

    def stream(self, stop: int, consume: Callable[[int, memoryview], None]) -> None:
        """Call ``consume(offset, piece)`` once for each piece of ``[0, stop)``.

        Offsets are multiples of :data:`PIECE_NBYTES`; calls come in any order and from several
        threads. What ``consume`` raises ends the stream and is raised here.
        """
        ...

    def close(self) -> None:
        """Give back what the source holds open. May be called twice."""
        ...


class MemorySource:
    """An image that lies in this process's memory.

    Args:
        view: The bytes of the image; not copied.
        threads: How many threads share the work of :meth:`stream`.
    """

    def __init__(self, view: memoryview, threads: int = 2) -> None:
        self.view = view
        self._threads = threads

    @property
    def nbytes(self) -> int:
        return len(self.view)

    def read(self, start: int, stop: int) -> memoryview:
        return self.view[start:stop]

    def stream(self, stop: int, consume: Callable[[int, memoryview], None]) -> None:
        def handle(offset: int) -> None:
            consume(offset, self.view[offset : min(offset + PIECE_NBYTES, stop)])

        with ThreadPoolExecutor(self._threads, "localckpt-read") as pool:
            for _ in pool.map(handle, range(0, stop, PIECE_NBYTES)):
                pass

    def close(self) -> None:
        self.view = memoryview(b"")
