"""End of each data file: a hash of each MiB before it, and the save that the file belongs to.

Readers that know the file from its metadata, as torch's own, never look there.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct

import xxhash

from localckpt.errors import CorruptShardError
from localckpt.memory.digests import digests_nbytes
from localckpt.memory.host_memory import round_up
from localckpt.storage.open_file import OpenFile

__all__ = [
    "FOOTER_NBYTES",
    "FileIdentity",
    "Trailer",
    "covered_nbytes",
    "read_trailer",
    "trailer_nbytes",
]

_MAGIC = b"localckpt-trail1"
# The magic, how many bytes the digests cover, the save's ID, and a hash of all before it.
_FOOTER = Struct("<16sQ16sQ")
FOOTER_NBYTES = _FOOTER.size


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """Identity of one file of one save."""

    name: str
    save_id: str
    """32 hexadecimal digits, drawn for each save."""

    @property
    def seed(self) -> str:
        """Seed of the digests of its blocks, so that a block of another file does not verify."""
        return f"{self.save_id}/{self.name}"

    def __str__(self) -> str:
        return f"the file {self.name}"


@dataclass(frozen=True, slots=True)
class Trailer:
    """The digests of a file, and what they cover."""

    save_id: str
    covered_nbytes: int
    digests: bytes

    def footer(self) -> bytes:
        """Footer of the file, which follows the digests."""
        save_id = bytes.fromhex(self.save_id)
        head = _FOOTER.pack(_MAGIC, self.covered_nbytes, save_id, 0)[:-8]
        return head + xxhash.xxh3_64_intdigest(self.digests + head).to_bytes(8, "little")


def read_trailer(file: OpenFile) -> Trailer | None:
    """The trailer at the end of a file; ``None`` if it has none.

    Raises:
        CorruptShardError: It is damaged.
        OSError: It cannot be read.
    """
    if file.nbytes < FOOTER_NBYTES:
        return None
    footer = bytearray(FOOTER_NBYTES)
    file.read_into(file.nbytes - FOOTER_NBYTES, memoryview(footer))
    magic, covered, save_id, digest = _FOOTER.unpack(footer)
    if magic != _MAGIC or covered + trailer_nbytes(covered) != file.nbytes:
        return None
    digests = bytearray(digests_nbytes(covered))
    file.read_into(covered, memoryview(digests))
    if xxhash.xxh3_64_intdigest(digests + footer[:-8]) != digest:
        raise CorruptShardError(f"the file {file.path.name} is damaged: its digests are")
    return Trailer(save_id.hex(), covered, bytes(digests))


def covered_nbytes(content_nbytes: int) -> int:
    """Bytes of a file that are covered when its items end at ``content_nbytes``."""
    return round_up(content_nbytes, 8)


def trailer_nbytes(covered: int) -> int:
    """Bytes that follow those which are covered."""
    return digests_nbytes(covered) + FOOTER_NBYTES
