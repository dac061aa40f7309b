"""What happens to staged files behind training: hashed, written, made durable.

A :class:`FileWrite` is plain data and names: a thread of the trainer can carry it out, or a worker
process, without torch as long as no extension transforms the streams. After any error a file is
dead: it is removed, never written to again.
"""

from __future__ import annotations

import errno
import io
import json
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from localckpt.async_save.request import runs_in_trainer
from localckpt.failure_texts import with_class
from localckpt.global_tier.trailer import FileIdentity, Trailer, trailer_nbytes
from localckpt.state_dict.digests import BLOCK_NBYTES, DIGEST_NBYTES, BlockHasher
from localckpt.state_dict.layout import PAGE_NBYTES, round_up
from localckpt.storage.buffers import Buffer
from localckpt.storage.failures import storage_errors
from localckpt.storage.open_file import open_owned
from localckpt.storage.write import sync_folder, write_range
from localckpt.threads import Task, end_all

__all__ = [
    "FileWrite",
    "HandedOver",
    "Stream",
    "make_folder",
    "read_outcome",
    "write_durably",
    "write_files",
    "write_preloaded_data",
    "write_preloaded_data_in_trainer",
    "write_preloaded_data_multiproc",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_HASHED_NBYTES = 16 << 20


class Stream(NamedTuple):
    """Where one item lies in its file, and what it was transformed by."""

    offset: int
    nbytes: int
    descriptors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FileWrite:
    """One data file that is staged.

    Attributes:
        path: The file; what is there is replaced.
        identity: Which file of which save it is.
        buffer: Where its content is.
        start: Where the content begins in the buffer, on a page; room for the trailer follows.
        covered: Bytes of the content.
        streams: Where the items are in the content.
        items: The items themselves, for extensions.
        sync: Return when the file is durable.
    """

    path: Path
    identity: FileIdentity
    buffer: Buffer
    start: int
    covered: int
    streams: tuple[Stream, ...]
    items: tuple[Any, ...] = ()
    sync: bool = True

    @property
    def nbytes(self) -> int:
        """Of the file, if no extension transforms it."""
        return self.covered + trailer_nbytes(self.covered)


class HandedOver(list[FileWrite]):
    """Files that the persistent worker of another library's queue writes."""


def write_files(writes: Sequence[FileWrite], transforms: Any = None) -> list[list[Stream]]:
    """Write all files of a rank side by side, and give their buffer back.

    Args:
        writes: The files, in one folder.
        transforms: torch's ``_StorageWriterTransforms`` whose extensions the items go through;
            ``None`` for none.

    Returns:
        For each file where its items are.

    Raises:
        StorageError: The file system refused.
    """
    try:
        streams = _side_by_side(
            [partial(write_preloaded_data, write, transforms) for write in writes]
        )
        if any(write.sync for write in writes):
            with storage_errors("make durable", writes[0].path.parent):
                sync_folder(writes[0].path.parent)
        return streams
    finally:
        for write in writes:
            write.buffer.give_back()


def write_preloaded_data(write: FileWrite, transforms: Any = None) -> list[Stream]:
    """Write one file; as :func:`write_files`."""
    with storage_errors("write", write.path):
        if transforms is not None and transforms.extensions:
            return _write(write, 0, partial(_write_extended, transforms=transforms))
        try:
            return _write(write, os.O_DIRECT, partial(_write_content, direct=True))
        except OSError as error:
            # Who does not take O_DIRECT says so when the file is opened, or at the first write.
            if error.errno != errno.EINVAL:
                raise
            return _write(write, 0, partial(_write_content, direct=False))


def write_preloaded_data_multiproc(
    transforms: Any, outcome: Path, rank: int, writes: Sequence[FileWrite]
) -> None:
    """Write all files of a rank, and leave word of it for the trainer, good or bad.

    What Megatron-Core's queue, NVRx's, or ours calls behind training; the name is theirs, the files
    are written by threads.

    Args:
        transforms: As for :func:`write_files`.
        outcome: The file that :func:`read_outcome` reads.
        rank: Whose files they are, for messages.
        writes: The files.
    """
    try:
        _write_and_tell(transforms, outcome, rank, writes)
    except Exception:
        # The worker of a foreign queue would end, and training would wait for it for ever.
        if not isinstance(writes, HandedOver):
            raise
        logger.exception("rank %d could not write its files", rank)


def _write_and_tell(transforms: Any, outcome: Path, rank: int, writes: Sequence[FileWrite]) -> None:
    try:
        said: dict[str, Any] = {"files": write_files(writes, transforms)}
    except BaseException as error:
        said = {"error": with_class(error)}
        raise
    finally:
        fresh = outcome.with_name(f"{outcome.name}.new")
        with storage_errors(f"leave word of what rank {rank} has written in", outcome):
            fresh.write_text(json.dumps(said))
            os.rename(fresh, outcome)


@runs_in_trainer
def write_preloaded_data_in_trainer(
    transforms: Any, outcome: Path, rank: int, writes: Sequence[FileWrite]
) -> None:
    """As :func:`write_preloaded_data_multiproc`, from memory that only the trainer can see."""
    write_preloaded_data_multiproc(transforms, outcome, rank, writes)


def read_outcome(outcome: Path) -> list[list[Stream]] | str | None:
    """Where the items of each file are; or the error it ended with; ``None`` if there is no word.

    It is there once: reading removes it.
    """
    with storage_errors("read", outcome):
        try:
            said = json.loads(outcome.read_text())
        except FileNotFoundError:
            return None
        outcome.unlink()
    if "error" in said:
        return str(said["error"])
    return [[Stream(o, n, tuple(d)) for o, n, d in streams] for streams in said["files"]]


def _write(
    write: FileWrite, flag: int, put: Callable[[int, FileWrite], list[Stream]]
) -> list[Stream]:
    write.path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | flag
    # The umask says who may read it: it outlives the job, and others load it.
    file = open_owned(write.path, flags, 0o666)
    try:
        with file:
            streams = put(file.fileno(), write)
            if write.sync:
                os.fsync(file.fileno())
    except BaseException:
        write.path.unlink(missing_ok=True)
        raise
    return streams


def _write_content(fd: int, write: FileWrite, *, direct: bool) -> list[Stream]:
    nbytes = write.covered + trailer_nbytes(write.covered)
    room = round_up(nbytes, PAGE_NBYTES)
    view = write.buffer.view[write.start : write.start + room]
    hasher, digests = BlockHasher(write.identity), bytearray()
    # What is hashed is still in the cache, or on its way out of it, when it is written.
    written = 0
    for start in range(0, write.covered, _HASHED_NBYTES):
        stop = min(start + _HASHED_NBYTES, write.covered)
        for block in range(start, stop, BLOCK_NBYTES):
            digest = hasher.digest(
                block // BLOCK_NBYTES, view[block : min(block + BLOCK_NBYTES, stop)]
            )
            digests += digest.to_bytes(DIGEST_NBYTES, "little")
        if stop - start == _HASHED_NBYTES:
            write_range(fd, view, start, stop, direct=direct)
            written = stop
    trailer = Trailer(write.identity.save_id, write.covered, bytes(digests))
    view[write.covered : nbytes] = digests + trailer.seal()
    write_range(fd, view, written, nbytes, direct=direct)
    os.ftruncate(fd, nbytes)
    return list(write.streams)


def _write_extended(fd: int, write: FileWrite, *, transforms: Any) -> list[Stream]:
    view = write.buffer.view[write.start : write.start + write.covered]
    file = _HashedFile(fd, write.identity)
    streams = []
    for item, (offset, nbytes, _) in zip(write.items, write.streams, strict=True):
        begun = file.tell()
        stream, descriptors = transforms.transform_save_stream(item, file)
        stream.write(view[offset : offset + nbytes])
        stream.close()
        streams.append(Stream(begun, file.tell() - begun, tuple(descriptors)))
    file.seal()
    return streams


class _HashedFile(io.RawIOBase):
    """Hashes what is written to a file as it comes, however it is cut."""

    def __init__(self, fd: int, identity: FileIdentity) -> None:
        self._fd = fd
        self._identity = identity
        self._hasher = BlockHasher(identity)
        self._block = bytearray()
        self._digests = bytearray()
        self._position = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        nbytes = len(view)
        self._position += nbytes
        while len(view):
            part = view[: BLOCK_NBYTES - len(self._block)]
            self._block += part
            view = view[len(part) :]
            if len(self._block) == BLOCK_NBYTES:
                self._put()
        return nbytes

    def seal(self) -> None:
        """Write the trailer."""
        self.write(bytes(-self._position % DIGEST_NBYTES))
        covered = self._position
        if self._block:
            self._put()
        trailer = Trailer(self._identity.save_id, covered, bytes(self._digests))
        rest = bytes(self._digests) + trailer.seal()
        write_range(self._fd, memoryview(rest), 0, len(rest), direct=False, base=covered)

    def _put(self) -> None:
        start = len(self._digests) // DIGEST_NBYTES * BLOCK_NBYTES
        digest = self._hasher.digest(start // BLOCK_NBYTES, bytes(self._block))
        self._digests += digest.to_bytes(DIGEST_NBYTES, "little")
        block = memoryview(bytes(self._block))
        write_range(self._fd, block, 0, len(block), direct=False, base=start)
        self._block.clear()


def _side_by_side(calls: Sequence[Callable[[], T]]) -> list[T]:
    """What each call returns; the first error, once none of them runs any more."""
    tasks = [Task(call) for call in calls]
    try:
        # No executor: those take no work while the interpreter is leaving, and saves end then, too.
        with suppress(RuntimeError):
            for task in tasks[1:]:
                task.start("localckpt-file", daemon=False)
        for task in tasks:
            # Those that no thread has begun.
            task.run()
    finally:
        end_all(tasks)
    return [task.take_result() for task in tasks]


def write_durably(path: Path, data: bytes) -> None:
    """Write a file that is there whole or not at all, also after the power failed.

    Raises:
        StorageError: The file system refused.
    """
    fresh = path.with_name(f"{path.name}.tmp")
    with storage_errors("write", path):
        fresh.unlink(missing_ok=True)
        try:
            with open_owned(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666) as file:
                write_range(file.fileno(), memoryview(data), 0, len(data), direct=False)
                os.fsync(file.fileno())
            os.rename(fresh, path)
            sync_folder(path.parent)
        except OSError as error:
            if error.errno != errno.ENOENT:
                fresh.unlink(missing_ok=True)
            raise


def make_folder(path: Path) -> None:
    """Make a directory and those above it, to stay there after the power failed.

    Raises:
        StorageError: The file system refused.
    """
    with storage_errors("make", path):
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            sync_folder(folder.parent)
