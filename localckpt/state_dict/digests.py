"""Block hashes: one 64-bit xxh3 for each MiB of an image.

Each is seeded with what the shard is and with the block's index, so that a good block in the wrong
place, or of another save, does not verify. They find accidents, not forgeries.
"""

from __future__ import annotations

from struct import Struct

import xxhash

from localckpt.errors import CorruptShardError
from localckpt.ids import ShardIdentity

__all__ = ["BLOCK_NBYTES", "DIGEST_NBYTES", "BlockHasher", "digests_nbytes"]

BLOCK_NBYTES = 1 << 20
DIGEST_NBYTES = 8

_DIGEST = Struct("<Q")


def digests_nbytes(covered_nbytes: int) -> int:
    """Bytes of the digests that cover the first ``covered_nbytes`` of an image."""
    return -(-covered_nbytes // BLOCK_NBYTES) * DIGEST_NBYTES


class BlockHasher:
    """Computes and checks the digests of one shard's image."""

    def __init__(self, identity: ShardIdentity) -> None:
        self._identity = identity
        self._seed = xxhash.xxh3_64_intdigest(
            f"{identity.generation.epoch}.{identity.generation.sequence}/{identity.iteration}/"
            f"{identity.rank}/{identity.session_id}".encode()
        )

    def digest(self, index: int, block: memoryview | bytes) -> int:
        """The 64-bit digest of block ``index``."""
        return xxhash.xxh3_64_intdigest(block, (self._seed + index) & 0xFFFFFFFFFFFFFFFF)

    def fill(self, image: memoryview, covered_nbytes: int) -> None:
        """Write the digests of ``image[:covered_nbytes]`` right behind it."""
        for index, start in enumerate(range(0, covered_nbytes, BLOCK_NBYTES)):
            block = image[start : min(start + BLOCK_NBYTES, covered_nbytes)]
            _DIGEST.pack_into(
                image, covered_nbytes + index * DIGEST_NBYTES, self.digest(index, block)
            )

    def check(self, start: int, blocks: memoryview, digests: memoryview) -> None:
        """Verify whole blocks.

        Args:
            start: Where ``blocks`` begins in the image; a multiple of the block size.
            blocks: Bytes of one or more blocks; only the image's last block may be short.
            digests: The image's digests.

        Raises:
            CorruptShardError: A block is not what was saved; it names the block.
        """
        first = start // BLOCK_NBYTES
        for i, begin in enumerate(range(0, len(blocks), BLOCK_NBYTES)):
            found = self.digest(first + i, blocks[begin : begin + BLOCK_NBYTES])
            (wanted,) = _DIGEST.unpack_from(digests, (first + i) * DIGEST_NBYTES)
            if found != wanted:
                raise CorruptShardError(
                    f"{self._identity} is damaged: bytes {start + begin} to "
                    f"{start + begin + BLOCK_NBYTES} do not match their digest"
                )
