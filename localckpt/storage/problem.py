"""Problems of files in a store, and the quarantine of bad copies.

A bad copy is renamed, never deleted, and its problem is stored in its extended attributes. A copy
that proves to be good gets its name back.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from localckpt.errors import (
    CheckpointingException,
    CorruptShardError,
    FormatVersionError,
)
from localckpt.own_folders import open_below
from localckpt.storage.failures import storage_errors
from localckpt.storage.names import CORRUPT, SHARD

__all__ = ["Problem", "ProblemKind", "put_back", "quarantine", "why_quarantined"]

logger = logging.getLogger(__name__)

ProblemKind = Literal["damaged", "other version", "other session", "unreadable", "given up"]
"""Kinds of problems; ``"given up"``: a good file that the job resumed from in vain too often."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Reason why a file cannot be used.

    Attributes:
        kind: Class of the problem.
        text: Description of the problem.
        claim: Identity of the shard from an unverified header, in words; empty if there is none.
        path: The file; ``None`` if not known yet.
    """

    kind: ProblemKind
    text: str
    claim: str = ""
    path: Path | None = None

    @classmethod
    def of(cls, error: CheckpointingException, path: Path | None = None) -> Problem:
        """Make the problem of a file from the error of its read."""
        if isinstance(error, FormatVersionError):
            return cls("other version", str(error), path=path)
        if isinstance(error, CorruptShardError):
            return cls("damaged", error.damage or str(error), error.shard, path)
        cause = error.__cause__
        text = (isinstance(cause, OSError) and cause.strerror) or str(error)
        return cls("unreadable", text, path=path)

    def __str__(self) -> str:
        return f"{self.claim} is damaged: {self.text}" if self.claim else self.text


_WHY, _SHARD, _WHY_NBYTES = "user.localckpt.why", "user.localckpt.shard", 1000
_KIND = "user.localckpt.kind"
_QUARANTINED_AGAIN = re.compile(rf"(?<={re.escape(SHARD)})\.[0-9a-f]{{8}}$")


def quarantine(path: Path, problem: Problem, *, stays: bool = False) -> bool:
    """Rename a bad file, so that it is never read again but kept for inspection.

    Args:
        path: The file.
        problem: Problem of the file.
        stays: True to add the new name and keep the old one, which a good copy is about to take.

    Returns:
        True if the file was renamed; if not, the log says why.
    """
    renamed = Path(f"{path}{CORRUPT}")
    if renamed.exists():
        # The new copy of a quarantined shard is bad, too.
        renamed = Path(f"{path}.{secrets.token_hex(4)}{CORRUPT}")
    try:
        if stays:
            os.link(path, renamed)
        else:
            os.rename(path, renamed)
    except FileNotFoundError:
        logger.info("%s is gone: another rank quarantined it, or it was removed", path)
    except OSError as error:
        # Logged only: the copy is not used in any case, and an error would end this rank alone.
        logger.error("%s is bad (%s), and could not be quarantined: %s", path, problem, error)
    else:
        logger.warning("%s is in quarantine as *%s: %s", path, CORRUPT, problem)
        # Not every file system has extended attributes; the log has the problem in any case.
        with suppress(OSError):
            told = ((_WHY, problem.text), (_SHARD, problem.claim), (_KIND, problem.kind))
            for name, text in told:
                value = text.encode(errors="replace")[:_WHY_NBYTES]
                os.setxattr(renamed, name, value, follow_symlinks=False)
        return True
    return False


def why_quarantined(path: Path) -> Problem:
    """Read the problem of a file in quarantine; earlier versions stored it as one text."""
    text = _attribute(path, _WHY) or "it was quarantined as damaged"
    kind: ProblemKind = "given up" if _attribute(path, _KIND) == "given up" else "damaged"
    return Problem(kind, text, _attribute(path, _SHARD), path)


def _attribute(path: Path, name: str) -> str:
    try:
        return os.getxattr(path, name, follow_symlinks=False).decode(errors="replace")
    except OSError:
        return ""


def put_back(path: Path) -> Path:
    """Give a file in quarantine its old name, or a similar one if that is taken.

    Returns:
        The new path.

    Raises:
        StorageError: The file cannot be renamed, and stays in quarantine.
    """
    name = _QUARANTINED_AGAIN.sub("", path.name.removesuffix(CORRUPT))
    back = path.with_name(name)
    with storage_errors("put back", path):
        rank = path.parent
        folder = open_below(rank.parent.parent, rank.parent.name, rank.name)
        try:
            try:
                # Unlike a rename, a link never replaces an existing file.
                _link(path, back, folder)
            except FileExistsError:
                back = path.with_name(f"{name.removesuffix(SHARD)}.{secrets.token_hex(4)}{SHARD}")
                _link(path, back, folder)
            for attribute in (_WHY, _SHARD, _KIND):
                with suppress(OSError):
                    there = f"/proc/self/fd/{folder}/{back.name}"
                    os.removexattr(there, attribute, follow_symlinks=False)
            os.unlink(path.name, dir_fd=folder)
            os.fsync(folder)
        finally:
            os.close(folder)
    return back


def _link(path: Path, back: Path, folder: int) -> None:
    os.link(path.name, back.name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
