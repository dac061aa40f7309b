"""A file that is read: past the page cache where its bytes are not in it, and out of it else."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
from pathlib import Path

from localckpt.errors import CorruptShardError
from localckpt.state_dict.layout import PAGE_NBYTES
from localckpt.storage.failures import storage_errors

__all__ = ["OpenFile", "close_read"]

_PROBES = 16


class OpenFile:
    """Owns an open file. Everything but making it raises OSError.

    Args:
        path: The file. Symbolic links are refused.

    Raises:
        StorageError: It cannot be opened.
        CorruptShardError: It is no regular file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with storage_errors("open", path):
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            status = os.fstat(self.fd)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise CorruptShardError(f"{path} is no regular file")
        self.nbytes = status.st_size

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            close_read(fd)

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
        """Whether the file is in the page cache, by looking at a few pages of it."""
        probe = bytearray(1)
        for i in range(_PROBES):
            try:
                os.preadv(self.fd, [probe], i * self.nbytes // _PROBES, os.RWF_NOWAIT)
            except OSError as error:
                # EAGAIN: the page is not there. EOPNOTSUPP: the file system cannot tell.
                return error.errno == errno.EOPNOTSUPP
        return True

    def open_direct(self) -> int | None:
        """Another descriptor, to read past the page cache; ``None`` where that cannot be."""
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


def close_read(fd: int) -> None:
    """Whatever it says, the descriptor is gone, and what was read is verified."""
    with contextlib.suppress(OSError):
        os.close(fd)
