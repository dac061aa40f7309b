"""Staging buffers in shared memory, and whether somebody still uses them.

The name of a buffer tells the process that made it. Shared memory may be common to containers whose
processes do not see each other, or outlive them: so the maker also holds a lock on a file beside
its buffers while it lives. The lock is the process's own: forks of the maker that outlive it do not
have it.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
import secrets
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from localckpt.storage.names import STAGING_PREFIX
from localckpt.storage.owner import Owner, Running

__all__ = ["StagingFolder", "find_buffers", "is_buffer", "is_live", "remove_orphans"]

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
_LOCK = ".lock"


class StagingFolder:
    """Staging buffers of one store, or writer, in shared memory.

    Attributes:
        path: The directory they are in.
    """

    def __init__(self) -> None:
        self.path = SHARED_MEMORY
        self._owner = f"{STAGING_PREFIX}{Owner.me()}.{secrets.token_hex(4)}"
        self._numbers = itertools.count()
        self._release: Callable[[], object] | None = None

    def new_path(self) -> Path:
        """A name for a buffer that is about to be made; no other process takes it for a dead one's.

        Raises:
            OSError: Nothing can be made there.
        """
        if self._release is None:
            lock = self.path / f"{self._owner}{_LOCK}"
            # Also when nobody closes this: the owner is gone with the object.
            self._release = weakref.finalize(self, _let_go, os.getpid(), lock, _make_locked(lock))
        return self.path / f"{self._owner}.{next(self._numbers)}"

    def nbytes(self) -> int:
        """Bytes of the buffers that are there."""
        found = 0
        for path in self.path.glob(f"{self._owner}.*"):
            # One that could not be made ahead of time goes again.
            with suppress(FileNotFoundError):
                found += path.lstat().st_blocks * 512
        return found

    def close(self) -> None:
        """Say that the owner is gone, when all buffers are. May be called twice."""
        if self._release is not None:
            self._release()
            self._release = None


def is_live(path: Path, running: Running) -> bool | None:
    """Return whether the process that made a buffer may still run; ``None`` if it is no buffer."""
    owner = Owner.parse(path.name.removeprefix(STAGING_PREFIX).partition(".")[0])
    if owner is None:
        return None
    return owner in running or _is_locked(path)


def is_buffer(path: Path) -> bool:
    """Return whether a file of a staging folder is a buffer, and not the lock beside buffers."""
    return path.suffix != _LOCK


def find_buffers() -> list[Path]:
    """Staging buffers of all users on this node, and the locks beside them."""
    return sorted(SHARED_MEMORY.glob(f"{STAGING_PREFIX}*"))


def remove_orphans() -> None:
    """Remove the staging buffers of this user whose processes are gone."""
    running = Running()
    for path in find_buffers():
        if is_live(path, running) is not False:
            continue
        try:
            if path.lstat().st_uid == os.getuid():
                path.unlink()
                logger.info("removed %s, which a process that is gone left behind", path)
        except FileNotFoundError:
            logger.debug("another rank that starts now has removed %s", path)
        except OSError as error:
            logger.warning("%s of a process that is gone cannot be removed: %s", path, error)


def _make_locked(path: Path) -> int:
    """Make the file that says that its maker lives; the descriptor that holds the lock."""
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(path, flags, 0o600)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Somebody who does not see this process may have removed it before it was locked.
            if os.fstat(fd).st_nlink:
                return fd
        except BaseException:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        os.close(fd)


def _let_go(process: int, lock: Path, fd: int) -> None:
    if os.getpid() == process:
        lock.unlink(missing_ok=True)
        os.close(fd)


def _is_locked(path: Path) -> bool:
    lock = path.with_name(f"{path.name.rpartition('.')[0]}{_LOCK}")
    try:
        fd = os.open(lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        finally:
            os.close(fd)
    except OSError as error:
        # Unless it is gone, or is a link: somebody has it, or the system does not say.
        return error.errno not in (errno.ENOENT, errno.ELOOP)
    return False
