"""What ends each data file: a hash of each MiB before it, and which save the file belongs to.

Readers that know the file from its metadata, as torch's own, never look there.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct

import xxhash

from localckpt.errors import CorruptShardError
from localckpt.state_dict.digests import digests_nbytes
from localckpt.state_dict.layout import round_up
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
    """Which file of which save."""

    name: str
    save_id: str
    """32 hexadecimal digits, drawn for each save."""

    @property
    def seed(self) -> str:
        """Seeds the digests of its blocks, so that a block of another file does not verify."""
        return f"{self.save_id}/{self.name}"

    def __str__(self) -> str:
        return f"the file {self.name}"


@dataclass(frozen=True, slots=True)
class Trailer:
    """The digests of a file, and what they cover."""

    save_id: str
    covered_nbytes: int
    digests: bytes

    def seal(self) -> bytes:
        """What follows the digests at the end of the file."""
        save_id = bytes.fromhex(self.save_id)
        head = _FOOTER.pack(_MAGIC, self.covered_nbytes, save_id, 0)[:-8]
        return head + xxhash.xxh3_64_intdigest(self.digests + head).to_bytes(8, "little")

    @classmethod
    def position(cls, footer: bytes, file_nbytes: int) -> tuple[int, int] | None:
        """Where the digests are, told from a file's last bytes; ``None`` if it has none."""
        if len(footer) < _FOOTER.size:
            return None
        magic, covered, _, _ = _FOOTER.unpack(footer[-_FOOTER.size :])
        stop = covered + digests_nbytes(covered)
        if magic != _MAGIC or stop + _FOOTER.size != file_nbytes:
            return None
        return covered, stop

    @classmethod
    def parse(cls, name: str, digests: bytes, footer: bytes) -> Trailer:
        """Read what :meth:`seal` gave.

        Raises:
            CorruptShardError: It is damaged.
        """
        _, covered, save_id, digest = _FOOTER.unpack(footer)
        if xxhash.xxh3_64_intdigest(digests + footer[:-8]) != digest:
            raise CorruptShardError(f"the file {name} is damaged: its digests are")
        return cls(save_id.hex(), covered, digests)


def read_trailer(file: OpenFile) -> Trailer | None:
    """The trailer at the end of a file; ``None`` if it has none.

    Raises:
        CorruptShardError: It is damaged.
        OSError: It cannot be read.
    """
    footer = bytearray(min(FOOTER_NBYTES, file.nbytes))
    file.read_into(file.nbytes - len(footer), memoryview(footer))
    position = Trailer.position(bytes(footer), file.nbytes)
    if position is None:
        return None
    covered, stop = position
    digests = bytearray(stop - covered)
    file.read_into(covered, memoryview(digests))
    return Trailer.parse(file.path.name, bytes(digests), bytes(footer))


def covered_nbytes(content_nbytes: int) -> int:
    """How much of a file is covered when its items end at ``content_nbytes``."""
    return round_up(content_nbytes, 8)


def trailer_nbytes(covered: int) -> int:
    """Bytes that follow those which are covered."""
    return digests_nbytes(covered) + FOOTER_NBYTES
