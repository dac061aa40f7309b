"""Problems of files in a store, and the quarantine of bad copies.

A bad copy is renamed, never deleted, and carries along what was wrong with it. One that is found to
be good after all gets its name back.
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
from localckpt.storage.failures import storage_errors
from localckpt.storage.names import CORRUPT, SHARD
from localckpt.storage.write import sync_folder

__all__ = ["Problem", "ProblemKind", "put_back", "quarantine", "why_quarantined"]

logger = logging.getLogger(__name__)

ProblemKind = Literal["damaged", "other version", "other session", "unreadable"]


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a file cannot be used.

    Attributes:
        kind: The class of the problem.
        text: What is wrong with the file.
        claim: What the file says that it is, where that may be a part of the damage.
        path: The file; ``None`` where that is not known yet.
    """

    kind: ProblemKind
    text: str
    claim: str = ""
    path: Path | None = None

    @classmethod
    def of(cls, error: CheckpointingException, path: Path | None = None) -> Problem:
        """The problem that an error tells of."""
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
_QUARANTINED_AGAIN = re.compile(rf"(?<={re.escape(SHARD)})\.[0-9a-f]{{8}}$")


def quarantine(path: Path, problem: Problem, *, stays: bool = False) -> bool:
    """Rename a bad file, so that it is not found again but can be looked at.

    Args:
        path: The file.
        problem: What is wrong with it.
        stays: Give it a second name instead, since a good one is about to take its name.

    Returns:
        Whether it was done; if not, the log says why.
    """
    renamed = Path(f"{path}{CORRUPT}")
    if renamed.exists():
        # A shard that got a new copy, which is bad too.
        renamed = Path(f"{path}.{secrets.token_hex(4)}{CORRUPT}")
    try:
        if stays:
            os.link(path, renamed)
        else:
            os.rename(path, renamed)
    except FileNotFoundError:
        logger.info("%s is gone: another rank quarantined it, or it was removed", path)
    except OSError as error:
        # The copy is not used in any case; one rank that raised here would leave the others alone.
        logger.error("%s is bad (%s), and could not be quarantined: %s", path, problem, error)
    else:
        logger.warning("%s is in quarantine as *%s: %s", path, CORRUPT, problem)
        # Not every file system has attributes, and the log has it in any case.
        with suppress(OSError):
            for name, text in ((_WHY, problem.text), (_SHARD, problem.claim)):
                value = text.encode(errors="replace")[:_WHY_NBYTES]
                os.setxattr(renamed, name, value, follow_symlinks=False)
        return True
    return False


def why_quarantined(path: Path) -> Problem:
    """Read what was wrong with a file in quarantine; earlier versions noted it in one text."""
    text = _attribute(path, _WHY) or "it was quarantined as damaged"
    return Problem("damaged", text, _attribute(path, _SHARD), path)


def _attribute(path: Path, name: str) -> str:
    try:
        return os.getxattr(path, name, follow_symlinks=False).decode(errors="replace")
    except OSError:
        return ""


def put_back(path: Path) -> Path:
    """Give a file in quarantine its name again, or one like it if that is taken.

    Returns:
        The name.

    Raises:
        StorageError: It cannot be renamed; it is where it was.
    """
    name = _QUARANTINED_AGAIN.sub("", path.name.removesuffix(CORRUPT))
    back = path.with_name(name)
    with storage_errors("put back", path):
        try:
            # Unlike a rename, this never takes the place of another shard.
            os.link(path, back)
        except FileExistsError:
            back = path.with_name(f"{name.removesuffix(SHARD)}.{secrets.token_hex(4)}{SHARD}")
            os.link(path, back)
        for name in (_WHY, _SHARD):
            with suppress(OSError):
                os.removexattr(back, name, follow_symlinks=False)
        path.unlink()
        sync_folder(path.parent)
    return back
