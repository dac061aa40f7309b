"""Reads images from files: cold ones past the page cache, warm ones out of it."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

from localckpt.errors import CorruptShardError
from localckpt.state_dict.layout import PAGE_NBYTES, round_up
from localckpt.state_dict.source import PIECE_NBYTES, Filled, Places, handle_pieces, scatter
from localckpt.storage.buffers import PrivateBuffer
from localckpt.storage.failures import storage_errors

__all__ = ["FileSource"]

# A disk is busy with 4 requests under way, and half of these threads are copying and hashing; warm
# reads are bound by the cores.
_THREADS_COLD = 8
_THREADS_WARM = 2
_PROBES = 16
# The kernel takes at most this many parts in one read (IOV_MAX).
_MAX_PARTS = 1024


class FileSource:
    """One image in a file; owns the open file.

    Args:
        path: The file. Symbolic links are refused.

    Raises:
        StorageError: It cannot be opened.
        CorruptShardError: It is no regular file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._scratch: memoryview | None = None
        with storage_errors("open", path):
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise CorruptShardError(f"{path} is no regular file")
        self._nbytes = status.st_size

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def read(self, start: int, stop: int) -> memoryview:
        if self._scratch is None or len(self._scratch) < stop - start:
            self._scratch = memoryview(bytearray(stop - start))
        view = self._scratch[: stop - start]
        with storage_errors("read", self.path):
            self._read_into(self._fd, start, view)
        return view

    def stream(self, stop: int, places: Places, filled: Filled) -> None:
        with storage_errors("read", self.path):
            direct = None if self._is_cached() else self._open_direct()
        if direct is None:
            self._stream(_THREADS_WARM, stop, self._fill, places, filled)
            return
        free: SimpleQueue[memoryview] = SimpleQueue()

        def fill(start: int, parts: list[memoryview]) -> None:
            slot = free.get()
            try:
                nbytes = sum(map(len, parts))
                # Past the end of the file the last page is not filled, nor looked at.
                self._read_into(direct, start, slot[: round_up(nbytes, PAGE_NBYTES)], nbytes)
                scatter(slot[:nbytes], parts)
            finally:
                free.put(slot)

        with contextlib.ExitStack() as opened:
            opened.callback(_close, direct)
            with storage_errors("read", self.path):
                bounce = PrivateBuffer(_THREADS_COLD * PIECE_NBYTES)
            opened.callback(bounce.close)
            for i in range(_THREADS_COLD):
                free.put(bounce.view[i * PIECE_NBYTES : (i + 1) * PIECE_NBYTES])
            self._stream(_THREADS_COLD, stop, fill, places, filled)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            _close(fd)

    def _stream(
        self,
        threads: int,
        stop: int,
        fill: Callable[[int, list[memoryview]], None],
        places: Places,
        filled: Filled,
    ) -> None:
        def handle(start: int, end: int) -> None:
            parts = places(start, end)
            with storage_errors("read", self.path):
                fill(start, parts)
            filled(start, parts)

        handle_pieces(stop, threads, handle)

    def _fill(self, start: int, parts: list[memoryview]) -> None:
        """Read through the page cache, straight to where the bytes belong."""
        for first in range(0, len(parts), _MAX_PARTS):
            batch = parts[first : first + _MAX_PARTS]
            done = os.preadv(self._fd, batch, start)
            for part in batch:
                # After a short read, what is missing comes one part at a time.
                have = min(done, len(part))
                self._read_into(self._fd, start + have, part[have:])
                start, done = start + len(part), done - have

    def _read_into(self, fd: int, offset: int, view: memoryview, wanted: int | None = None) -> None:
        wanted = len(view) if wanted is None else wanted
        done = 0
        while done < wanted:
            count = os.preadv(fd, [view[done:]], offset + done)
            if count == 0:
                raise CorruptShardError(
                    f"{self.path} is cut short: it ends at byte {offset + done} of {self._nbytes}"
                )
            done += count

    def _is_cached(self) -> bool:
        """Whether the file is in the page cache, by looking at a few pages of it."""
        probe = bytearray(1)
        for i in range(_PROBES):
            try:
                os.preadv(self._fd, [probe], i * self._nbytes // _PROBES, os.RWF_NOWAIT)
            except OSError as error:
                # EAGAIN: the page is not there. EOPNOTSUPP: the file system cannot tell.
                return error.errno == errno.EOPNOTSUPP
        return True

    def _open_direct(self) -> int | None:
        fd = -1
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECT)
            with mmap.mmap(-1, PAGE_NBYTES) as page:
                os.preadv(fd, [page], 0)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            if error.errno == errno.EINVAL:
                return None
            raise
        return fd


def _close(fd: int) -> None:
    """Whatever it says, the descriptor is gone, and what was read is verified."""
    with contextlib.suppress(OSError):
        os.close(fd)
