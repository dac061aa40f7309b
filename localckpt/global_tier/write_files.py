"""Writes of staged files behind training: hashed, written, made durable, reported to the trainer.

A :class:`FileWrite` is plain data and names: a thread of the trainer can carry it out, or a worker
process, without torch as long as no extension transforms the streams. After any error a file is
dead: it is removed, never written to again. A queue of the job (Megatron-Core's, NVRx's, or this
package's) may run the work in another process, and keep what went wrong there to itself; so the
outcome is left in a file.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from localckpt.async_save.request import runs_in_trainer
from localckpt.failure_texts import with_class
from localckpt.global_tier.trailer import FileIdentity, Trailer, trailer_nbytes
from localckpt.memory.copying import Copier
from localckpt.memory.digests import BLOCK_NBYTES, DIGEST_NBYTES, BlockHasher, digests_nbytes
from localckpt.memory.host_memory import PAGE_NBYTES, round_up
from localckpt.own_folders import file_mode, folder_mode
from localckpt.storage.buffers import Buffer
from localckpt.storage.failures import storage_errors
from localckpt.storage.open_file import open_owned
from localckpt.storage.write import replace_file, sync_folder, write_range

if TYPE_CHECKING:
    from localckpt.global_tier.storage_writer import FileSystemWriterAsync

__all__ = [
    "FileWrite",
    "Preload",
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
    """Place of one item in its file, and what it was transformed by."""

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
        start: Where the content begins in the buffer, on a page; space for the trailer follows.
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
        """Bytes of the file, if no extension transforms it."""
        return self.covered + trailer_nbytes(self.covered)


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


def _write(
    write: FileWrite, flag: int, put: Callable[[int, FileWrite], list[Stream]]
) -> list[Stream]:
    write.path.unlink(missing_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | flag
    # The umask says who may read it: it outlives the job, and others load it.
    file = open_owned(write.path, flags, file_mode(write.path.parent))
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
    view = write.buffer.view[write.start : write.start + round_up(write.nbytes, PAGE_NBYTES)]
    hasher = BlockHasher(write.identity)
    # What is hashed is still in the cache, or on its way out of it, when it is written.
    written = 0
    for start in range(0, write.covered, _HASHED_NBYTES):
        stop = min(start + _HASHED_NBYTES, write.covered)
        for block in range(start, stop, BLOCK_NBYTES):
            hasher.fill_block(view, write.covered, block // BLOCK_NBYTES)
        if stop - start == _HASHED_NBYTES:
            write_range(fd, view, start, stop, direct=direct)
            written = stop
    end = write.covered + digests_nbytes(write.covered)
    trailer = Trailer(write.identity.save_id, write.covered, bytes(view[write.covered : end]))
    view[end : write.nbytes] = trailer.footer()
    write_range(fd, view, written, write.nbytes, direct=direct)
    os.ftruncate(fd, write.nbytes)
    return list(write.streams)


def _write_extended(fd: int, write: FileWrite, *, transforms: Any) -> list[Stream]:
    view = write.buffer.view[write.start : write.start + write.covered]
    hasher = BlockHasher(write.identity)
    streams = []
    with open(fd, "w+b", closefd=False) as file:
        for item, (offset, nbytes, _) in zip(write.items, write.streams, strict=True):
            begun = file.tell()
            stream, descriptors = transforms.transform_save_stream(item, file)
            stream.write(view[offset : offset + nbytes])
            stream.close()
            streams.append(Stream(begun, file.tell() - begun, tuple(descriptors)))
        file.write(bytes(-file.tell() % DIGEST_NBYTES))
        covered = file.tell()
        # Only the file has all that extensions made; it is still in the page cache.
        file.seek(0)
        digests = b"".join(
            hasher.digest(index, file.read(BLOCK_NBYTES)).to_bytes(DIGEST_NBYTES, "little")
            for index in range(digests_nbytes(covered) // DIGEST_NBYTES)
        )
        file.write(digests + Trailer(write.identity.save_id, covered, digests).footer())
    return streams


def _side_by_side(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Make calls in threads; returns their results, or raises the first error once none runs."""
    results: dict[int, T] = {}

    def work(left: Iterator[tuple[int, Callable[[], T]]]) -> None:
        for number, call in left:
            results[number] = call()

    Copier(len(calls)).share(enumerate(calls), work)
    return [results[number] for number in range(len(calls))]


def write_durably(path: Path, data: bytes) -> None:
    """Write a file that is there whole or not at all, also after the power failed.

    Raises:
        StorageError: The file system refused.
    """
    with storage_errors("write", path):
        # The umask says who may read it.
        replace_file(path, data, file_mode(path.parent))
        sync_folder(path.parent)


def make_folder(path: Path) -> None:
    """Make a directory and those above it, to stay there after the power failed.

    Raises:
        StorageError: The file system refused.
    """
    with storage_errors("make", path):
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir(folder_mode(folder.parent), exist_ok=True)
            sync_folder(folder.parent)


class Preload:
    """Stages the tensors of a writer; returns the files to write.

    NVRx's persistent queue, and Megatron-Core's, pickle this function to have their worker call it,
    while training waits. The worker does not have the tensors, so they are staged when the function
    is pickled, and the worker is given the files.
    """

    def __init__(self, writer: FileSystemWriterAsync) -> None:
        self._writer = writer

    def __call__(self) -> list[FileWrite]:
        return self._writer.preload_tensors()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # An error here would be lost in a thread of that queue, and training would wait for ever.
        return partial, (_HandedOver, self._writer.stage_for_foreign_queue())


class _HandedOver(list[FileWrite]):
    """Files that the persistent worker of another library's queue writes."""


def write_preloaded_data_multiproc(
    transforms: Any, outcome: Path, rank: int, writes: Sequence[FileWrite]
) -> None:
    """Write all files of a rank, and report to the trainer, good or bad.

    The queue of Megatron-Core, NVRx or this package calls it behind training; the name is theirs,
    the files are written by threads.

    Args:
        transforms: As for :func:`write_files`.
        outcome: The file that :func:`read_outcome` reads.
        rank: Rank whose files they are, for messages.
        writes: The files.
    """
    try:
        _write_and_report(transforms, outcome, rank, writes)
    except Exception:
        # The worker of a foreign queue would end, and training would wait for it for ever.
        if not isinstance(writes, _HandedOver):
            raise
        logger.exception("rank %d could not write its files", rank)


def _write_and_report(
    transforms: Any, outcome: Path, rank: int, writes: Sequence[FileWrite]
) -> None:
    try:
        report: dict[str, Any] = {"files": write_files(writes, transforms)}
    except BaseException as error:
        report = {"error": with_class(error)}
        raise
    finally:
        with storage_errors(f"leave word of what rank {rank} has written in", outcome):
            replace_file(outcome, json.dumps(report).encode(), 0o600)


@runs_in_trainer
def write_preloaded_data_in_trainer(
    transforms: Any, outcome: Path, rank: int, writes: Sequence[FileWrite]
) -> None:
    """Write, in the trainer, from memory that only the trainer can see."""
    write_preloaded_data_multiproc(transforms, outcome, rank, writes)


def read_outcome(outcome: Path) -> list[list[Stream]] | str | None:
    """Read the places of each file's items, or the error; ``None`` if no outcome was left.

    It is there once: reading removes it.
    """
    with storage_errors("read", outcome):
        try:
            report = json.loads(outcome.read_text())
        except FileNotFoundError:
            return None
        outcome.unlink()
    if "error" in report:
        return str(report["error"])
    return [[Stream(o, n, tuple(d)) for o, n, d in streams] for streams in report["files"]]
