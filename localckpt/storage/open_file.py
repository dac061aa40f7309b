"""Opening and reading of files, from the page cache or past it."""

from __future__ import annotations

import contextlib
import errno
import io
import mmap
import os
import secrets
import stat
from pathlib import Path

from localckpt.errors import CorruptShardError
from localckpt.memory.host_memory import PAGE_NBYTES
from localckpt.storage.failures import storage_errors

_PROBES = 16


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


class OpenFile:
    """Regular file opened for reading; StorageError, or CorruptShardError for another kind."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with storage_errors("open", path):
            try:
                self._file = open_owned(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            except IsADirectoryError as error:
                raise CorruptShardError(f"{path} is no regular file") from error
            status = os.fstat(self.fd)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise CorruptShardError(f"{path} is no regular file")
        self.nbytes = status.st_size

    @property
    def fd(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        close_read(self._file)

    def read_into(
        self, offset: int, view: memoryview, wanted: int | None = None, *, fd: int | None = None
    ) -> None:
        """Read ``wanted`` bytes, by default ``len(view)``; CorruptShardError if there are fewer."""
        wanted = len(view) if wanted is None else wanted
        done = 0
        while done < wanted:
            count = os.preadv(self.fd if fd is None else fd, [view[done:]], offset + done)
            if count == 0:
                raise CorruptShardError(
                    f"{self.path} is cut short: it ends at byte {offset + done} of {self.nbytes}"
                )
            done += count

    def is_cached(self) -> bool:
        """Return whether the file is in the page cache, judged by a sample of its pages."""
        probe = bytearray(1)
        for _ in range(_PROBES):
            # At random places, as the kernel begins to read what a probe does not find: the same
            # places would be cached when the file is opened again.
            offset = secrets.randbelow(max(1, self.nbytes))
            try:
                os.preadv(self.fd, [probe], offset, os.RWF_NOWAIT)
            except OSError as error:
                # EAGAIN: the page is not cached. EOPNOTSUPP: the file system does not support the
                # flag, and the file counts as cached.
                return error.errno == errno.EOPNOTSUPP
        return True

    def open_direct(self) -> io.FileIO | None:
        """Open the file again with O_DIRECT; ``None`` if the file system refuses it."""
        try:
            file = open_owned(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECT)
            try:
                with mmap.mmap(-1, PAGE_NBYTES) as page:
                    os.preadv(file.fileno(), [page], 0)
            except BaseException:
                close_read(file)
                raise
        except OSError as error:
            if error.errno == errno.EINVAL:
                return None
            raise
        return file


def close_read(file: io.FileIO) -> None:
    """Close a file that was only read, and ignore errors: the bytes read are verified anyway."""
    with contextlib.suppress(OSError):
        file.close()
