"""Sources of the bytes of an image: a buffer, a file, shared memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Protocol

from localckpt.memory.copying import Copier
from localckpt.memory.host_memory import address_of

__all__ = [
    "PIECE_NBYTES",
    "Filled",
    "MemorySource",
    "Places",
    "ShardSource",
    "handle_pieces",
    "scatter",
]

PIECE_NBYTES = 2 << 20
"""Bytes that are handled at a time: whole digest blocks, and few enough for the cache."""


Places = Callable[[int, int], list[memoryview]]
"""``places(start, stop)``: writable memory for these bytes of an image, in order, in parts."""
Filled = Callable[[int, list[memoryview]], None]
"""``filled(start, parts)``: what :data:`Places` gave now holds the image's bytes."""


def scatter(piece: memoryview, parts: list[memoryview]) -> None:
    """Copy a piece to the parts it belongs to, with the GIL released."""
    source = address_of(piece)
    for part in parts:
        ctypes.memmove(address_of(part), source, len(part))
        source += len(part)


def handle_pieces(stop: int, threads: int, handle: Callable[[int, int], None]) -> None:
    """Call ``handle(start, end)`` for each piece of ``[0, stop)``, from several threads.

    The caller's is one of them. What it raises first ends the work and is raised here.
    """

    def work(starts: Iterator[int]) -> None:
        for start in starts:
            handle(start, min(start + PIECE_NBYTES, stop))

    Copier(threads).share(range(0, stop, PIECE_NBYTES), work)


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

    def stream(self, stop: int, places: Places, filled: Filled) -> None:
        """Copy ``[0, stop)`` piece by piece to where the reader wants it.

        Pieces begin at multiples of :data:`PIECE_NBYTES` and come in any order, from several
        threads.

        Args:
            stop: End of what is wanted.
            places: Asked for the memory that the bytes ``[start, stop)`` are to be copied to.
            filled: Told that they have been. What it raises ends the stream and is raised here.
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

    def stream(self, stop: int, places: Places, filled: Filled) -> None:
        def handle(start: int, end: int) -> None:
            parts = places(start, end)
            scatter(self.view[start:end], parts)
            filled(start, parts)

        handle_pieces(stop, self._threads, handle)

    def close(self) -> None:
        self.view = memoryview(b"")
