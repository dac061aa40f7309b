"""Checks, before the first save, that a directory can keep checkpoints, and how many."""

from __future__ import annotations

import errno
import logging
import mmap
import os
from collections.abc import Collection, Mapping
from pathlib import Path

from localckpt.errors import StorageError
from localckpt.memory.host_memory import PAGE_NBYTES
from localckpt.storage.failures import storage_errors
from localckpt.storage.open_file import open_owned
from localckpt.storage.write import reserve, sync_folder, write_range

__all__ = ["IN_MEMORY", "check_shared_memory", "check_space", "file_system", "try_out"]

logger = logging.getLogger(__name__)

# No whole page, as most images are none.
_PROBE_NBYTES = 1000

IN_MEMORY = frozenset({"tmpfs", "ramfs"})
"""File systems whose files are gone after a reboot."""


def try_out(folder: Path, suffix: str) -> bool:
    """Do once what every save does with a file, by the same functions.

    It reserves space, writes, cuts the file to its size, fsyncs it, renames it, and fsyncs the
    directory.

    Args:
        folder: Where saves will do it.
        suffix: Ends the name of the file, so that it is removed later if this process is killed.

    Returns:
        Whether files there can be written past the page cache.

    Raises:
        StorageError: The directory does not take it.
    """
    path, renamed = folder / f"probe{suffix}", folder / f"probed{suffix}"
    with storage_errors("write to", folder):
        try:
            direct = True
            try:
                _write_page(path, os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                direct = False
                _write_page(path, 0)
            os.rename(path, renamed)
            sync_folder(folder)
        finally:
            path.unlink(missing_ok=True)
            renamed.unlink(missing_ok=True)
    return direct


def file_system(path: Path) -> str:
    """The kind of file system that a path is on, as mount names it; empty if it is not known."""
    with storage_errors("look at", path):
        device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            before, _, after = line.partition(" - ")
            if before.split()[2] == wanted:
                return after.split()[0]
    return ""


def check_space(
    folder: Path,
    status: os.statvfs_result,
    there: Mapping[int, int],
    images: Collection[int],
    checkpoints: int,
    ranks: int,
) -> None:
    """Compare what a rank is going to keep with what its file system has.

    Args:
        folder: Where it keeps it.
        status: What its file system had before ``there`` was looked at.
        there: What the session has there by now, of all ranks: bytes by inode. Saves use it again,
            or remove it.
        images: Sizes of the images that it keeps of each checkpoint, in bytes.
        checkpoints: How many there will be at once.
        ranks: How many ranks of the job share the file system; if they save as much together as
            there is no room for, this is logged.

    Raises:
        StorageError: There is no room for what this rank alone will keep.
    """
    needed, files = checkpoints * sum(images), checkpoints * len(images)
    free = status.f_bavail * status.f_frsize
    had = sum(there.values())
    # Some file systems have no fixed number of files, and say 0.
    if status.f_files and files > len(there) + status.f_favail:
        raise StorageError(
            f"{folder} has room for {status.f_favail} more files, and {checkpoints} checkpoints of "
            f"{len(images)} shards will be kept there: remove files, or choose a file system with "
            f"more inodes. Checkpoints saved before are as they were"
        )
    if needed > free + had:
        raise StorageError(
            f"{folder} has {free / 1e6:.1f} MB free, and {checkpoints} checkpoints of "
            f"{sum(images) / 1e6:.1f} MB will be there at once: free space, lower keep_last, or "
            f"choose a larger directory. Checkpoints saved before are as they were"
        )
    if ranks * needed > free + had:
        logger.warning(
            "%s has %.1f MB free: if all %d ranks of this node keep %d checkpoints of %.1f MB, "
            "there is no room for the last",
            folder,
            free / 1e6,
            ranks,
            checkpoints,
            sum(images) / 1e6,
        )


def check_shared_memory(
    folder: Path, status: os.statvfs_result, had: int, sizes: Collection[int], buffers: int
) -> None:
    """Compare the staging buffers of a rank with the shared memory there is.

    Args:
        folder: Where they are.
        status: What it had before ``had`` was looked at.
        had: The bytes of those that are there by now.
        sizes: The bytes of one buffer for each image of a checkpoint.
        buffers: How many there will be of each.

    Raises:
        StorageError: There is no room for all.
    """
    free = status.f_bavail * status.f_frsize
    if buffers * sum(sizes) > free + had:
        raise StorageError(
            f"{folder} has {free / 1e6:.1f} MB free, and {buffers} staging buffers of "
            f"{sum(sizes) / 1e6:.1f} MB are kept there for the worker process: make it larger "
            f"(in a container often --shm-size), lower num_buffers, or use async_worker='thread'. "
            f"Checkpoints saved before are as they were"
        )


def _write_page(path: Path, flag: int) -> None:
    with open_owned(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | flag) as file:
        fd = file.fileno()
        direct = bool(flag & os.O_DIRECT)
        reserve(fd, _PROBE_NBYTES)
        # Not closed by hand: an error holds views of it until it has been handled.
        page = memoryview(mmap.mmap(-1, PAGE_NBYTES))
        write_range(fd, page, 0, _PROBE_NBYTES, direct=direct)
        os.ftruncate(fd, _PROBE_NBYTES)
        os.fsync(fd)
