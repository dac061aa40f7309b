"""Writes of images behind training: hashed, written, made durable, given their names.

A :class:`ShardWrite` is plain data and names: a thread of the trainer can carry it out, or a worker
process without torch. After any error the file is dead: it is removed, never written to again.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from localckpt.errors import StorageError
from localckpt.ids import CkptID, ShardIdentity
from localckpt.memory.digests import BlockHasher
from localckpt.memory.host_memory import PAGE_NBYTES, round_up
from localckpt.storage.buffers import Buffer
from localckpt.storage.failures import storage_errors
from localckpt.storage.open_file import open_owned
from localckpt.storage.slot import Digests
from localckpt.threads import Task, end_all

__all__ = ["ShardWrite", "replace_file", "reserve", "sync_folder", "write_range", "write_shard"]

_WRITE_NBYTES = 16 << 20
# How often in a row a write may take nothing before the device counts as broken.
_FRUITLESS_WRITES = 8

_CANNOT_RESERVE = frozenset({errno.EBADF, errno.EINVAL, errno.EOPNOTSUPP})


@dataclass(frozen=True, slots=True)
class ShardWrite:
    """One image that is to become a committed shard of this node.

    Attributes:
        buffer: Where the image is.
        nbytes: Its size.
        covered_nbytes: How much of it the digests cover.
        identity: What the shard is.
        digests: What is left to do about its digests.
        dirty: The file's name until it is complete.
        final: Its name from then on.
        recycled: ``dirty`` is a retired file that is overwritten, not a new one.
        in_place: The buffer *is* the file ``dirty``, which needs no writing.
        direct: The file system takes O_DIRECT.
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


def write_shard(write: ShardWrite, _: CkptID | None = None) -> None:
    """Commit an image; its ID says nothing more.

    Raises:
        StorageError: The node refused. What this call had begun is removed, and its space given
            back.
        CorruptShardError: An image that came from a peer is not what the peer sent.
    """
    # Closing the buffer of a save that is given up must not pull it away from under this one.
    view = write.buffer.view
    try:
        if len(view) < write.nbytes:
            raise StorageError(f"{write.identity} is not written: its save was given up")
        digests = _DigestsBeside(write, view[: write.nbytes])
        try:
            if write.in_place:
                _commit_in_place(write, digests.wait)
            else:
                _write_file(write, view, digests.wait)
        finally:
            digests.end()
    finally:
        write.buffer.give_back()


def sync_folder(folder: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def reserve(fd: int, nbytes: int) -> None:
    """Reserve space for a file, where the file system can.

    ext2 and ext3 cannot. What the C library does in place of it, reading and writing a byte of each
    block, is refused for a file that is open with O_DIRECT, or for writing only. There a full disk
    is found by the write itself.
    """
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in _CANNOT_RESERVE:
            raise


def write_range(
    fd: int, view: memoryview, start: int, stop: int, *, direct: bool, base: int = 0
) -> None:
    """Write ``view[start:stop]`` to where it lies in the file.

    Args:
        fd: The file.
        view: What belongs into the file from ``base`` on.
        start, stop: Which bytes of it.
        direct: The file is open with O_DIRECT, which needs whole pages: then ``view`` begins on
            one, and has all of the last.
        base: Where the view begins in the file.
    """
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


def replace_file(path: Path, data: bytes, mode: int) -> None:
    """Replace a small file by one that is whole and durable under its name, once its folder is.

    Raises:
        OSError: The file system refused; what was there stays.
    """
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    try:
        with open_owned(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode) as file:
            write_range(file.fileno(), memoryview(data), 0, len(data), direct=False)
            os.fsync(file.fileno())
        os.rename(fresh, path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


class _DigestsBeside:
    """Digests of an image, computed or checked by a thread beside the write."""

    def __init__(self, write: ShardWrite, image: memoryview) -> None:
        self._task = Task(lambda: _finish_digests(write, image))
        # No executor: those take no work while the interpreter is leaving, and saves end then, too.
        try:
            self._task.start("localckpt-hash", daemon=False)
        except RuntimeError:
            self._task.run()
        except BaseException as interrupt:  # noqa: BLE001 - raised once it does not run
            end_all([self._task], None, interrupt)

    def wait(self) -> None:
        """Return when the digests are there, or raise what was wrong with them."""
        self._task.take_result()

    def end(self) -> None:
        """Return when nothing reads the image, or writes digests into it, any more."""
        end_all([self._task])


def _finish_digests(write: ShardWrite, image: memoryview) -> None:
    hasher = BlockHasher(write.identity)
    if write.digests == "compute":
        hasher.fill(image, write.covered_nbytes)
    elif write.digests == "check":
        hasher.check(0, [image[: write.covered_nbytes]], image[write.covered_nbytes :])


def _write_file(write: ShardWrite, view: memoryview, await_digests: Callable[[], None]) -> None:
    with storage_errors("write", write.dirty):
        file = _open_dirty(write)
        try:
            with file:
                fd = file.fileno()
                # First of all, so that a full disk is an error before anything is overwritten.
                reserve(fd, write.nbytes)
                written = write.covered_nbytes // _WRITE_NBYTES * _WRITE_NBYTES
                write_range(fd, view, 0, written, direct=write.direct)
                await_digests()
                write_range(fd, view, written, write.nbytes, direct=write.direct)
                os.ftruncate(fd, write.nbytes)
                os.fsync(fd)
            os.rename(write.dirty, write.final)
            sync_folder(write.final.parent)
        except BaseException:
            write.dirty.unlink(missing_ok=True)
            raise


def _commit_in_place(write: ShardWrite, await_digests: Callable[[], None]) -> None:
    with storage_errors("commit", write.final):
        try:
            await_digests()
            os.rename(write.dirty, write.final)
        except BaseException:
            write.dirty.unlink(missing_ok=True)
            raise


def _open_dirty(write: ShardWrite) -> io.FileIO:
    flags = os.O_WRONLY | os.O_NOFOLLOW | (os.O_DIRECT if write.direct else 0)
    if not write.recycled:
        return open_owned(write.dirty, flags | os.O_CREAT | os.O_EXCL)
    try:
        # The name it was committed under must be gone for good before the bytes change.
        sync_folder(write.dirty.parent)
        return open_owned(write.dirty, flags)
    except OSError:
        write.dirty.unlink(missing_ok=True)
        raise
