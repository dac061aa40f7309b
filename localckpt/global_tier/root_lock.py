"""Lock of a root on shared storage: one job at a time saves there, for as long as it lives."""

from __future__ import annotations

import errno
import logging
import socket
from pathlib import Path

from filelock import FileLock, Timeout

from localckpt.errors import StorageError
from localckpt.global_tier.folders import LOCK_NAME
from localckpt.own_folders import file_mode, lock_holder, make_own_folders, require_own_file
from localckpt.storage.failures import storage_errors
from localckpt.storage.owner import Owner
from localckpt.storage.write import replace_file

__all__ = ["RootLock"]

logger = logging.getLogger(__name__)

# What file systems answer that cannot lock files; anything else is an error.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
_OWNER_NAME = ".localckpt.owner"
# Storage may take that long to see that the node of the job before is gone.
_PATIENCE_S = 120.0


class RootLock:
    """A lock that the operating system gives back when its process ends, however it ends.

    Args:
        named: The directory that the user named.
        below: Names of the directories below it, the last of which is locked; all are made when the
            lock is taken.
    """

    def __init__(self, named: Path, *below: str) -> None:
        self._named, self._below = named, below
        self._root = named.joinpath(*below)
        self._lock: FileLock | None = None
        self._was_there = False
        # What this process has noted beside the lock that it has; empty without.
        self._noted = ""

    def take(self, timeout_s: float) -> None:
        """Take it, if this process has not.

        Where the file system has no locks there is none to take, which is logged.

        Raises:
            StorageError: Another job has it; the message names the process. Or as :meth:`look`.
        """
        self.look()
        if self._lock is not None:
            return
        self.require_own()
        lock = FileLock(self._root / LOCK_NAME, mode=file_mode(self._root), thread_local=False)
        try:
            try:
                lock.acquire(timeout=0)
            except Timeout:
                patience_s = min(timeout_s, _PATIENCE_S)
                logger.warning(
                    "%s is locked (%s): waiting %g s for it", self._root, self._owner(), patience_s
                )
                lock.acquire(timeout=patience_s)
        except Timeout:
            raise StorageError(
                f"another job saves into {self._root} ({self._owner()}): give each its own root "
                f"or session_id, or end the other. Nothing was changed"
            ) from None
        except (NotImplementedError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
                with storage_errors("lock", self._root):
                    raise
            logger.warning(
                "%s has no locks, so nothing keeps two jobs from saving there: %s",
                self._root,
                error,
            )
        else:
            try:
                with storage_errors("write to", self._root):
                    text = f"process {Owner.me()} on {socket.gethostname()}"
                    replace_file(self._root / _OWNER_NAME, text.encode(), file_mode(self._root))
                    self._noted = text
            except BaseException:
                # Else it lives as long as the error does.
                lock.release()
                raise
        self._lock, self._was_there = lock, True

    def look(self) -> None:
        """Check the directories, if they are there; once they were, they must be there still.

        Raises:
            StorageError: They are not, as on nodes without the mount: what is saved or begun anew
                there would be lost. Or other users can write there.
        """
        with storage_errors("read", self._root):
            is_there = self._root.exists()
            noted = self._root / _OWNER_NAME
            is_kept = not self._noted or (noted.exists() and noted.read_text() == self._noted)
        if self._was_there and not (is_there and is_kept):
            raise StorageError(
                f"{self._root} was removed, emptied or unmounted while the job ran: mount it "
                f"again, or restart the job if it is to begin anew there. Nothing was changed"
            )
        self._was_there = is_there
        if is_there:
            self.require_own()

    def require_own(self) -> None:
        """Make the directories, and check that only this user and its groups can write there.

        Raises:
            StorageError: Other users can, or a directory cannot be made.
        """
        with storage_errors("use", self._root):
            make_own_folders(
                self._named,
                *self._below,
                shares=True,
                may_be_sticky=bool(self._below),
            )
            require_own_file(self._root / LOCK_NAME)

    @property
    def is_held(self) -> bool:
        """True while this process may write to the root."""
        return self._lock is not None

    def release(self) -> None:
        """Give it back."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None
            self._noted = ""

    def _owner(self) -> str:
        try:
            noted = (self._root / _OWNER_NAME).read_text(errors="replace")
        except OSError as error:
            noted = f"which one is not known: {error}"
        return f"{noted}; {lock_holder(self._root / LOCK_NAME)}"
