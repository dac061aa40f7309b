"""Reading of images in files: with O_DIRECT, or from the page cache if the file is cached."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from localckpt.memory.host_memory import PAGE_NBYTES, round_up
from localckpt.state_dict.source import scatter
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
        self._scratch = memoryview(b"")
        self._of_thread = threading.local()
        self._file = OpenFile(path)
        self._direct: io.FileIO | None = None
        # Found out by the first long read.
        self._is_cached: bool | None = None

    @property
    def nbytes(self) -> int:
        return self._file.nbytes

    @property
    def threads(self) -> int:
        with storage_errors("read", self.path):
            return _THREADS_WARM if self._open_direct() is None else _THREADS_COLD

    def read(self, start: int, stop: int) -> memoryview:
        with storage_errors("read", self.path):
            if stop - start >= _LONG_NBYTES and start % PAGE_NBYTES == 0:
                direct = self._open_direct()
                if direct is not None:
                    return self._read_direct(direct, start, stop - start)
            if len(self._scratch) < stop - start:
                self._scratch = memoryview(bytearray(stop - start))
            view = self._scratch[: stop - start]
            self._file.read_into(start, view)
            return view

    def read_into(self, start: int, parts: Sequence[memoryview]) -> None:
        with storage_errors("read", self.path):
            if (direct := self._open_direct()) is None:
                self._fill(start, parts)
            else:
                scatter(self._read_direct(direct, start, sum(map(len, parts))), parts)

    def close(self) -> None:
        self._file.close()
        if self._direct is not None:
            close_read(self._direct)

    def _read_direct(self, direct: io.FileIO, start: int, nbytes: int) -> memoryview:
        """Read into memory of the thread, which its next call overwrites."""
        # O_DIRECT reads whole pages; the bytes past the end of the file are not used.
        whole = round_up(nbytes, PAGE_NBYTES)
        pages = getattr(self._of_thread, "pages", memoryview(b""))
        if len(pages) < whole:
            pages = self._of_thread.pages = _memory(whole).view
        self._file.read_into(start, pages[:whole], nbytes, fd=direct.fileno())
        return pages[:nbytes]

    def _open_direct(self) -> io.FileIO | None:
        """Return the file opened with O_DIRECT; ``None`` if it is cached, or cannot be."""
        if self._is_cached is None:
            self._is_cached = self._file.is_cached()
            if not self._is_cached:
                self._direct = self._file.open_direct()
        return self._direct

    def _fill(self, start: int, parts: Sequence[memoryview]) -> None:
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
