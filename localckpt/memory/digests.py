"""Block hashes: one 64-bit xxh3 for each MiB of an image.

Each hash is seeded with the identity of the image and the block's index, so that a good block in
the wrong place, or of another save, does not verify. Hashes find accidents, not forgeries.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from struct import Struct
from typing import Protocol

import xxhash

from localckpt.errors import CorruptShardError

BLOCK_NBYTES = 1 << 20
DIGEST_NBYTES = 8

_DIGEST = Struct("<Q")


def digests_nbytes(covered_nbytes: int) -> int:
    """Return the size of the digests that cover the first ``covered_nbytes`` of an image."""
    return -(-covered_nbytes // BLOCK_NBYTES) * DIGEST_NBYTES


def covered_nbytes(image_nbytes: int) -> int:
    """Return the bytes of an image before its digests, the inverse of :func:`digests_nbytes`."""
    blocks = -(-image_nbytes // (BLOCK_NBYTES + DIGEST_NBYTES))
    return image_nbytes - blocks * DIGEST_NBYTES


class Hashed(Protocol):
    """Identity of a hashed image or file; ``str()`` names it in messages."""

    @property
    def seed(self) -> str:
        """Text that is unique to this image or file."""


class BlockHasher:
    """Hasher of one shard's image, or of one file: computes and checks its digests."""

    def __init__(self, identity: Hashed) -> None:
        self._identity = identity
        self._seed = xxhash.xxh3_64_intdigest(identity.seed.encode())

    def digest(self, index: int, block: memoryview | bytes) -> int:
        return xxhash.xxh3_64_intdigest(block, self._seed_of(index))

    def fill(self, image: memoryview, covered_nbytes: int) -> None:
        """Write the digests of ``image[:covered_nbytes]`` right behind it."""
        for index in range(digests_nbytes(covered_nbytes) // DIGEST_NBYTES):
            self.fill_block(image, covered_nbytes, index)

    def fill_block(self, image: memoryview, covered_nbytes: int, index: int) -> None:
        """Write the digest of one block at the place where :meth:`fill` writes it."""
        start = index * BLOCK_NBYTES
        block = image[start : min(start + BLOCK_NBYTES, covered_nbytes)]
        _DIGEST.pack_into(image, covered_nbytes + index * DIGEST_NBYTES, self.digest(index, block))

    def check(self, start: int, parts: Iterable[memoryview], digests: memoryview) -> None:
        """Verify whole blocks from ``start``, of which the image's last may be short."""
        for index, found in enumerate(self._digests_of(parts, start // BLOCK_NBYTES)):
            index += start // BLOCK_NBYTES
            (wanted,) = _DIGEST.unpack_from(digests, index * DIGEST_NBYTES)
            if found != wanted:
                raise CorruptShardError(
                    f"the {BLOCK_NBYTES} bytes from {index * BLOCK_NBYTES} on do not match their "
                    f"digest",
                    shard=str(self._identity),
                )

    def _digests_of(self, parts: Iterable[memoryview], index: int) -> Iterator[int]:
        """Yield digests of consecutive blocks; a block in several parts is hashed part by part."""
        begun, missing = None, 0
        for part in parts:
            while len(part):
                if begun is None and len(part) >= BLOCK_NBYTES:
                    yield self.digest(index, part[:BLOCK_NBYTES])
                    index, part = index + 1, part[BLOCK_NBYTES:]
                    continue
                if begun is None:
                    begun, missing = xxhash.xxh3_64(seed=self._seed_of(index)), BLOCK_NBYTES
                begun.update(part[:missing])
                taken = min(missing, len(part))
                missing, part = missing - taken, part[taken:]
                if not missing:
                    yield begun.intdigest()
                    index, begun = index + 1, None
        if begun is not None:
            yield begun.intdigest()

    def _seed_of(self, index: int) -> int:
        return (self._seed + index) & 0xFFFFFFFFFFFFFFFF
