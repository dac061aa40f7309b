"""Reading of images in files: with O_DIRECT, or from the page cache if the file is cached."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue

from localckpt.memory.host_memory import PAGE_NBYTES, round_up
from localckpt.state_dict.source import PIECE_NBYTES, Filled, Places, handle_pieces, scatter
from localckpt.storage.buffers import PrivateBuffer
from localckpt.storage.failures import storage_errors
from localckpt.storage.open_file import OpenFile, close_read

# 4 requests keep a disk busy, and half of these threads copy and hash at any time. Reads from the
# page cache are bound by the cores.
_THREADS_COLD = 8
_THREADS_WARM = 2
# Limit of the kernel for the parts of one read (IOV_MAX).
_MAX_PARTS = 1024
# Shorter reads gain nothing by O_DIRECT.
_LONG_NBYTES = 1 << 20


class FileSource:
    """Source of an image in a file, which it opens as :class:`OpenFile` and owns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._scratch = self._pages = memoryview(b"")
        self._file = OpenFile(path)
        self._direct: io.FileIO | None = None
        # Found out by the first long read.
        self._is_cached: bool | None = None

    @property
    def nbytes(self) -> int:
        return self._file.nbytes

    def read(self, start: int, stop: int) -> memoryview:
        if stop - start >= _LONG_NBYTES and start % PAGE_NBYTES == 0:
            with storage_errors("read", self.path):
                direct = self._open_direct()
            if direct is not None:
                return self._read_direct(direct, start, stop - start)
        if len(self._scratch) < stop - start:
            self._scratch = memoryview(bytearray(stop - start))
        view = self._scratch[: stop - start]
        with storage_errors("read", self.path):
            self._file.read_into(start, view)
        return view

    def stream(
        self, stop: int, places: Places, filled: Filled, starts: Sequence[int] | None = None
    ) -> None:
        with storage_errors("read", self.path):
            direct = self._open_direct()
        if direct is None:
            self._stream(_THREADS_WARM, stop, self._fill, places, filled, starts)
            return
        free: SimpleQueue[memoryview] = SimpleQueue()

        def fill(start: int, parts: list[memoryview]) -> None:
            slot = free.get()
            try:
                nbytes = sum(map(len, parts))
                # O_DIRECT reads whole pages; the bytes past the end of the file are not used.
                pages = slot[: round_up(nbytes, PAGE_NBYTES)]
                self._file.read_into(start, pages, nbytes, fd=direct.fileno())
                scatter(slot[:nbytes], parts)
            finally:
                free.put(slot)

        bounce = _memory(_THREADS_COLD * PIECE_NBYTES)
        with contextlib.closing(bounce):
            for i in range(_THREADS_COLD):
                free.put(bounce.view[i * PIECE_NBYTES : (i + 1) * PIECE_NBYTES])
            self._stream(_THREADS_COLD, stop, fill, places, filled, starts)

    def close(self) -> None:
        self._file.close()
        if self._direct is not None:
            close_read(self._direct)

    def _read_direct(self, direct: io.FileIO, start: int, nbytes: int) -> memoryview:
        # O_DIRECT reads whole pages; the bytes past the end of the file are not used.
        whole = round_up(nbytes, PAGE_NBYTES)
        if len(self._pages) < whole:
            self._pages = _memory(whole).view
        with storage_errors("read", self.path):
            self._file.read_into(start, self._pages[:whole], nbytes, fd=direct.fileno())
        return self._pages[:nbytes]

    def _open_direct(self) -> io.FileIO | None:
        """Return the file opened with O_DIRECT; ``None`` if it is cached, or cannot be."""
        if self._is_cached is None:
            self._is_cached = self._file.is_cached()
            if not self._is_cached:
                self._direct = self._file.open_direct()
        return self._direct

    def _stream(
        self,
        threads: int,
        stop: int,
        fill: Callable[[int, list[memoryview]], None],
        places: Places,
        filled: Filled,
        starts: Sequence[int] | None,
    ) -> None:
        def handle(start: int, end: int) -> None:
            parts = places(start, end)
            with storage_errors("read", self.path):
                fill(start, parts)
            filled(start, parts)

        handle_pieces(stop, threads, handle, starts)

    def _fill(self, start: int, parts: list[memoryview]) -> None:
        """Read from the page cache straight into the parts."""
        for first in range(0, len(parts), _MAX_PARTS):
            batch = parts[first : first + _MAX_PARTS]
            done = os.preadv(self._file.fd, batch, start)
            for part in batch:
                # After a short read, read the missing bytes of each part on its own.
                have = min(done, len(part))
                self._file.read_into(start + have, part[have:])
                start, done = start + len(part), done - have


def _memory(nbytes: int) -> PrivateBuffer:
    try:
        return PrivateBuffer(nbytes)
    except OSError as error:
        # No StorageError, which would make the caller try another copy of the file.
        raise MemoryError(f"{nbytes} bytes to read through: {error}") from error
