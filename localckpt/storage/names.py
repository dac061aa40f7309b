"""Names of the files and folders of a store.

Names only tell files apart: what a shard is, is read from its header. ``root/<session>/<rank>/``
holds what a rank keeps; what is unfinished, retired or damaged ends differently.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import quote, unquote

from localckpt.errors import StorageError
from localckpt.ids import Generation, ShardIdentity

__all__ = [
    "CORRUPT",
    "DIRTY",
    "EPOCH_NAME",
    "LOCK_NAME",
    "OWNER_NAME",
    "RECYCLED",
    "RECYCLED_BEFORE",
    "SESSION_PREFIX",
    "SHARD",
    "STAGING_PREFIX",
    "TOKEN_NAME",
    "local_path",
    "session_name",
    "session_of",
    "shard_name",
    "shard_named",
]

SHARD = ".safetensors"
DIRTY = ".dirty"
"""Ending of whatever is being written; what a dead process left of it is removed."""
RECYCLED = ".recycled"
"""Ending of a file that no shard needs, and a later save overwrites."""
RECYCLED_BEFORE = ".spare"
"""Ending that such files had in earlier versions; no save overwrites those any more."""
CORRUPT = ".corrupt"
"""Ending of a file in quarantine."""

TOKEN_NAME, LOCK_NAME = "node-token", ".lock"
"""Files of the root: the node's own name, and the lock of whoever starts or cleans up."""
OWNER_NAME, EPOCH_NAME = ".owner", ".epoch"
"""Files of a rank's folder: the process that writes there, and the epoch that last began."""

STAGING_PREFIX = "localckpt-staging-"
"""Beginning of the names of staging buffers in shared memory."""
# So that no session's name can be empty, "." or "..".
SESSION_PREFIX = "session-"

_SHARD_NAME = re.compile(r"(\d+)\.(\d+)\.(\d+)\.(\d+)\.safetensors")


def local_path(given: str | os.PathLike[str]) -> Path:
    """Return ``given`` as a path, unless it is a URL, which would become a directory here.

    Raises:
        StorageError: It is a URL.
    """
    path = Path(given)
    # A path has lost one of the two slashes.
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)):
        raise StorageError(
            f"{os.fspath(given)} is a URL, and localckpt keeps checkpoints in directories: mount "
            f"the storage on every node (mountpoint-s3, gcsfuse, NFS, a parallel file system) and "
            f"give its directory; or let a job of its own copy finished checkpoints there. "
            f"Nothing was made. A directory of that name is given by its absolute path"
        )
    return path


def session_name(session_id: str) -> str:
    """The folder of a session."""
    return f"{SESSION_PREFIX}{quote(session_id, safe='')}"


def session_of(folder: str) -> str:
    """The inverse of :func:`session_name`."""
    return unquote(folder.removeprefix(SESSION_PREFIX))


def shard_name(identity: ShardIdentity) -> str:
    """The file of a shard, or of another piece, whose kind stands before :data:`SHARD`."""
    epoch, sequence = identity.generation
    kind = "" if identity.is_shard else f".{identity.kind}"
    return f"{identity.iteration:012d}.{identity.rank}.{epoch}.{sequence}{kind}{SHARD}"


def shard_named(name: str) -> tuple[int, int, Generation] | None:
    """Iteration, rank and generation that the beginning of a file's name speaks of.

    For people who ask about a file that can no longer tell what it was; nothing is decided by it.
    """
    match = _SHARD_NAME.match(name)
    if match is None:
        return None
    iteration, rank, epoch, sequence = map(int, match.groups())
    return iteration, rank, Generation(epoch, sequence)
