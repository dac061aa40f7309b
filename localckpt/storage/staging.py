"""Whether somebody still uses a staging buffer in shared memory.

Its name tells the process that made it. Shared memory may be common to containers whose processes
do not see each other, or outlive them: so the maker also holds a lock on the file while it lives.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
from pathlib import Path

from localckpt.storage.names import STAGING_PREFIX
from localckpt.storage.owner import Owner, Running

__all__ = ["hold", "is_live", "new_prefix", "remove_orphans"]

logger = logging.getLogger(__name__)


def new_prefix() -> str:
    """Begins the names of one store's buffers; no other store has it."""
    return f"{STAGING_PREFIX}{Owner.me()}.{secrets.token_hex(4)}."


def hold(fd: int) -> None:
    """Say that a buffer is used, for as long as this open file is open in some process."""
    fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)


def is_live(path: Path, running: Running) -> bool | None:
    """Whether the process that made a buffer may still run; ``None`` if it is no buffer."""
    owner = Owner.parse(path.name.removeprefix(STAGING_PREFIX).partition(".")[0])
    if owner is None:
        return None
    return owner in running or _is_held(path)


def remove_orphans(shared_memory: Path) -> None:
    """Remove the staging buffers of this user whose processes are gone."""
    running = Running()
    for path in shared_memory.glob(f"{STAGING_PREFIX}*"):
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


def _is_held(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Not only by closing it, which the system may refuse.
            fcntl.flock(fd, fcntl.LOCK_UN)
        finally:
            os.close(fd)
    except OSError as error:
        # Unless it is gone, or is a link: somebody holds it, or the system does not say.
        return error.errno not in (errno.ENOENT, errno.ELOOP)
    return False
