"""Files that are read, with O_DIRECT or from the page cache if they are cached, or mapped."""

from __future__ import annotations

import contextlib
import errno
import io
import mmap
import os
import secrets
import stat
import threading
from collections.abc import Sequence
from pathlib import Path

from localckpt.errors import CorruptShardError
from localckpt.memory.host_memory import (
    PAGE_NBYTES,
    address_of,
    map_memory,
    populate,
    prefer_huge_pages,
    round_up,
)
from localckpt.state_dict.source import scatter
from localckpt.storage.buffers import Buffer, PrivateBuffer, check_memory
from localckpt.storage.failures import storage_errors

# 4 requests keep a disk busy, and half of these threads copy and hash at any time. Reads from the
# page cache are bound by the cores.
_THREADS_COLD = 8
_THREADS_WARM = 2
# Limit of the kernel for the parts of one read (IOV_MAX).
_MAX_PARTS = 1024
# Shorter reads gain nothing by O_DIRECT.
_LONG_NBYTES = 1 << 20
_PROBES = 16
_FULL = "it is full: free space, keep fewer checkpoints, or enlarge it (shared memory)"


def open_owned(path: Path, flags: int, mode: int = 0o600) -> io.FileIO:
    """Open a file as an object that closes its descriptor when it is collected; raises OSError.

    An interrupt right after ``os.open`` would leak the descriptor, and so the space of the file.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC, mode)
    try:
        # FileIO's mode "rb" does not change how the descriptor was opened.
        return io.FileIO(descriptor, "rb")
    except IsADirectoryError:
        os.close(descriptor)
        raise


class FileSource:
    """Source of an image, or another regular file, which it opens and owns.

    Raises StorageError, or CorruptShardError for another kind of file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._scratch = memoryview(b"")
        self._of_thread = threading.local()
        self._direct: io.FileIO | None = None
        # Found out by the first long read.
        self._is_cached: bool | None = None
        with _reading("open", path):
            try:
                self._file = open_owned(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            except IsADirectoryError as error:
                raise CorruptShardError(f"{path} is no regular file") from error
            status = os.fstat(self._file.fileno())
        if not stat.S_ISREG(status.st_mode):
            _close_read(self._file)
            raise CorruptShardError(f"{path} is no regular file")
        self.nbytes = status.st_size

    def fill(
        self,
        offset: int,
        view: memoryview,
        wanted: int | None = None,
        file: io.FileIO | None = None,
    ) -> None:
        """Read ``wanted`` bytes, by default ``len(view)``; CorruptShardError if there are fewer."""
        wanted = len(view) if wanted is None else wanted
        done = 0
        while done < wanted:
            count = os.preadv((file or self._file).fileno(), [view[done:]], offset + done)
            if count == 0:
                raise CorruptShardError(
                    f"{self.path} is cut short: it ends at byte {offset + done} of {self.nbytes}"
                )
            done += count

    @property
    def threads(self) -> int:
        with _reading("read", self.path):
            return _THREADS_WARM if self._open_direct() is None else _THREADS_COLD

    def read(self, start: int, stop: int) -> memoryview:
        with _reading("read", self.path):
            if stop - start >= _LONG_NBYTES and start % PAGE_NBYTES == 0:
                direct = self._open_direct()
                if direct is not None:
                    return self._read_direct(direct, start, stop - start)
            if len(self._scratch) < stop - start:
                self._scratch = memoryview(bytearray(stop - start))
            view = self._scratch[: stop - start]
            self.fill(start, view)
            return view

    def read_into(self, start: int, parts: Sequence[memoryview]) -> None:
        with _reading("read", self.path):
            if (direct := self._open_direct()) is None:
                self._fill_parts(start, parts)
            else:
                scatter(self._read_direct(direct, start, sum(map(len, parts))), parts)

    def close(self) -> None:
        _close_read(self._file)
        if self._direct is not None:
            _close_read(self._direct)

    def _read_direct(self, direct: io.FileIO, start: int, nbytes: int) -> memoryview:
        """Read into memory of the thread, which its next call overwrites."""
        # O_DIRECT reads whole pages; the bytes past the end of the file are not used.
        whole = round_up(nbytes, PAGE_NBYTES)
        pages = getattr(self._of_thread, "pages", memoryview(b""))
        if len(pages) < whole:
            pages = self._of_thread.pages = PrivateBuffer(whole).view
        self.fill(start, pages[:whole], nbytes, direct)
        return pages[:nbytes]

    def _open_direct(self) -> io.FileIO | None:
        """Return the file opened with O_DIRECT; ``None`` if it is cached, or cannot be."""
        if self._is_cached is None:
            self._is_cached = self._is_in_cache()
            if not self._is_cached:
                self._direct = _open_direct(self.path)
        return self._direct

    def _is_in_cache(self) -> bool:
        """Return whether the file is in the page cache, judged by a sample of its pages."""
        probe = bytearray(1)
        for _ in range(_PROBES):
            # At random places, as the kernel begins to read what a probe does not find: the same
            # places would be cached when the file is opened again.
            offset = secrets.randbelow(max(1, self.nbytes))
            try:
                os.preadv(self._file.fileno(), [probe], offset, os.RWF_NOWAIT)
            except OSError as error:
                # EAGAIN: the page is not cached. EOPNOTSUPP: the file system does not support the
                # flag, and the file counts as cached.
                return error.errno == errno.EOPNOTSUPP
        return True

    def _fill_parts(self, start: int, parts: Sequence[memoryview]) -> None:
        """Read from the page cache straight into the parts."""
        for first in range(0, len(parts), _MAX_PARTS):
            batch = parts[first : first + _MAX_PARTS]
            done = os.preadv(self._file.fileno(), batch, start)
            for part in batch:
                # After a short read, read the missing bytes of each part on its own.
                have = min(done, len(part))
                self.fill(start + have, part[have:])
                start, done = start + len(part), done - have


def _open_direct(path: Path) -> io.FileIO | None:
    """Open a file with O_DIRECT; ``None`` if the file system refuses it."""
    try:
        file = open_owned(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECT)
        try:
            with mmap.mmap(-1, PAGE_NBYTES) as page:
                os.preadv(file.fileno(), [page], 0)
        except BaseException:
            _close_read(file)
            raise
    except OSError as error:
        if error.errno == errno.EINVAL:
            return None
        raise
    return file


def _close_read(file: io.FileIO) -> None:
    """Close a file that was only read, and ignore errors: the bytes read are verified anyway."""
    with contextlib.suppress(OSError):
        file.close()


class _reading(storage_errors):
    """As ``storage_errors``, but MemoryError where memory runs out: no other copy helps then."""

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            raise MemoryError(f"could not read {self._path}: {error.strerror}") from error
        super().__exit__(kind, error, where)


class MappedFile(Buffer):
    """Mapped file of a shard in shared memory. Closing the buffer keeps the file."""

    _path: Path
    _nbytes: int
    _map: memoryview | None = None

    def __init__(self, path: Path, nbytes: int, *, create: bool) -> None:
        super().__init__()
        self._open(path, nbytes, create=create)

    @property
    def in_use(self) -> bool:
        # A commit, in any process, renames the file from this name.
        with storage_errors("look at", self._path):
            return self._path.exists()

    def give_back(self) -> None:
        """Do nothing: the commit's rename marks the buffer as free."""

    def resize(self, path: Path, nbytes: int) -> None:
        """Adapt the buffer to another image: a new path, and a new size."""
        if self._map is None or nbytes > len(self._map):
            self.close()
            self._open(path, nbytes, create=False)
            return
        before = self._nbytes
        if nbytes != before:
            # CUDA would go on to copy into the pages that the file had when it was pinned.
            self._unpin()
        self._path, self._nbytes = path, nbytes
        with (
            storage_errors("reserve shared memory in", path, _FULL),
            open_owned(path, os.O_RDWR | os.O_NOFOLLOW) as file,
        ):
            if nbytes > before:
                # Only the new range, since the kernel visits every page of the range.
                os.posix_fallocate(file.fileno(), before, nbytes - before)
            os.ftruncate(file.fileno(), nbytes)
        self._view = self._map[:nbytes]

    def close(self) -> None:
        self._unpin()
        self._view = memoryview(b"")
        # The pages are unmapped with the last view, even if this object lives longer.
        self._map = None

    def _open(self, path: Path, nbytes: int, *, create: bool) -> None:
        if create:
            check_memory(nbytes)
        else:
            check_memory(nbytes - path.stat().st_size)
        self._path, self._nbytes = path, nbytes
        flags = os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL if create else 0)
        with storage_errors("map shared memory in", path, _FULL), open_owned(path, flags) as file:
            try:
                # Whole pages, so that a slightly larger image fits the next time.
                mapped = _map_file(file.fileno(), round_up(nbytes, PAGE_NBYTES))
                self._map, self._view = mapped, mapped[:nbytes]
                os.ftruncate(file.fileno(), nbytes)
            except BaseException:
                if create:
                    path.unlink(missing_ok=True)
                raise


def _map_file(fd: int, nbytes: int) -> memoryview:
    """Map a file in shared memory, and reserve all its pages; raises OSError."""
    if os.fstat(fd).st_size < nbytes:
        os.ftruncate(fd, nbytes)
    memory = map_memory(nbytes, fd)
    try:
        # Before posix_fallocate, which would allocate small pages.
        prefer_huge_pages(address_of(memory), nbytes)
        populate(address_of(memory), nbytes)
        # Without reserved pages, a write to the mapping is a SIGBUS once memory is full.
        os.posix_fallocate(fd, 0, nbytes)
    except BaseException:
        # The error's traceback keeps this variable, which would keep the pages.
        del memory
        raise
    return memory
