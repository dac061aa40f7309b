"""The small files of a store beside its shards: the node's name, a folder's owner, its epoch."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path

from localckpt.errors import MismatchError
from localckpt.lineage import Lineage
from localckpt.state_dict.layout import PAGE_NBYTES
from localckpt.storage.names import EPOCH_NAME, OWNER_NAME
from localckpt.storage.open_file import open_owned
from localckpt.storage.owner import Owner

__all__ = ["epoch_note", "owner_of", "read_note", "write_note"]


def owner_of(folder: Path) -> Owner | None:
    """The process that has taken a rank's folder, alive or not."""
    process, _, _ = read_note(folder / OWNER_NAME).partition("\n")
    return Owner.parse(process)


def epoch_note(folder: Path) -> tuple[str, Lineage | None]:
    """The number of the last epoch that began in a rank's folder, as text, and its lineage.

    Earlier versions noted the number alone. A lineage that cannot be read counts as none: headers
    tell it, too.
    """
    number, _, told = read_note(folder / EPOCH_NAME).partition("\n")
    try:
        return number, Lineage.from_json(json.loads(told)) if told else None
    except (MismatchError, ValueError, RecursionError):
        return number, None


def write_note(path: Path, text: str) -> None:
    """Replace a note; never written through a link in its place."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    try:
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.rename(fresh, path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def read_note(path: Path) -> str:
    """The text of a note; empty for what is no plain file, or not there."""
    try:
        file = open_owned(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.EISDIR):
            return ""
        raise
    with file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return ""
        return os.read(file.fileno(), PAGE_NBYTES).decode(errors="replace")
