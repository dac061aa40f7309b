"""A file that is read: past the page cache where its bytes are not in it, and out of it else."""

from __future__ import annotations

import contextlib
import errno
import io
import mmap
import os
import stat
from pathlib import Path

from localckpt.errors import CorruptShardError
from localckpt.memory.host_memory import PAGE_NBYTES
from localckpt.storage.failures import storage_errors

__all__ = ["OpenFile", "close_read", "open_owned"]

_PROBES = 16


def open_owned(path: Path, flags: int, mode: int = 0o600) -> io.FileIO:
    """Open a file as an object that closes the descriptor when nothing refers to it any more.

    An interrupt that comes right after ``os.open`` would lose the descriptor, and with it the space
    of a file that is removed.

    Args:
        path: The file, which is no directory.
        flags, mode: As for ``os.open``; close-on-exec is added.

    Raises:
        OSError: It cannot be opened; ``IsADirectoryError`` if it is a directory.
    """
    descriptors: list[int] = []
    files: list[io.FileIO] = []
    try:
        # Iterators, because an interrupt can come between any two instructions of Python: what is
        # opened is in its list before one can. Audit hooks, which are Python, run in both.
        descriptors.extend(map(os.open, (path,), (flags | os.O_CLOEXEC,), (mode,)))
        # The mode that the object is given changes nothing about the descriptor.
        files.extend(map(io.FileIO, descriptors, ("rb",)))
    except BaseException:
        # The object has refused the descriptor, as that of a directory, or an interrupt came.
        if not files and descriptors:
            os.close(descriptors[0])
        raise
    return files[0]


class OpenFile:
    """Open file, and its owner. Everything but making it raises OSError.

    Args:
        path: The file. Symbolic links are refused.

    Raises:
        StorageError: It cannot be opened.
        CorruptShardError: It is no regular file.
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
        """The descriptor."""
        return self._file.fileno()

    def close(self) -> None:
        close_read(self._file)

    def read_into(
        self, offset: int, view: memoryview, wanted: int | None = None, *, fd: int | None = None
    ) -> None:
        """Read into a view.

        Args:
            offset: Of the first byte in the file.
            view: Where they go.
            wanted: How many must come; all that fit by default.
            fd: Another descriptor of the file, as :meth:`open_direct` gives.

        Raises:
            CorruptShardError: The file ends before.
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
        """Return whether the file is in the page cache, by looking at a few pages of it."""
        probe = bytearray(1)
        for i in range(_PROBES):
            try:
                os.preadv(self.fd, [probe], i * self.nbytes // _PROBES, os.RWF_NOWAIT)
            except OSError as error:
                # EAGAIN: the page is not there. EOPNOTSUPP: the file system cannot tell.
                return error.errno == errno.EOPNOTSUPP
        return True

    def open_direct(self) -> io.FileIO | None:
        """Open the file again, to read past the page cache; ``None`` where that cannot be."""
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
    """Close a file that was read: whatever closing says, what was read is verified."""
    with contextlib.suppress(OSError):
        file.close()
