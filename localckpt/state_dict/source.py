"""Interface of the sources of an image's bytes, and the source for a buffer in memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
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
    "views_last",
]

PIECE_NBYTES = 2 << 20
"""Size of the pieces that are copied and verified: whole digest blocks that fit in the cache."""

# Threads that share the copies from memory.
_THREADS = 2

Places = Callable[[int, int], list[memoryview]]
"""``places(start, stop)``: returns writable memory for these bytes of an image, as parts in
order."""
Filled = Callable[[int, list[memoryview]], None]
"""``filled(start, parts)``: called once the parts that :data:`Places` returned are filled."""


def scatter(piece: memoryview, parts: list[memoryview]) -> None:
    """Copy a piece into consecutive parts, with the GIL released."""
    source = address_of(piece)
    for part in parts:
        ctypes.memmove(address_of(part), source, len(part))
        source += len(part)


def handle_pieces(
    stop: int,
    threads: int,
    handle: Callable[[int, int], None],
    starts: Sequence[int] | None = None,
) -> None:
    """Call ``handle(start, end)`` for each piece of ``[0, stop)``, in several threads.

    The calling thread is one of them. The first error of ``handle`` ends the work, and is raised.

    Args:
        stop: End of the last piece.
        threads: Number of threads.
        handle: Handles one piece.
        starts: Starts of the pieces that are handled; ``None`` for all pieces.
    """

    def work(starts: Iterator[int]) -> None:
        for start in starts:
            handle(start, min(start + PIECE_NBYTES, stop))

    Copier(threads).share(range(0, stop, PIECE_NBYTES) if starts is None else starts, work)


class ShardSource(Protocol):
    """Access to one image's bytes, for one call at a time."""

    @property
    def nbytes(self) -> int:
        """Size of the image in bytes."""
        ...

    def read(self, start: int, stop: int) -> memoryview:
        """Return bytes ``[start, stop)``, valid until the next call.

        Raises:
            StorageError: The medium failed.
            CorruptShardError: The medium holds fewer bytes than the image should have.
        """
        ...

    def stream(
        self, stop: int, places: Places, filled: Filled, starts: Sequence[int] | None = None
    ) -> None:
        """Copy bytes ``[0, stop)`` piece by piece into memory that the reader chooses.

        Pieces begin at multiples of :data:`PIECE_NBYTES`, and are copied in any order by several
        threads.

        Args:
            stop: End of the bytes to copy.
            places: Returns the memory for a piece.
            filled: Called after the copy of a piece. Its first error ends the stream, and is
                raised.
            starts: Starts of the pieces that are copied; ``None`` for all pieces. Others are not
                read.
        """
        ...

    def close(self) -> None:
        """Release the resources of the source. May be called twice."""
        ...


def views_last(source: ShardSource) -> bool:
    """Return whether a view that a source has given stays valid when the source reads on.

    Sources of which that holds have an attribute ``views_last`` that is true.
    """
    return getattr(source, "views_last", False)


class MemorySource:
    """Source of an image in this process's memory.

    Args:
        view: Bytes of the image; not copied.
    """

    views_last = True

    def __init__(self, view: memoryview) -> None:
        self.view = view

    @property
    def nbytes(self) -> int:
        return len(self.view)

    def read(self, start: int, stop: int) -> memoryview:
        return self.view[start:stop]

    def stream(
        self, stop: int, places: Places, filled: Filled, starts: Sequence[int] | None = None
    ) -> None:
        def handle(start: int, end: int) -> None:
            parts = places(start, end)
            scatter(self.view[start:end], parts)
            filled(start, parts)

        handle_pieces(stop, _THREADS, handle, starts)

    def close(self) -> None:
        self.view = memoryview(b"")
