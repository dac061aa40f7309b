"""Tells what an image is without reading its tensors, and without torch."""

from __future__ import annotations

from localckpt.errors import CorruptShardError
from localckpt.ids import ShardIdentity
from localckpt.state_dict.digests import BLOCK_NBYTES, BlockHasher, covered_nbytes
from localckpt.state_dict.header import (
    ImageHeader,
    header_length,
    parse_header,
    parse_identity,
)
from localckpt.state_dict.layout import round_up
from localckpt.state_dict.source import PIECE_NBYTES, ShardSource

__all__ = ["read_header", "read_verified_identity", "verify"]


def read_header(source: ShardSource) -> ImageHeader:
    """Read and check the header; the blocks are not verified.

    Raises:
        CorruptShardError: It is no shard's.
    """
    start = header_length(source.read(0, min(8, source.nbytes)), source.nbytes)
    return parse_header(source.read(0, start), source.nbytes)


def read_verified_identity(source: ShardSource) -> ShardIdentity:
    """What the shard is, by a header whose blocks are as they were written.

    Raises:
        CorruptShardError: The header is damaged.
    """
    try:
        return _read_verified_identity(source)
    except CorruptShardError:
        # It says more exactly what is wrong, if it sees it.
        read_header(source)
        raise


def _read_verified_identity(source: ShardSource) -> ShardIdentity:
    nbytes = source.nbytes
    start = header_length(source.read(0, min(8, nbytes)), nbytes)
    identity = parse_identity(source.read(0, start))
    covered = covered_nbytes(nbytes)
    if covered < start:
        raise CorruptShardError("not a shard image: its header leaves no room for its digests")
    digests = memoryview(bytes(source.read(covered, nbytes)))
    stop = min(round_up(start, BLOCK_NBYTES), covered)
    BlockHasher(identity).check(0, [source.read(0, stop)], digests)
    return identity


def verify(source: ShardSource, identity: ShardIdentity) -> None:
    """Read a whole image, and check that it is what was saved.

    Raises:
        CorruptShardError: It is damaged, or another shard's.
    """
    header = read_header(source)
    if header.identity != identity:
        raise CorruptShardError(f"expected {identity}, and found {header.identity}")
    digests = memoryview(bytes(source.read(header.digests_start, header.nbytes)))
    hasher = BlockHasher(identity)
    for start in range(0, header.digests_start, PIECE_NBYTES):
        stop = min(start + PIECE_NBYTES, header.digests_start)
        hasher.check(start, [source.read(start, stop)], digests)
