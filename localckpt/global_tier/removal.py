"""Removal of checkpoints on shared storage, and the pins that keep them from it.

A pin is a file in the directory of its checkpoint, so every job and every tool sees it. It may be
set while a job prunes: a checkpoint is then either put back, or was never pinned.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from localckpt.errors import StorageError
from localckpt.global_tier.folders import PIN_NAME, RECORD_NAME, Folder, is_there
from localckpt.own_folders import file_mode
from localckpt.storage.failures import storage_errors
from localckpt.storage.write import replace_file, sync_folder

__all__ = ["pin", "put_back_if_pinned", "remove", "remove_folder", "unpin"]


def remove(folder: Folder, *, by_rename: bool) -> bool:
    """Remove a checkpoint, unless it is pinned; what is half removed is never found.

    Args:
        folder: The checkpoint.
        by_rename: Directories can be renamed at once; else its record goes first.

    Returns:
        Whether it is gone: it may have been pinned since it was decided on.

    Raises:
        StorageError: The file system refused.
    """
    with storage_errors("remove", folder.path):
        if folder.is_pinned:
            return False
        if not by_rename:
            remove_folder(folder.path)
            return True
        folder.path.rename(folder.removed)
        if put_back_if_pinned(folder):
            return False
        remove_folder(folder.removed)
        return True


def put_back_if_pinned(folder: Folder) -> bool:
    """Give a checkpoint its name again that was pinned while it was on its way out.

    Returns:
        Whether it was, and is a checkpoint again.

    Raises:
        OSError: The file system refused.
    """
    removed = folder.removed
    if not (is_there(removed / PIN_NAME) and is_there(removed / RECORD_NAME)):
        return False
    removed.rename(folder.path)
    return True


def remove_folder(path: Path) -> None:
    """Remove a directory, its record first: without that it is no checkpoint.

    Of a link in its place the link is removed, and nothing of what it leads to.

    Raises:
        OSError: The file system refused.
    """
    if path.is_symlink():
        path.unlink()
        return
    (path / RECORD_NAME).unlink(missing_ok=True)
    shutil.rmtree(path)


def pin(folder: Folder) -> None:
    """Have every job keep a checkpoint until it is unpinned, whatever its retention is.

    Raises:
        StorageError: The file system refused, or a job is removing the checkpoint just now.
    """
    with storage_errors("pin", folder.path):
        replace_file(folder.path / PIN_NAME, b"pinned\n", file_mode(folder.path))
        sync_folder(folder.path)
    if not (folder.is_pinned and folder.has_record):
        raise StorageError(
            f"{folder.path} was not pinned in time: a job is removing it. Look whether it is still "
            f"there, and pin it again"
        )


def unpin(folder: Folder) -> None:
    """Leave a checkpoint to the retention of the jobs that save; nothing if it is not pinned.

    Raises:
        StorageError: The file system refused.
    """
    with storage_errors("unpin", folder.path):
        (folder.path / PIN_NAME).unlink(missing_ok=True)
        sync_folder(folder.path)
