"""Block hashes: one 64-bit xxh3 for each MiB of an image.

Each hash is seeded with the identity of the image and the block's index, so that a good block in
the wrong place, or of another save, does not verify. Hashes find accidents, not forgeries.

With the seed of an older image its digests also tell which blocks of a new one are the same, so
that memory or a file that has the older image needs only the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from struct import Struct
from typing import NoReturn, Protocol

import xxhash

from localckpt.errors import CorruptShardError

BLOCK_NBYTES = 1 << 20
DIGEST_NBYTES = 8

_DIGEST = Struct("<Q")
_HELD = Struct("<QQ")

LEAST_COMPARED_NBYTES = 8 * BLOCK_NBYTES
"""Images with fewer bytes are written and sent whole, which takes no longer than to compare."""
# One block of so many is looked at first. If few of those are unchanged, to look at all would cost
# more than it saves.
_PROBED, _LEAST_UNCHANGED = 16, 1 / 8


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
        self.seed = xxhash.xxh3_64_intdigest(identity.seed.encode())

    def digest(self, index: int, block: memoryview | bytes) -> int:
        return xxhash.xxh3_64_intdigest(block, _seed_of(self.seed, index))

    def fill(self, image: memoryview, covered_nbytes: int) -> None:
        """Write the digests of ``image[:covered_nbytes]`` right behind it."""
        digests = image[covered_nbytes:]
        for index, start in enumerate(range(0, covered_nbytes, BLOCK_NBYTES)):
            block = image[start : min(start + BLOCK_NBYTES, covered_nbytes)]
            self.fill_block(digests, index, block)

    def fill_block(self, digests: memoryview, index: int, block: memoryview) -> None:
        """Write the digest of one block to its place among the digests of an image."""
        _DIGEST.pack_into(digests, index * DIGEST_NBYTES, self.digest(index, block))

    def check(self, start: int, parts: Iterable[memoryview], digests: memoryview) -> None:
        """Verify whole blocks from ``start``, of which the image's last may be short."""
        for index, found in enumerate(self._digests_of(parts, start // BLOCK_NBYTES)):
            index += start // BLOCK_NBYTES
            (wanted,) = _DIGEST.unpack_from(digests, index * DIGEST_NBYTES)
            if found != wanted:
                self._refuse(index)

    def compare(self, computed: memoryview, digests: memoryview) -> None:
        """Verify blocks by their digests, computed when they came, and those of the image."""
        for index in range(0 if computed == digests else len(computed) // DIGEST_NBYTES):
            at = slice(index * DIGEST_NBYTES, (index + 1) * DIGEST_NBYTES)
            if computed[at] != digests[at]:
                self._refuse(index)

    def _refuse(self, index: int) -> NoReturn:
        raise CorruptShardError(
            f"the {BLOCK_NBYTES} bytes from {index * BLOCK_NBYTES} on do not match their digest",
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
                    begun, missing = xxhash.xxh3_64(seed=_seed_of(self.seed, index)), BLOCK_NBYTES
                begun.update(part[:missing])
                taken = min(missing, len(part))
                missing, part = missing - taken, part[taken:]
                if not missing:
                    yield begun.intdigest()
                    index, begun = index + 1, None
        if begun is not None:
            yield begun.intdigest()


class HeldBlocks:
    """Seed and digests of an image that a place has, which is to get another image.

    Args:
        seed: Of the hasher of the older image.
        digests: Of its blocks, 8 bytes each; without any, all blocks are changed.
    """

    def __init__(self, seed: int = 0, digests: memoryview | bytes = b"") -> None:
        self._seed, self._digests = seed, memoryview(digests)

    def changed(self, read: Callable[[int, int], memoryview], covered_nbytes: int) -> bytearray:
        """Find the changed blocks of a new image: one byte for each block, 1 for a changed one.

        Args:
            read: Returns bytes ``[start, stop)`` of the new image, valid until the next call.
            covered_nbytes: Size of the new image without its digests.
        """
        changed = bytearray(b"\1") * (digests_nbytes(covered_nbytes) // DIGEST_NBYTES)
        comparable = min(len(self._digests), covered_nbytes // BLOCK_NBYTES * DIGEST_NBYTES)
        count = comparable // DIGEST_NBYTES

        def is_unchanged(index: int) -> bool:
            block = read(index * BLOCK_NBYTES, (index + 1) * BLOCK_NBYTES)
            found = xxhash.xxh3_64_intdigest(block, _seed_of(self._seed, index))
            return _DIGEST.pack(found) == self._digests[index * DIGEST_NBYTES :][:DIGEST_NBYTES]

        probes = range(min(1, count), count, max(1, min(_PROBED, count // 8)))
        if sum(map(is_unchanged, probes)) > len(probes) * _LEAST_UNCHANGED:
            for index in range(count):
                changed[index] = not is_unchanged(index)
        return changed

    def packed(self, covered_nbytes: int) -> bytearray:
        """Pack for a peer, in as many bytes as any that compares to an image of that size."""
        nbytes = digests_nbytes(covered_nbytes)
        fitting = self._digests[: min(nbytes, len(self._digests))]
        return bytearray(_HELD.pack(self._seed, len(fitting)) + fitting).ljust(
            _HELD.size + nbytes, b"\0"
        )

    @classmethod
    def unpacked(cls, packed: memoryview) -> HeldBlocks:
        seed, nbytes = _HELD.unpack_from(packed)
        return cls(seed, packed[_HELD.size :][:nbytes])


def block_ranges(
    chosen: bytes | bytearray | memoryview, covered_nbytes: int
) -> list[tuple[int, int]]:
    """Return the bytes ``[start, stop)`` of consecutive blocks whose bytes in ``chosen`` are 1."""
    pairs = enumerate(pairwise([0, *map(bool, chosen), 0]))
    ends = [index * BLOCK_NBYTES for index, (before, here) in pairs if before != here]
    ranges = zip(ends[::2], ends[1::2], strict=True)
    return [(start, min(stop, covered_nbytes)) for start, stop in ranges]


def _seed_of(seed: int, index: int) -> int:
    return (seed + index) & 0xFFFFFFFFFFFFFFFF
