"""Opening and reading of files, from the page cache or past it, safe from interrupts."""

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

__all__ = ["OpenFile", "close_read", "open_owned"]

_PROBES = 16


def open_owned(path: Path, flags: int, mode: int = 0o600) -> io.FileIO:
    """Open a file as an object that closes its descriptor when it is garbage collected.

    An interrupt right after ``os.open`` would leak the descriptor, and with it the space of a file
    that is removed later.

    Args:
        path: The file, which is no directory.
        flags, mode: As for ``os.open``; close-on-exec is added.

    Raises:
        OSError: The file cannot be opened; ``IsADirectoryError`` for a directory.
    """
    descriptors: list[int] = []
    files: list[io.FileIO] = []
    try:
        # An interrupt can come between any two Python instructions. extend(map(...)) is one: the
        # descriptor, and then the object, is in its list before an interrupt can come. (Audit
        # hooks are Python code, and run inside both calls.)
        descriptors.extend(map(os.open, (path,), (flags | os.O_CLOEXEC,), (mode,)))
        # FileIO's mode "rb" does not change how the descriptor was opened.
        files.extend(map(io.FileIO, descriptors, ("rb",)))
    except BaseException:
        # FileIO refused the descriptor (of a directory), or an interrupt came.
        if not files and descriptors:
            os.close(descriptors[0])
        raise
    return files[0]


class OpenFile:
    """Regular file opened for reading; its methods raise OSError.

    Args:
        path: The file. Symbolic links are refused.

    Raises:
        StorageError: The file cannot be opened.
        CorruptShardError: The path is no regular file.
    """

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
        """File descriptor of the open file."""
        return self._file.fileno()

    def close(self) -> None:
        close_read(self._file)

    def read_into(
        self, offset: int, view: memoryview, wanted: int | None = None, *, fd: int | None = None
    ) -> None:
        """Read into a view.

        Args:
            offset: Offset of the first byte in the file.
            view: Memory for the bytes.
            wanted: Number of bytes that must be read; ``None`` for ``len(view)``.
            fd: Another descriptor of the file, such as that of :meth:`open_direct`.

        Raises:
            CorruptShardError: The file ends before ``wanted`` bytes.
        """
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
