"""Writes of images behind training: hash, write, fsync and rename.

A :class:`ShardWrite` is plain data, which a thread of the trainer carries out. After any error the
file is removed, and never written to again. In a recycled file only the blocks are written that
its older image does not have. Where memory is short, an image goes to its file while it is made, or
comes from a peer: a :class:`StagedImage`.
"""

from __future__ import annotations

import errno
import io
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

from localckpt.errors import CheckpointingException, StorageError
from localckpt.ids import ShardIdentity
from localckpt.memory.digests import (
    BLOCK_NBYTES,
    LEAST_COMPARED_NBYTES,
    BlockHasher,
    HeldBlocks,
    block_ranges,
    digests_nbytes,
)
from localckpt.memory.host_memory import PAGE_NBYTES, round_up
from localckpt.state_dict.source import held_blocks
from localckpt.storage.buffers import Buffer
from localckpt.storage.failures import storage_errors
from localckpt.storage.files import FileSource, open_owned
from localckpt.threads import SerialThread, Task, end_all

logger = logging.getLogger(__name__)

Digests = Literal["compute", "check", "done"]
"""Work on an image's digests that is left for its writer."""

_WRITE_NBYTES = 16 << 20
PIECE_NBYTES = 32 << 20
"""Size of a piece, the last one's excepted. One is filled while another is written."""
# Limit of consecutive writes that make no progress, after which the device counts as broken.
_FRUITLESS_WRITES = 8

_CANNOT_RESERVE = frozenset({errno.EBADF, errno.EINVAL, errno.EOPNOTSUPP})


@dataclass(frozen=True, slots=True)
class ShardWrite:
    """Image that is to be committed as a piece of this node.

    ``dirty`` is the file until it is complete: a new one, a recycled one to overwrite, or, with
    ``in_place``, the one that the buffer is a mapping of. The digests cover ``covered_nbytes``.
    """

    buffer: Buffer
    nbytes: int
    covered_nbytes: int
    identity: ShardIdentity
    digests: Digests
    dirty: Path
    final: Path
    recycled: bool = False
    in_place: bool = False
    direct: bool = False


def write_shard(write: ShardWrite) -> int:
    """Commit an image, and return the bytes that were written to its file.

    After StorageError or CorruptShardError the file is removed.
    """
    # This view keeps the memory mapped if the save is given up and its buffer closed meanwhile.
    view = write.buffer.view
    try:
        if len(view) < write.nbytes:
            raise StorageError(f"{write.identity} is not written: its save was given up")
        # Beside the write, in a thread that no longer uses the image when this returns.
        digests = Task(partial(_finish_digests, write, view[: write.nbytes]))
        try:
            try:
                digests.start("localckpt-hash", daemon=False)
            except RuntimeError:
                digests.run()
            if write.in_place:
                _commit_in_place(write, digests.take_result)
                return 0
            return _write_file(write, view, digests.take_result)
        finally:
            end_all([digests])
    finally:
        write.buffer.give_back()


