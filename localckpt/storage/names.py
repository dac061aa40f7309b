"""Names of the files and folders of a store.

File names only need to differ: a piece's identity is read from its header. The folder
``root/<session>/<rank>/`` holds the files of a rank; the suffix marks unfinished, recycled and
quarantined files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from pathlib import Path
from urllib.parse import quote, unquote

from localckpt.errors import CheckpointingException, StorageError
from localckpt.ids import SHARD_KIND, Generation, ShardIdentity

SHARD = ".safetensors"
DIRTY = ".dirty"
"""Suffix of a file that is being written; such files of dead processes are removed."""
RECYCLED = ".recycled"
"""Suffix of a retired file that a later save overwrites."""
CORRUPT = ".corrupt"
"""Suffix of a file in quarantine."""

TOKEN_NAME, LOCK_NAME = "node-token", ".lock"
"""Files of the root: the node's name, and the lock of a process that starts or cleans up."""
OWNER_NAME, NOTES_NAME = ".owner", ".notes"
"""Files of a rank's folder: the process that writes there; its epoch, and trust in checkpoints."""

# With the prefix, no folder of a session is named "", "." or "..".
SESSION_PREFIX = "session-"

_SHARD_NAME = re.compile(r"(\d+)\.(\d+)\.(\d+)\.(\d+)\.safetensors")
_RECYCLED_NAME = re.compile(r"\d+\.(\d+)\.\d+\.\d+(?:\.(.+))?\.[0-9a-f]{8}\.recycled")


def url_of(given: str | os.PathLike[str]) -> str | None:
    """Return a URL as it was given, maybe as a path, which has one slash less; or ``None``."""
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", os.fspath(given), re.DOTALL)
    return None if match is None else f"{match[1]}://{match[2]}"


def local_path(given: str | os.PathLike[str]) -> Path:
    """Return an absolute path, for a later start of the program; raises StorageError for a URL."""
    if (url := url_of(given)) is not None:
        raise StorageError(
            f"{url} is a URL, and this is kept in a directory of each node, or read from one; the "
            f"checkpoints of shared storage alone may be in an object store. Nothing was made. A "
            f"directory of that name is given by its absolute path"
        )
    return Path(given).absolute()


def shared_path(given: str | os.PathLike[str]) -> Path | str:
    """Return a URL as it was given, or an absolute path, of storage that nodes share."""
    url = url_of(given)
    if url is not None and url.startswith("file://"):
        return Path(f"/{url.removeprefix('file://')}")
    return url or local_path(given)


def session_name(session_id: str) -> str:
    return f"{SESSION_PREFIX}{quote(session_id, safe='')}"


def session_of(folder: str) -> str:
    """Undo :func:`session_name`."""
    return unquote(folder.removeprefix(SESSION_PREFIX))


def shard_name(identity: ShardIdentity) -> str:
    """Return the file name of a piece; the kind of a piece that is no shard precedes the suffix."""
    epoch, sequence = identity.generation
    kind = "" if identity.is_shard else f".{identity.kind}"
    return f"{identity.iteration:012d}.{identity.rank}.{epoch}.{sequence}{kind}{SHARD}"


def shard_named(name: str) -> tuple[int, int, Generation] | None:
    """Parse iteration, rank and generation from a file's name, for messages alone."""
    match = _SHARD_NAME.match(name)
    if match is None:
        return None
    iteration, rank, epoch, sequence = map(int, match.groups())
    return iteration, rank, Generation(epoch, sequence)


def is_recycled_from(name: str, identity: ShardIdentity) -> bool:
    """Return whether a recycled file had an image of the same piece, judged by its name."""
    match = _RECYCLED_NAME.fullmatch(name)
    if match is None:
        return False
    rank, kind = match.groups(SHARD_KIND)
    return (int(rank), kind) == (identity.rank, identity.kind)


def default_root() -> Path:
    """Return the default directory of this user's store on this node."""
    return Path(f"/dev/shm/localckpt-{os.getuid()}")


def default_session() -> str:
    """Name a session in :func:`default_root`, which all programs of this user share on this node.

    The name stands for the main script (or the code of ``python -c``), its arguments and the
    working directory, so two programs never meet, and a restart finds its checkpoints. A program
    without a script, as a notebook, is a CheckpointingException.
    """
    script = getattr(sys.modules["__main__"], "__file__", None)
    command = sys.orig_argv[1:]
    if script is not None:
        path = Path(script).absolute()
        label = path.parent.name if path.stem == "__main__" else path.stem
        program = [str(path), *sys.argv[1:]]
    elif "-c" in command and "--multiprocessing-fork" not in command:
        label, program = "command", command[command.index("-c") :]
    else:
        raise CheckpointingException(
            f"the checkpoints of this program would be in {default_root()}, which all programs of "
            f"this user share, and it has no script by which they could be named (as a notebook or "
            f"a prompt): give session_id=. Nothing was made"
        )
    place = json.dumps([*program, os.getcwd()])
    return f"{label}-{hashlib.sha256(place.encode()).hexdigest()[:12]}"
