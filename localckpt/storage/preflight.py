"""Checks before the first save: a directory that can be written, and room on disk and memory."""

from __future__ import annotations

import errno
import logging
import mmap
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from localckpt.errors import StorageError
from localckpt.ids import SHARD_KIND, Group
from localckpt.memory.host_memory import PAGE_NBYTES
from localckpt.memory.limits import MemoryLimit
from localckpt.storage.failures import storage_errors
from localckpt.storage.files import open_owned
from localckpt.storage.write import reserve, sync_folder, write_range

logger = logging.getLogger(__name__)

# Not a whole page, as the size of most images is no multiple of a page.
_PROBE_NBYTES = 1000

IN_MEMORY = frozenset({"tmpfs", "ramfs"})
"""File systems whose files are gone after a reboot."""


# Memory that is left to training beside a buffer that saves could do without.
_SPARE_NBYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Memory that one rank's saves take, ``had_nbytes`` of it already, and the limits on it.

    In ``least_nbytes`` an image can be staged in pieces; 0 if it cannot.
    """

    nbytes: int
    buffers: int
    kept: int
    had_nbytes: int
    limits: list[MemoryLimit]
    least_nbytes: int = 0

    def to_json(self) -> list[Any]:
        return list(astuple(self))

    @classmethod
    def from_json(cls, fields: list[Any]) -> MemoryNeeds:
        nbytes, buffers, kept, had_nbytes, limits, least_nbytes = fields
        of_memory = [MemoryLimit(*of) for of in limits]
        return cls(nbytes, buffers, kept, had_nbytes, of_memory, least_nbytes)


def plan_buffers(
    needs: Sequence[MemoryNeeds], protection: Mapping[int, Group]
) -> tuple[int, int, str]:
    """Choose the number of staging buffers for each image, as many as there is memory for.

    Returns also the most bytes of a buffer, 0 unless images are staged in pieces, and what the
    saves take and what there is of the scarcest memory. Raises StorageError if there is none for
    one buffer, so that the kernel would end a process.
    """
    images, counts = [of.nbytes for of in needs], [1] * len(needs)
    for owner, group in protection.items():
        if group.kind == SHARD_KIND:
            for keeper in {*group.ranks} - {owner}:
                images[keeper] += needs[owner].nbytes
                counts[keeper] += 1
    shared: dict[str, list[tuple[int, MemoryLimit]]] = {}
    for rank, of_rank in enumerate(needs):
        for limit in of_rank.limits:
            shared.setdefault(limit.scope or f"rank {rank}", []).append((rank, limit))
    for buffers in range(min(of.buffers for of in needs), 0, -1):
        plans = [_plan(buffers, sharing, needs, images) for sharing in shared.values()]
        left_nbytes, text = min(plans)
        if left_nbytes >= (_SPARE_NBYTES if buffers > 1 else 0):
            break
    if left_nbytes >= 0:
        return buffers, 0, text
    most_nbytes = min(_share(sharing, needs, counts) for sharing in shared.values())
    least_nbytes = [of.least_nbytes for of in needs]
    is_copied = all(group.kind == SHARD_KIND for group in protection.values())
    if is_copied and all(least_nbytes) and most_nbytes >= max(least_nbytes):
        return 1, most_nbytes, f"{text}: each image is staged in {most_nbytes / 1e6:.1f} MB"
    raise StorageError(
        f"{text}: raise the limit, spread the state over more nodes, or keep fewer checkpoints "
        f"in memory (keep_last, retention). On disk images are staged in pieces, if each has "
        f"{max(least_nbytes) / 1e6:.1f} MB and not {most_nbytes / 1e6:.1f}, and neither check, "
        f"check_replicas nor computed pieces (repl_strategy) need it whole. Nothing was saved, and "
        f"checkpoints saved before are as they were"
    )


def _share(
    sharing: Sequence[tuple[int, MemoryLimit]],
    needs: Sequence[MemoryNeeds],
    counts: Sequence[int],
) -> int:
    """Return the bytes for each image of the ranks that share a memory."""
    ranks = [rank for rank, _ in sharing]
    available_nbytes = min(limit.available_nbytes for _, limit in sharing)
    had_nbytes = sum(needs[rank].had_nbytes for rank in ranks)
    return (available_nbytes + had_nbytes) // sum(counts[rank] for rank in ranks)


def _plan(
    buffers: int,
    sharing: Sequence[tuple[int, MemoryLimit]],
    needs: Sequence[MemoryNeeds],
    images: Sequence[int],
) -> tuple[int, str]:
    """Return the bytes that ranks leave of the memory that they share, and a text that says so."""
    ranks = [rank for rank, _ in sharing]
    needed = sum(max(0, (needs[r].kept + buffers) * images[r] - needs[r].had_nbytes) for r in ranks)
    limit = min((limit for _, limit in sharing), key=lambda limit: limit.available_nbytes)
    return limit.available_nbytes - needed, (
        f"saves of rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} take "
        f"{needed / 1e6:.1f} MB more memory, with {buffers} staging buffers for each image, and "
        f"{limit.available_nbytes / 1e6:.1f} MB are left ({limit.name})"
    )


def try_out(folder: Path, suffix: str) -> bool:
    """Write and remove a probe file as a save does; return whether O_DIRECT works there.

    By its suffix the file is removed later if this process is killed. Raises StorageError.
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
    """Return the type of a path's file system, as mount names it; empty if unknown."""
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
    """Check that a file system has room for a rank's checkpoints; raises StorageError if not.

    ``there`` has the bytes of all image files, which later saves reuse or remove; ``status`` was
    taken before. No room for those of that many ``ranks`` is a warning.
    """
    needed, files = checkpoints * sum(images), checkpoints * len(images)
    free = status.f_bavail * status.f_frsize
    had = sum(there.values())
    # f_files is 0 on file systems without a fixed number of inodes.
    if status.f_files and files > len(there) + status.f_favail:
        raise StorageError(
            f"{folder} has room for {status.f_favail} more files, and {checkpoints} checkpoints of "
            f"{len(images)} shards will be kept there: remove files, or choose a file system with "
            f"more inodes. Checkpoints saved before are as they were"
        )
    if needed > free + had:
        raise StorageError(
            f"{folder} has {free / 1e6:.1f} MB free, and {checkpoints} checkpoints of "
            f"{sum(images) / 1e6:.1f} MB will be there at once: free space, keep fewer of them "
            f"(keep_last, retention), or choose a larger directory. Checkpoints saved before are "
            f"as they were"
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


def _write_page(path: Path, flag: int) -> None:
    with open_owned(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | flag) as file:
        fd = file.fileno()
        direct = bool(flag & os.O_DIRECT)
        reserve(fd, _PROBE_NBYTES)
        # Freed with its last view: closing it raises while an error's traceback holds views.
        page = memoryview(mmap.mmap(-1, PAGE_NBYTES))
        write_range(fd, page, 0, _PROBE_NBYTES, direct=direct)
        os.ftruncate(fd, _PROBE_NBYTES)
        os.fsync(fd)
