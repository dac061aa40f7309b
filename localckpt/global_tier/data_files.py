"""Data files of a checkpoint: their content, a hash of each MiB of it, and the save they belong to.

Readers that know a file from the checkpoint's metadata, as torch's own, never look at its end.
After any error a file is dead: it is removed, never written to again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from struct import Struct

import xxhash

from localckpt.errors import CorruptShardError
from localckpt.global_tier.objects import Pieces, Retries
from localckpt.global_tier.places import OpenedFile, Place
from localckpt.memory.digests import BLOCK_NBYTES, DIGEST_NBYTES, BlockHasher, digests_nbytes
from localckpt.memory.host_memory import PAGE_NBYTES, map_memory, round_up
from localckpt.state_dict.source import ShardSource, VerifiedBytes, scatter
from localckpt.storage.failures import storage_errors

_MAGIC = b"localckpt-trail1"
# The magic, how many bytes the digests cover, the save's ID, and a hash of all before it.
_FOOTER = Struct("<16sQ16sQ")
FOOTER_NBYTES = _FOOTER.size

_SHORT_NBYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """Identity of one file of one save."""

    name: str
    save_id: str

    @property
    def seed(self) -> str:
        """Seed of the digests of its blocks, so that a block of another file does not verify."""
        return f"{self.save_id}/{self.name}"

    def __str__(self) -> str:
        return f"the file {self.name}"


@dataclass(frozen=True, slots=True)
class Trailer:
    """The digests of a file, and what they cover; a footer follows them."""

    save_id: str
    covered_nbytes: int
    digests: bytes

    def footer(self) -> bytes:
        save_id = bytes.fromhex(self.save_id)
        head = _FOOTER.pack(_MAGIC, self.covered_nbytes, save_id, 0)[:-8]
        return head + xxhash.xxh3_64_intdigest(self.digests + head).to_bytes(8, "little")


def covered_nbytes(content_nbytes: int) -> int:
    """Bytes of a file that are covered when its items end at ``content_nbytes``."""
    return round_up(content_nbytes, 8)


def trailer_nbytes(covered: int) -> int:
    """Bytes that follow those which are covered."""
    return digests_nbytes(covered) + FOOTER_NBYTES


def file_nbytes(content_nbytes: int) -> int:
    """Bytes of a file whose items end at ``content_nbytes``."""
    covered = covered_nbytes(content_nbytes)
    return covered + trailer_nbytes(covered)


def read_trailer(file: ShardSource, name: str) -> Trailer | None:
    """The trailer at the end of a file of some name; ``None`` if it has none."""
    if file.nbytes < FOOTER_NBYTES:
        return None
    footer = bytes(file.read(file.nbytes - FOOTER_NBYTES, file.nbytes))
    magic, covered, save_id, digest = _FOOTER.unpack(footer)
    if magic != _MAGIC or covered + trailer_nbytes(covered) != file.nbytes:
        return None
    digests = bytes(file.read(covered, covered + digests_nbytes(covered)))
    if xxhash.xxh3_64_intdigest(digests + footer[:-8]) != digest:
        raise CorruptShardError(f"the file {name} is damaged: its digests are")
    return Trailer(save_id.hex(), covered, digests)


def data_bytes(
    file: ShardSource,
    path: Place,
    save_id: str | None,
    on_read: Callable[[int], None] = lambda nbytes: None,
    what: str = "",
) -> VerifiedBytes:
    """The verified content of a file of a save; errors are about ``what``, by default the path.

    Without ``save_id`` it may be of any save, or of another writer, whose files are not verified.
    """
    trailer = read_trailer(file, path.name)
    if save_id is None and trailer is None:
        return VerifiedBytes(file, FileIdentity(path.name, ""), file.nbytes, None, on_read)
    if trailer is None:
        raise CorruptShardError(
            f"{what or path} is cut short or damaged: it does not end as it was written"
        )
    if save_id not in (None, trailer.save_id):
        raise CorruptShardError(f"{what or path} belongs to another save than its checkpoint")
    identity, digests = FileIdentity(path.name, trailer.save_id), memoryview(trailer.digests)
    return VerifiedBytes(file, identity, trailer.covered_nbytes, digests, on_read)


def verify_data_file(
    place: Place, save_id: str, nbytes: int, on_read: Callable[[int], None]
) -> None:
    """Check that a save has written all of a file of some size, and every block of it."""
    with closing(opened(place)) as file:
        if file.nbytes != nbytes:
            raise CorruptShardError(f"it has {file.nbytes} bytes, and was saved with {nbytes}")
        content = data_bytes(file, place, save_id, on_read, "it")
        for _ in content.pieces(0, content.end):
            pass


def write_data_file(
    place: Place,
    save_id: str,
    pieces: Pieces,
    retries: Retries | None = None,
    *,
    sync: bool = True,
    before_write: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Write a file in place of what is there, durable with ``sync``.

    Each of the ``pieces`` begins on a page of memory, which is not needed any more when the next is
    asked for. All but the last are whole blocks, and that is a multiple of 8 bytes.
    """
    identity = FileIdentity(place.name, save_id)
    with storage_errors("write", place):
        place.write(
            lambda: _with_trailer(identity, pieces(), before_write), sync=sync, retries=retries
        )


def _with_trailer(
    identity: FileIdentity, pieces: Iterable[memoryview], before_write: Callable[[int], None]
) -> Iterator[memoryview]:
    """Yield the whole pages of each piece as it is, and last what is left, with the trailer."""
    hasher, digests = BlockHasher(identity), bytearray()
    end, rest = 0, b""
    for piece in pieces:
        # What is hashed is still in the cache, or on its way out of it, when it is written.
        for start in range(0, len(piece), BLOCK_NBYTES):
            block = piece[start : start + BLOCK_NBYTES]
            digest = hasher.digest(len(digests) // DIGEST_NBYTES, block)
            digests += digest.to_bytes(DIGEST_NBYTES, "little")
        whole = len(piece) // PAGE_NBYTES * PAGE_NBYTES
        before_write(whole)
        yield piece[:whole]
        end += whole
        rest = bytes(piece[whole:])
    trailer = Trailer(identity.save_id, end + len(rest), bytes(digests))
    rest += trailer.digests + trailer.footer()
    before_write(len(rest))
    pages = map_memory(round_up(len(rest), PAGE_NBYTES))
    pages[: len(rest)] = rest
    yield pages[: len(rest)]


def opened(place: Place) -> OpenedFile:
    """Open a file to read it; raises StorageError."""
    with storage_errors("open", place):
        return place.source()


def gathered(parts: Iterable[bytes | memoryview], memory: memoryview) -> Iterator[memoryview]:
    """Yield pieces for :func:`write_data_file`, made in ``memory``, which begins on a page."""
    filled = 0
    for part in parts:
        left = memoryview(part)
        while len(left):
            taken = min(len(left), len(memory) - filled)
            place = memory[filled : filled + taken]
            if taken < _SHORT_NBYTES or left.readonly:
                place[:] = left[:taken]
            else:
                scatter(left[:taken], [place])
            filled += taken
            left = left[taken:]
            if filled == len(memory):
                yield memory
                filled = 0
    padded = round_up(filled, 8)
    memory[filled:padded] = bytes(padded - filled)
    if padded:
        yield memory[:padded]
