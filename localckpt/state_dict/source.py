"""Sources of an image's bytes: their interface, a buffer in memory, and verified reads of any.

Nothing here needs torch, so a process without it can identify and verify files.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from localckpt.errors import CorruptShardError
from localckpt.ids import ShardIdentity, ShardRecord
from localckpt.memory.copying import Copier
from localckpt.memory.digests import BLOCK_NBYTES, BlockHasher, Hashed, HeldBlocks, covered_nbytes
from localckpt.memory.host_memory import PAGE_NBYTES, address_of, round_up
from localckpt.state_dict.header import (
    ImageHeader,
    header_length,
    parse_header,
    parse_record,
)

logger = logging.getLogger(__name__)

PIECE_NBYTES = 2 << 20
"""Size of the pieces that are copied and verified: whole digest blocks that fit in the cache."""


def scatter(piece: memoryview, parts: Iterable[memoryview]) -> None:
    """Copy a piece into parts in order, with the GIL released."""
    source = address_of(piece)
    for part in parts:
        ctypes.memmove(address_of(part), source, len(part))
        source += len(part)


class ShardSource(Protocol):
    """Access to one image's bytes."""

    @property
    def nbytes(self) -> int:
        """Size of the image in bytes."""
        ...

    @property
    def threads(self) -> int:
        """Number of threads whose calls of :meth:`read_into` at once are fastest."""
        ...

    def read(self, start: int, stop: int) -> memoryview:
        """Return bytes ``[start, stop)``, valid until the next call. For one call at a time."""
        ...

    def read_into(self, start: int, parts: Sequence[memoryview]) -> None:
        """Copy the bytes from ``start`` on into parts in order; several threads may call it."""
        ...

    def close(self) -> None:
        """Release the resources of the source. May be called twice."""
        ...


def views_last(source: ShardSource) -> bool:
    """Return whether the views of a source, as its ``views_last`` says, outlive its next read."""
    return getattr(source, "views_last", False)


class MemorySource:
    """Source of an image in this process's memory, which is not copied."""

    views_last = True
    threads = 2

    def __init__(self, view: memoryview) -> None:
        self.view = view

    @property
    def nbytes(self) -> int:
        return len(self.view)

    def read(self, start: int, stop: int) -> memoryview:
        return self.view[start:stop]

    def read_into(self, start: int, parts: Sequence[memoryview]) -> None:
        scatter(self.view[start : start + sum(map(len, parts))], parts)

    def close(self) -> None:
        self.view = memoryview(b"")


def read_header(source: ShardSource) -> ImageHeader:
    """Read and check an image's header; its blocks are not verified."""
    start = header_length(source.read(0, min(8, source.nbytes)), source.nbytes)
    return parse_header(source.read(0, start), source.nbytes)


def read_verified_record(source: ShardSource) -> ShardRecord:
    """Read the record of a piece, and verify the blocks that hold its header."""
    nbytes = source.nbytes
    try:
        start = header_length(source.read(0, min(8, nbytes)), nbytes)
        record = parse_record(source.read(0, start), nbytes)
        covered = covered_nbytes(nbytes)
        if covered < start:
            raise CorruptShardError("not a shard image: its header leaves no room for its digests")
        digests = memoryview(bytes(source.read(covered, nbytes)))
        stop = min(round_up(start, BLOCK_NBYTES), covered)
        BlockHasher(record.identity).check(0, [source.read(0, stop)], digests)
        return record
    except CorruptShardError:
        # read_header() parses all of the header, so its error may be more exact.
        read_header(source)
        raise


def held_blocks(source: ShardSource) -> HeldBlocks:
    """Return the digests of the image that a source has; of none if it has no image."""
    try:
        record = read_verified_record(source)
    except CorruptShardError:
        return HeldBlocks()
    digests = source.read(covered_nbytes(source.nbytes), source.nbytes)
    return HeldBlocks(BlockHasher(record.identity).seed, bytes(digests))


_EVERY_S = 10.0


class ReadProgress:
    """Progress of a read, logged every ten seconds while it goes on."""

    def __init__(self, what: str, nbytes: int) -> None:
        self._what = what
        self._nbytes = nbytes
        self._done_nbytes = 0
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._logged = self._began

    def add(self, nbytes: int) -> None:
        """Count bytes that have been read; may be called from several threads."""
        now = time.monotonic()
        with self._lock:
            self._done_nbytes += nbytes
            done_nbytes = self._done_nbytes
            if now - self._logged < _EVERY_S or done_nbytes >= self._nbytes:
                return
            self._logged = now
        rate = done_nbytes / (now - self._began)
        logger.info(
            "%s: %.1f of %.1f GB after %.0f s, %.2f GB/s, about %.0f s left",
            self._what, done_nbytes / 1e9, self._nbytes / 1e9, now - self._began, rate / 1e9,
            (self._nbytes - done_nbytes) / rate,
        )  # fmt: skip


Destination = memoryview | Callable[[int, memoryview], None]
"""Memory, or a function, which gets bytes piece by piece, verified, with the offset of each piece
in the range. Several threads call it, and it may keep nothing of a piece."""


class ByteRange(NamedTuple):
    """Bytes ``[start, stop)`` of a source, and where they go."""

    start: int
    stop: int
    to: Destination