class StagedImage:
    """Image on its way to a file; once it is there, a :class:`ShardSource` of its bytes.

    A thread writes the pieces from the buffer of ``write``. One that is not kept has no name once
    it is written. Raises StorageError if the file cannot be made.
    """

    threads = 2

    def __init__(
        self, write: ShardWrite, timeout_s: float, piece_nbytes: int, *, is_kept: bool
    ) -> None:
        self.nbytes = write.nbytes
        self._write, self._timeout_s = write, timeout_s
        self._thread = SerialThread("localckpt-pieces")
        self._memory, self._piece_nbytes = write.buffer.view, piece_nbytes
        self._room = len(self._memory) // piece_nbytes
        self._is_kept = is_kept
        self._hasher: BlockHasher | None = None
        self._computed = memoryview(bytearray(digests_nbytes(write.covered_nbytes)))
        self._digests = bytearray()
        self._tasks: list[Task[None]] = []
        self._source: FileSource | None = None
        self._error: BaseException | None = None
        self._is_given_up = False
        with storage_errors("write", write.dirty):
            self._file = open_dirty(write)
            try:
                # First, so that a full disk is an error before anything is written.
                reserve(self._file.fileno(), write.nbytes)
            except BaseException:
                write.dirty.unlink(missing_ok=True)
                raise

    def __len__(self) -> int:
        return self.nbytes

    # The image is made, or comes.

    def pieces(self, *, verifies: bool) -> Iterator[tuple[int, memoryview]]:
        """Yield where each piece begins, and its memory, which is written as the next is asked for.

        An image that ``verifies`` comes from a peer, and is verified before it is committed. Raises
        StorageError if the disk took no earlier piece, CheckpointingException at a deadline.
        """
        self._hasher = BlockHasher(self._write.identity) if verifies else None
        most = self._piece_nbytes
        for number, start in enumerate(range(0, self.nbytes, most)):
            if number >= self._room:
                self._await(self._tasks[number - self._room])
            self._require_good()
            at = number % self._room * most
            # With O_DIRECT whole pages are written.
            whole = self._memory[at : at + most]
            piece = whole[: self.nbytes - start]
            yield start, piece
            task = Task(partial(self._write_piece, start, len(piece), whole))
            self._tasks.append(task)
            self._thread.submit(task)

    def _write_piece(self, start: int, nbytes: int, piece: memoryview) -> None:
        if self._error is not None or self._is_given_up:
            return
        write, fd = self._write, self._file.fileno()
        try:
            if self._hasher is not None:
                data = piece[: max(0, min(nbytes, write.covered_nbytes - start))]
                for at in range(0, len(data), BLOCK_NBYTES):
                    block = data[at : at + BLOCK_NBYTES]
                    self._hasher.fill_block(self._computed, (start + at) // BLOCK_NBYTES, block)
                self._digests += piece[len(data) : nbytes]
            with storage_errors("write", write.dirty):
                write_range(fd, piece, 0, nbytes, direct=write.direct, base=start)
                if start + nbytes == self.nbytes:
                    os.ftruncate(fd, self.nbytes)
                    self._source = FileSource(write.dirty)
                    # It finds out by its first read, when the file may have another name.
                    _ = self._source.threads
                    if not self._is_kept:
                        write.dirty.unlink()
        except Exception as error:  # noqa: BLE001 - raised where the image is filled, or committed
            # Its frames would keep the memory.
            self._error = error.with_traceback(None)

    def _await(self, task: Task[None]) -> None:
        if not task.wait(self._timeout_s):
            raise CheckpointingException(
                f"the disk has not taken a piece of {self._write.identity} after "
                f"{self._timeout_s:g} s: is it stuck? Checkpoints saved before are as they were"
            )

    def _require_good(self) -> None:
        if self._is_given_up:
            raise StorageError(f"{self._write.identity} is not written: its save was given up")
        if self._error is not None:
            raise self._error

    # The image is in its file.

    def await_written(self) -> FileSource:
        """Return the source of the image once all of it is in the file; raises as the writes do."""
        if self._tasks:
            self._await(self._tasks[-1])
        self._require_good()
        if self._source is None:
            raise StorageError(f"{self._write.identity} is not written: it has not come as a whole")
        return self._source

    def read(self, start: int, stop: int) -> memoryview:
        return self.await_written().read(start, stop)

    def read_into(self, start: int, parts: Sequence[memoryview]) -> None:
        self.await_written().read_into(start, parts)

    def close(self) -> None:
        self._is_given_up = True
        self._thread.close(self._timeout_s)
        if self._source is not None:
            self._source.close()

    def commit(self) -> int:
        """Make the file durable under its name, and return its size; the file goes on an error."""
        write = self._write
        with storage_errors("write", write.dirty), closing(self._file) as file:
            try:
                self.await_written()
                if self._hasher is not None:
                    self._hasher.compare(self._computed, memoryview(self._digests))
                _commit(write, file)
            except BaseException:
                write.dirty.unlink(missing_ok=True)
                raise
            finally:
                write.buffer.give_back()
        return self.nbytes

    def give_up(self) -> None:
        """Write no further piece; the store removes the file of one that is kept."""
        self._is_given_up = True
        if not self._is_kept:
            self._write.dirty.unlink(missing_ok=True)


Place: TypeAlias = memoryview | StagedImage
"""Place for an image that comes from a peer: memory for all of it, or a file."""


def sync_folder(folder: Path) -> None:
    """Make the file names in a directory durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def reserve(fd: int, nbytes: int) -> None:
    """Reserve disk space for a file, if the file system supports it.

    On ext2 and ext3 the C library reads and writes a byte of each block, which fails with O_DIRECT.
    That is ignored; a full disk is then an error of the write itself.
    """
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in _CANNOT_RESERVE:
            raise


def write_range(
    fd: int, view: memoryview, start: int, stop: int, *, direct: bool, base: int = 0
) -> None:
    """Write ``view[start:stop]``, for O_DIRECT of whole pages, to ``base + start`` of a file."""
    end = round_up(stop, PAGE_NBYTES) if direct else stop
    fruitless = 0
    while start < end:
        piece = view[start : min(start + _WRITE_NBYTES, end)]
        reached = start + os.pwrite(fd, piece, base + start)
        if direct and reached < end:
            # A short write may end inside a page, where O_DIRECT cannot go on.
            reached = reached // PAGE_NBYTES * PAGE_NBYTES
        fruitless = fruitless + 1 if reached == start else 0
        if fruitless == _FRUITLESS_WRITES:
            raise OSError(errno.EIO, f"no byte after {base + start} is taken")
        start = reached


def replace_file(path: Path, data: bytes, mode: int, suffix: str = ".new") -> None:
    """Replace a small file atomically; durable once :func:`sync_folder` has synced its folder."""
    # Writers at the same time have a suffix each.
    fresh = path.with_name(f"{path.name}{suffix}")
    fresh.unlink(missing_ok=True)
    try:
        with open_owned(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode) as file:
            write_range(file.fileno(), memoryview(data), 0, len(data), direct=False)
            os.fsync(file.fileno())
        os.rename(fresh, path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def _finish_digests(write: ShardWrite, image: memoryview) -> None:
    hasher = BlockHasher(write.identity)
    if write.digests == "compute":
        hasher.fill(image, write.covered_nbytes)
    elif write.digests == "check":
        hasher.check(0, [image[: write.covered_nbytes]], image[write.covered_nbytes :])


def _write_file(write: ShardWrite, view: memoryview, await_digests: Callable[[], None]) -> int:
    with storage_errors("write", write.dirty):
        file = open_dirty(write)
        try:
            with file:
                fd = file.fileno()
                # First, so that a full disk is an error before anything is written.
                reserve(fd, write.nbytes)
                # The last block, which may be short, goes with the digests, in whole pages.
                rest = write.covered_nbytes // BLOCK_NBYTES * BLOCK_NBYTES
                changed = [(start, min(stop, rest)) for start, stop in _changed(write, view)]
                for start, stop in changed:
                    write_range(fd, view, start, stop, direct=write.direct)
                await_digests()
                write_range(fd, view, rest, write.nbytes, direct=write.direct)
                os.ftruncate(fd, write.nbytes)
                _commit(write, file)
        except BaseException:
            write.dirty.unlink(missing_ok=True)
            raise
    return sum(stop - start for start, stop in changed) + write.nbytes - rest


def _commit(write: ShardWrite, file: io.FileIO) -> None:
    """Make a file durable that is complete, and then its name."""
    os.fsync(file.fileno())
    file.close()
    os.rename(write.dirty, write.final)
    sync_folder(write.final.parent)


def _changed(write: ShardWrite, view: memoryview) -> list[tuple[int, int]]:
    """Return the ranges of an image that its file does not have yet; all of a new file."""
    held = HeldBlocks()
    if write.recycled and write.nbytes >= LEAST_COMPARED_NBYTES:
        try:
            source = FileSource(write.dirty)
            try:
                held = held_blocks(source)
            finally:
                source.close()
        except StorageError as error:
            logger.warning("a recycled file is overwritten as a whole: %s", error)
    changed = held.changed(lambda start, stop: view[start:stop], write.covered_nbytes)
    return block_ranges(changed, write.covered_nbytes)


def _commit_in_place(write: ShardWrite, await_digests: Callable[[], None]) -> None:
    with storage_errors("commit", write.final):
        try:
            await_digests()
            os.rename(write.dirty, write.final)
        except BaseException:
            write.dirty.unlink(missing_ok=True)
            raise


def open_dirty(write: ShardWrite) -> io.FileIO:
    flags = os.O_WRONLY | os.O_NOFOLLOW | (os.O_DIRECT if write.direct else 0)
    if not write.recycled:
        return open_owned(write.dirty, flags | os.O_CREAT | os.O_EXCL)
    try:
        # Make the rename of the recycled file durable before its bytes change: after a crash, the
        # name of the old shard must not lead to new bytes.
        sync_folder(write.dirty.parent)
        return open_owned(write.dirty, flags)
    except OSError:
        write.dirty.unlink(missing_ok=True)
        raise
