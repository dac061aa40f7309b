"""Files of staging buffers in shared memory, and the removal of those of dead processes.

The name of a buffer identifies the process that made it. Containers may share shared memory without
seeing each other's processes, so the maker also holds a lock on a file beside its buffers while it
lives. It is a POSIX lock (``lockf``), which forks of the maker do not inherit.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
import secrets
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

from localckpt.storage.names import STAGING_PREFIX
from localckpt.storage.owner import Owner, Running

__all__ = ["StagingFolder", "find_buffers", "is_buffer", "is_live", "remove_orphans"]

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
_LOCK = ".lock"


class StagingFolder:
    """Names of the staging buffers of one store or writer in shared memory."""

    def __init__(self) -> None:
        self.path = SHARED_MEMORY
        self._owner = f"{STAGING_PREFIX}{Owner.me()}.{secrets.token_hex(4)}"
        self._numbers = itertools.count()
        self._release: Callable[[], object] | None = None
        # A buffer may be made ahead of time while a save makes another one.
        self._locking = threading.Lock()

    def new_path(self) -> Path:
        """Return a path for a new buffer, and make the lock that marks its maker as alive."""
        with self._locking:
            if self._release is None:
                lock = self.path / f"{self._owner}{_LOCK}"
                held = _make_locked(lock)
                # A finalizer, so that the lock is released even if close() is never called.
                self._release = weakref.finalize(self, _let_go, os.getpid(), lock, held)
        return self.path / f"{self._owner}.{next(self._numbers)}"

    def close(self) -> None:
        """Release the lock; call it after all buffers are closed. May be called twice."""
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
    """Return whether a file is a buffer rather than the lock file beside buffers."""
    return path.suffix != _LOCK


def find_buffers() -> list[Path]:
    """List the staging buffers of all users on this node, and their lock files."""
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
    """Make and lock a lock file; return the descriptor that holds the lock."""
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(path, flags, 0o600)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A process that cannot see this one may have removed the file before it was locked.
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
        # A missing file, or a link, is no lock. After any other error it may be held: count it so.
        return error.errno not in (errno.ENOENT, errno.ELOOP)
    return False