class VerifiedBytes:
    """Bytes of an image or a file, of which each block is verified when it is read.

    Functions are given verified bytes only; memory of the caller is filled first, and is of no use
    after an error. One thread calls the methods, which raise CorruptShardError for a damaged block.
    Without digests nothing is verified. ``on_read`` gets the bytes of each read, in its thread.
    """

    def __init__(
        self,
        source: ShardSource,
        identity: Hashed,
        end: int,
        digests: memoryview | None,
        on_read: Callable[[int], None],
    ) -> None:
        self.end = end
        self._source = source
        self._on_read = on_read
        self._hasher = BlockHasher(identity)
        self._digests = digests
        # The last piece that was read: small tensors lie side by side, and one read serves many.
        self._start, self._piece = 0, memoryview(b"")

    def pieces(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield bytes ``[start, stop)`` in order, each piece valid until the next call."""
        while start < stop:
            if not self._start <= start < self._start + len(self._piece):
                self._fetch(start)
            piece = self._piece[start - self._start : stop - self._start]
            yield piece
            start += len(piece)

    def read_into(self, start: int, memory: memoryview) -> None:
        """Copy as many bytes as ``memory`` has room for."""
        done = 0
        for piece in self.pieces(start, start + len(memory)):
            scatter(piece, [memory[done : done + len(piece)]])
            done += len(piece)

    def read_ranges(
        self,
        ranges: Iterable[ByteRange],
        *,
        is_all_verified: bool = False,
        scratch: Callable[[int], memoryview] | None = None,
        finish: Callable[[], None] = lambda: None,
        most_threads: int | None = None,
    ) -> None:
        """Read ranges, of which no two share a byte, with several threads.

        Args:
            is_all_verified: Whether all is read, rather than the blocks of the ranges.
            scratch: Returns memory of the thread for so many bytes that have no place.
            finish: Called after each piece, once all bytes of it are given.
        """
        ordered = sorted((one for one in ranges if one.start < one.stop), key=lambda one: one.start)
        begins = [one.start for one in ordered]

        def read(pieces: Iterator[tuple[int, int]]) -> None:
            own = memoryview(b"") if scratch else memoryview(bytearray(PIECE_NBYTES))
            for start, stop in pieces:
                rest = scratch(stop - start) if scratch else own[: stop - start]
                first = max(0, bisect_right(begins, start) - 1)
                within = ordered[first : bisect_left(begins, stop)]
                parts, given = _places(within, start, stop, rest)
                self._source.read_into(start, parts)
                self._take(start, parts)
                for give, offset, data in given:
                    give(offset, data)
                finish()

        self._forget()
        if is_all_verified:
            starts = range(0, self.end, PIECE_NBYTES)
            pieces = [(at, min(at + PIECE_NBYTES, self.end)) for at in starts]
        else:
            block = PAGE_NBYTES if self._digests is None else BLOCK_NBYTES
            pieces = _pieces_with(ordered, self.end, block)
        threads = self._source.threads
        Copier(min(threads, most_threads or threads)).share(pieces, read)

    def _fetch(self, wanted: int) -> None:
        self._forget()
        start = wanted // BLOCK_NBYTES * BLOCK_NBYTES
        piece = self._source.read(start, min(start + PIECE_NBYTES, self.end))
        self._take(start, [piece])
        self._start, self._piece = start, piece

    def _take(self, start: int, parts: Sequence[memoryview]) -> None:
        self._on_read(sum(map(len, parts)))
        if self._digests is not None:
            self._hasher.check(start, parts, self._digests)

    def _forget(self) -> None:
        # A source gives its last piece until the next is read.
        self._piece = memoryview(b"")


class ImageBytes(VerifiedBytes):
    """Bytes of one image before its digests, which are its last bytes.

    Raises CorruptShardError for another shard's image than ``expect``. By default the progress of a
    long read is logged.
    """

    def __init__(
        self,
        source: ShardSource,
        expect: ShardIdentity | None = None,
        on_read: Callable[[int], None] | None = None,
    ) -> None:
        self.header = header = read_header(source)
        self.identity = header.identity
        if expect is not None and header.identity != expect:
            raise CorruptShardError(f"expected {expect}, and found {header.identity}")
        self.digest_bytes = memoryview(bytes(source.read(header.digests_start, header.nbytes)))
        on_read = on_read or ReadProgress(f"reading {header.identity}", header.nbytes).add
        super().__init__(source, header.identity, header.digests_start, self.digest_bytes, on_read)

    def verify(self) -> None:
        self.read_ranges((), is_all_verified=True)


_Given = tuple[Callable[[int, memoryview], None], int, memoryview]


def _places(
    ranges: Iterable[ByteRange], start: int, stop: int, rest: memoryview
) -> tuple[list[memoryview], list[_Given]]:
    """Divide a piece among ranges, and a ``rest``; return the memory, and what functions get."""
    parts: list[memoryview] = []
    given: list[_Given] = []
    at = start
    for one in ranges:
        begin, end = max(start, one.start), min(stop, one.stop)
        if begin >= end:
            continue
        if callable(one.to):
            given.append((one.to, begin - one.start, rest[begin - start : end - start]))
            continue
        if at < begin:
            parts.append(rest[at - start : begin - start])
        parts.append(one.to[begin - one.start : end - one.start])
        at = end
    if at < stop:
        parts.append(rest[at - start : stop - start])
    return parts, given


def _pieces_with(ranges: Iterable[ByteRange], end: int, block: int) -> list[tuple[int, int]]:
    """Return pieces of the blocks that hold ranges; all blocks of a piece are read at once."""
    pieces: dict[int, tuple[int, int]] = {}
    for one in ranges:
        first, stop = one.start // block * block, min(round_up(one.stop, block), end)
        for piece in range(first // PIECE_NBYTES * PIECE_NBYTES, stop, PIECE_NBYTES):
            begin, until = max(first, piece), min(stop, piece + PIECE_NBYTES)
            known = pieces.get(piece, (begin, until))
            pieces[piece] = min(begin, known[0]), max(until, known[1])
    return list(pieces.values())
