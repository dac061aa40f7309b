"""Identification and verification of an image, without torch."""

from __future__ import annotations

import threading
from collections.abc import Callable

from localckpt.errors import CorruptShardError
from localckpt.ids import ShardIdentity, ShardRecord
from localckpt.memory.digests import (
    BLOCK_NBYTES,
    DIGEST_NBYTES,
    BlockHasher,
    covered_nbytes,
)
from localckpt.memory.host_memory import round_up
from localckpt.state_dict.header import (
    ImageHeader,
    header_length,
    parse_header,
    parse_record,
)
from localckpt.state_dict.source import PIECE_NBYTES, ShardSource

__all__ = [
    "find_bad_blocks",
    "read_header",
    "read_verified_record",
    "verify",
]


def read_header(source: ShardSource) -> ImageHeader:
    """Read and check an image's header; its blocks are not verified.

    Raises:
        CorruptShardError: The source does not begin with an image's header.
    """
    start = header_length(source.read(0, min(8, source.nbytes)), source.nbytes)
    return parse_header(source.read(0, start), source.nbytes)


def read_verified_record(source: ShardSource) -> ShardRecord:
    """Read the record of a piece, and verify the blocks that hold its header.

    Raises:
        CorruptShardError: The header is damaged.
    """
    try:
        return _read_verified_record(source)
    except CorruptShardError:
        # read_header() parses all of the header, so its error may be more exact.
        read_header(source)
        raise


def _read_verified_record(source: ShardSource) -> ShardRecord:
    nbytes = source.nbytes
    start = header_length(source.read(0, min(8, nbytes)), nbytes)
    record = parse_record(source.read(0, start), nbytes)
    covered = covered_nbytes(nbytes)
    if covered < start:
        raise CorruptShardError("not a shard image: its header leaves no room for its digests")
    digests = memoryview(bytes(source.read(covered, nbytes)))
    stop = min(round_up(start, BLOCK_NBYTES), covered)
    BlockHasher(record.identity).check(0, [source.read(0, stop)], digests)
    return record


def verify(
    source: ShardSource,
    identity: ShardIdentity,
    on_read: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Read a whole image, and verify its identity and all its blocks.

    Args:
        source: The image.
        identity: Identity that the image must have.
        on_read: Called with the number of bytes after each read.

    Raises:
        CorruptShardError: The image is damaged, or another shard's.
    """
    header = read_header(source)
    if header.identity != identity:
        raise CorruptShardError(f"expected {identity}, and found {header.identity}")
    digests = memoryview(bytes(source.read(header.digests_start, header.nbytes)))
    hasher = BlockHasher(identity)
    for start in range(0, header.digests_start, PIECE_NBYTES):
        stop = min(start + PIECE_NBYTES, header.digests_start)
        piece = source.read(start, stop)
        on_read(stop - start)
        hasher.check(start, [piece], digests)


def find_bad_blocks(source: ShardSource, identity: ShardIdentity) -> frozenset[int]:
    """Read a whole image, with several threads, and find the blocks that cannot be trusted.

    Where a block does not match its digest, either may be damaged, so the block that holds the
    digest is included. All other blocks are as they were saved.

    Returns:
        Indices of the bad blocks, in blocks of :data:`BLOCK_NBYTES` to the end of the digests.

    Raises:
        StorageError: The image cannot be read.
        CorruptShardError: The image has another size, or another shard's header.
    """
    header = read_header(source)
    if header.identity != identity:
        raise CorruptShardError(f"expected {identity}, and found {header.identity}")
    digests = memoryview(bytes(source.read(header.digests_start, header.nbytes)))
    hasher = BlockHasher(identity)
    of_thread = threading.local()
    bad: set[int] = set()

    def places(start: int, stop: int) -> list[memoryview]:
        if not hasattr(of_thread, "buffer"):
            of_thread.buffer = memoryview(bytearray(PIECE_NBYTES))
        return [of_thread.buffer[: stop - start]]

    def filled(start: int, parts: list[memoryview]) -> None:
        (piece,) = parts
        for at in range(0, len(piece), BLOCK_NBYTES):
            try:
                hasher.check(start + at, [piece[at : at + BLOCK_NBYTES]], digests)
            except CorruptShardError:
                block = (start + at) // BLOCK_NBYTES
                digest = header.digests_start + block * DIGEST_NBYTES
                last = digest + DIGEST_NBYTES - 1
                bad.update((block, digest // BLOCK_NBYTES, last // BLOCK_NBYTES))

    source.stream(header.digests_start, places, filled)
    return frozenset(bad)
