"""What saves and drains leave under a root on shared storage that were never committed."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from pathlib import Path

from localckpt.errors import StorageError
from localckpt.global_tier.folders import Folder, Leftover, folders_in
from localckpt.global_tier.removal import put_back_if_pinned, remove_folder

__all__ = ["remove_leftovers", "try_to_remove"]

logger = logging.getLogger(__name__)


def remove_leftovers(root: Path, but: Collection[Path], *, atomic_rename: bool) -> None:
    """Remove what was never committed, and give pinned checkpoints their names again.

    What a drain has left stays until something newer is there: the next attempt goes on from it.

    Args:
        root: Directory of the session, which is locked: no other job saves there.
        but: What this job is writing.
        atomic_rename: Whether saves are renamed when they are committed.
    """
    try:
        folders, leftovers = folders_in(root)
        newest = _newest_for(leftovers, folders)
        paths = [
            leftover.path
            for leftover in leftovers
            if not _is_put_back(leftover)
            and not (leftover.is_drain and leftover.folder.iteration > newest)
        ]
        if not atomic_rename:
            paths += [folder.path for folder in folders if not folder.has_record]
    except StorageError as error:
        logger.warning("what was never committed stays for now: %s", error)
        return
    for path in paths:
        if path not in but:
            logger.info("removing %s, which is no checkpoint", path)
            try_to_remove(path)


def try_to_remove(path: Path) -> None:
    """Remove what is no checkpoint; what cannot go now goes at a later save."""
    try:
        remove_folder(path)
    except OSError as error:
        logger.warning("%s could not be removed, and will be at a later save: %s", path, error)


def _newest_for(leftovers: Sequence[Leftover], folders: Sequence[Folder]) -> int:
    """Highest iteration that is committed, if there are drains to compare with; else -1."""
    if not any(leftover.is_drain for leftover in leftovers):
        return -1
    return max((folder.iteration for folder in folders if folder.has_record), default=-1)


def _is_put_back(leftover: Leftover) -> bool:
    """Give a checkpoint its name again that was pinned when a job that ended was removing it."""
    try:
        if leftover.path != leftover.folder.removed or not put_back_if_pinned(leftover.folder):
            return False
    except OSError as error:
        logger.warning("%s is pinned, and cannot be put back yet: %s", leftover.path, error)
    return True
