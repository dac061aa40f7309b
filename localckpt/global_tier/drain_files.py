"""Data files of a drain: filled piece by piece from an image, at a bounded rate.

A file that is there whole, from an attempt that was cut off, is not written again. The files have
the form of those that :mod:`localckpt.global_tier.write_files` writes.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from torch.distributed.checkpoint.planner import SavePlan

from localckpt.errors import CorruptShardError
from localckpt.global_tier.metadata import DATA_SUFFIX
from localckpt.global_tier.staging import FileLayout, Slot, item_nbytes, place_items
from localckpt.global_tier.trailer import (
    FileIdentity,
    Trailer,
    covered_nbytes,
    read_trailer,
    trailer_nbytes,
)
from localckpt.memory.digests import BLOCK_NBYTES, DIGEST_NBYTES, BlockHasher
from localckpt.memory.host_memory import PAGE_NBYTES, address_of
from localckpt.own_folders import file_mode
from localckpt.storage.buffers import Buffer, PrivateBuffer
from localckpt.storage.failures import storage_errors
from localckpt.storage.open_file import OpenFile, open_owned
from localckpt.storage.write import write_range

__all__ = ["FILE_NBYTES", "DrainFiles", "lay_out_in_order"]

FILE_NBYTES = 256 << 20
"""Bytes of tensors after which a file ends: what a drain that is cut off writes again at most."""

# Whole digest blocks. The rate is kept from piece to piece.
_PIECE_NBYTES = 8 << 20
_SHORT_NBYTES = 64 << 10


def lay_out_in_order(plan: SavePlan, starts: dict[int, int], prefix: str) -> list[FileLayout]:
    """Divide a rank's items among files, in the order in which their values lie in the image.

    Args:
        plan: The items.
        starts: First byte in the image of each item that is a tensor, by its number in the plan.
            The others follow in a file of their own, since only writing tells their sizes.
        prefix: Begins the names of this rank's files.
    """
    files: list[FileLayout] = []

    def add(numbers: Sequence[int], others: set[int]) -> None:
        name = f"{prefix}{len(files)}{DATA_SUFFIX}"
        files.append(place_items(name, [(n, plan.items[n]) for n in numbers], others))

    bucket: list[int] = []
    nbytes = 0
    for number in sorted(starts, key=lambda number: (starts[number], number)):
        wanted = item_nbytes(plan.items[number])
        if bucket and nbytes + wanted > FILE_NBYTES:
            add(bucket, set())
            bucket, nbytes = [], 0
        bucket.append(number)
        nbytes += wanted
    if bucket:
        add(bucket, set())
    if others := [number for number in range(len(plan.items)) if number not in starts]:
        add(others, set(others))
    return files


class DrainFiles:
    """Files of one rank in one drain; used by one thread.

    Args:
        folder: Directory of the drain.
        save_id: The same for all attempts to drain this checkpoint.
        before_write: Called with a number of bytes before so many are written: waits until they
            may be, or raises what ends the drain.

    Attributes:
        written_nbytes: Bytes that were written.
        kept_nbytes: Bytes of files that were there from an attempt before.
    """

    def __init__(self, folder: Path, save_id: str, before_write: Callable[[int], None]) -> None:
        self._folder = folder
        self._save_id = save_id
        self._before_write = before_write
        self._buffer: Buffer | None = None
        self.written_nbytes = 0
        self.kept_nbytes = 0

    def close(self) -> None:
        """Free the memory."""
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None

    def write_tensors(
        self, file: FileLayout, values: Callable[[Slot], Iterator[memoryview]]
    ) -> int:
        """Write a file of tensors, unless it is there; returns its size in bytes.

        Args:
            file: The layout.
            values: Gives the bytes of a tensor, in order.

        Raises:
            StorageError: The file system refused. Nothing is left of the file.
        """
        covered = covered_nbytes(file.nbytes)
        nbytes = covered + trailer_nbytes(covered)
        if self._is_whole(file.name, covered):
            self.kept_nbytes += nbytes
            return nbytes

        def content() -> Iterator[bytes | memoryview]:
            at = 0
            for slot in file.slots:
                yield bytes(slot.offset - at)
                yield slot.frame.head
                yield from values(slot)
                yield slot.frame.tail
                at = slot.end

        return self._write(file.name, content)

    def write_objects(self, file: FileLayout, others: Sequence[memoryview]) -> int:
        """Write a file of objects, one after another; as :meth:`write_tensors`.

        It is written by each attempt: pickles of equal objects may differ.
        """
        return self._write(file.name, lambda: others)

    def _is_whole(self, name: str, covered: int) -> bool:
        """Return whether a file was written by an attempt before, and holds what it should."""
        path, identity = self._folder / name, FileIdentity(name, self._save_id)
        if not os.path.lexists(path):
            return False
        try:
            file = OpenFile(path)
            try:
                with storage_errors("read", path):
                    trailer = read_trailer(file)
                    if trailer is None or trailer.covered_nbytes != covered:
                        return False
                    if trailer.save_id != self._save_id:
                        return False
                    self._verify(file, trailer, BlockHasher(identity))
            finally:
                file.close()
        except CorruptShardError:
            return False
        return True

    def _verify(self, file: OpenFile, trailer: Trailer, hasher: BlockHasher) -> None:
        view, digests = self._memory, memoryview(trailer.digests)
        for start in range(0, trailer.covered_nbytes, len(view)):
            self._before_write(0)
            piece = view[: min(len(view), trailer.covered_nbytes - start)]
            file.read_into(start, piece)
            hasher.check(start, [piece], digests)

    @property
    def _memory(self) -> memoryview:
        if self._buffer is None:
            self._buffer = PrivateBuffer(_PIECE_NBYTES)
        return self._buffer.view[:_PIECE_NBYTES]

    def _write(self, name: str, content: Callable[[], Iterable[bytes | memoryview]]) -> int:
        path = self._folder / name
        with storage_errors("write", path):
            try:
                return self._write_new(path, content(), os.O_DIRECT)
            except OSError as error:
                # Who does not take O_DIRECT says so when the file is opened, or at a write.
                if error.errno != errno.EINVAL:
                    raise
                return self._write_new(path, content(), 0)

    def _write_new(self, path: Path, content: Iterable[bytes | memoryview], flag: int) -> int:
        path.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | flag
        # The umask says who may read it: it outlives the job, and others load it.
        file = open_owned(path, flags, file_mode(path.parent))
        try:
            with file:
                identity = FileIdentity(path.name, self._save_id)
                filling = _Filling(
                    file.fileno(), self._memory, identity, self._before_write, direct=bool(flag)
                )
                for part in content:
                    filling.put(part)
                nbytes = filling.finish()
                os.fsync(file.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        self.written_nbytes += nbytes
        return nbytes


class _Filling:
    """A file that is filled from its first byte to its last, hashed and written in pieces."""

    def __init__(
        self,
        fd: int,
        memory: memoryview,
        identity: FileIdentity,
        before_write: Callable[[int], None],
        *,
        direct: bool,
    ) -> None:
        self._fd = fd
        self._memory = memory
        self._identity = identity
        self._hasher: BlockHasher | None = BlockHasher(identity)
        self._before_write = before_write
        self._direct = direct
        self._digests: list[int] = []
        # Bytes of the file before the memory's first one, and bytes in the memory.
        self._base = self._filled = 0
        self._hashed = 0

    def put(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        left = memoryview(data)
        while len(left):
            taken = min(len(left), len(self._memory) - self._filled)
            place = self._memory[self._filled : self._filled + taken]
            if taken < _SHORT_NBYTES or left.readonly:
                place[:] = left[:taken]
            else:
                # With the GIL released.
                ctypes.memmove(address_of(place), address_of(left), taken)
            self._filled += taken
            left = left[taken:]
            if self._filled == len(self._memory):
                self._flush()

    def finish(self) -> int:
        """Append the padding and the trailer, and write what is left; returns the file's size."""
        end = self._base + self._filled
        self.put(bytes(covered_nbytes(end) - end))
        covered = self._base + self._filled
        self._hash()
        self._hasher = None
        digests = b"".join(digest.to_bytes(DIGEST_NBYTES, "little") for digest in self._digests)
        self.put(digests + Trailer(self._identity.save_id, covered, digests).footer())
        nbytes = self._base + self._filled
        self._flush()
        os.ftruncate(self._fd, nbytes)
        return nbytes

    def _flush(self) -> None:
        if not self._filled:
            return
        self._hash()
        self._before_write(self._filled)
        # With O_DIRECT the last page is written whole, and cut off when the file is complete.
        self._memory[self._filled : self._filled + -self._filled % PAGE_NBYTES] = bytes(
            -self._filled % PAGE_NBYTES
        )
        write_range(self._fd, self._memory, 0, self._filled, direct=self._direct, base=self._base)
        self._base += self._filled
        self._filled = self._hashed = 0

    def _hash(self) -> None:
        """Hash what is in the memory; only the last piece of a file is not of whole blocks."""
        if self._hasher is None:
            return
        for start in range(self._hashed, self._filled, BLOCK_NBYTES):
            block = self._memory[start : min(start + BLOCK_NBYTES, self._filled)]
            self._digests.append(self._hasher.digest(len(self._digests), block))
        self._hashed = self._filled
