"""Images that go to their files piece by piece, through less memory than an image has.

The piece after the last one that fits waits until the disk has taken the first, so who makes the
image waits for the disk: a save, or a peer that sends.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import TypeAlias

from localckpt.errors import CheckpointingException, StorageError
from localckpt.memory.digests import BLOCK_NBYTES, BlockHasher, digests_nbytes
from localckpt.storage.failures import storage_errors
from localckpt.storage.files import FileSource
from localckpt.storage.write import ShardWrite, open_dirty, reserve, sync_folder, write_range
from localckpt.threads import SerialThread, Task

PIECE_NBYTES = 32 << 20
"""Size of a piece, the last one's excepted. One is filled while another is written."""


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
                os.fsync(file.fileno())
                os.rename(write.dirty, write.final)
                sync_folder(write.final.parent)
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
