"""Limits on the memory that this process can still take.

They are the memory of the node, RLIMIT_AS, and the limits of the process's cgroups (versions 1 and
2), which are those of its container. The kernel kills a process that exceeds the first or the last.
"""

from __future__ import annotations

import re
import resource
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

import psutil

from localckpt.memory.host_memory import PAGE_NBYTES

# The files of a cgroup for each version: limit, use, limit of swap, use of swap. In version 1, swap
# is counted together with memory.
_FILES = {
    1: (
        *("memory.limit_in_bytes", "memory.usage_in_bytes"),
        *("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes"),
    ),
    2: ("memory.max", "memory.current", "memory.swap.max", "memory.swap.current"),
}
_STAT = "memory.stat"
# Page cache, which the kernel frees before it kills. Files in shared memory are not among it.
_RECLAIMABLE = {
    1: ("total_active_file", "total_inactive_file"),
    2: ("active_file", "inactive_file", "slab_reclaimable"),
}
# Version 1 says no limit with a number near 2**63.
_NO_LIMIT = 1 << 62
# Address space that threads of saves reserve for their stacks and heaps without using all of it.
_THREADS_NBYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """One limit, and what those under it can still take; ``scope`` is "" for this process alone."""

    name: str
    scope: str
    available_nbytes: int


def memory_limits() -> list[MemoryLimit]:
    boot = _read("/proc/sys/kernel/random/boot_id").strip()
    limits = [MemoryLimit("memory of the node", boot, psutil.virtual_memory().available)]
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE_NBYTES
        available = max(0, limit - taken - _THREADS_NBYTES)
        limits.append(MemoryLimit(f"RLIMIT_AS, {limit / 1e6:.1f} MB", "", available))
    swap = re.search(r"^SwapFree: *(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    free_swap = 1024 * int(swap[1]) if swap else 0
    for folder, version in cgroup_folders(
        _read("/proc/self/cgroup"), _read("/proc/self/mountinfo")
    ):
        if (found := parse_cgroup(partial(_read, folder), version, free_swap)) is None:
            continue
        nbytes, available_nbytes = found
        with suppress(OSError):
            status = folder.stat()
            name = f"{folder / _FILES[version][0]}, {nbytes / 1e6:.1f} MB"
            scope = f"{boot} {status.st_dev}:{status.st_ino}"
            limits.append(MemoryLimit(name, scope, available_nbytes))
    return limits


def cgroup_folders(cgroups: str, mounts: str) -> list[tuple[Path, int]]:
    """Find the cgroups that limit a process, its own and all above, by the version of each.

    The arguments are the texts of ``/proc/self/cgroup`` and ``/proc/self/mountinfo``.
    """
    folders = []
    for line in cgroups.splitlines():
        number, controllers, path = line.split(":", 2)
        version = 2 if number == "0" and not controllers else 1
        if version == 1 and "memory" not in controllers.split(","):
            continue
        if (mount := _mount(mounts, version)) is None:
            continue
        root, mounted_at = mount
        own, cgroup = mounted_at, PurePosixPath(path)
        # In a container, the root of the mount may be the container's own cgroup, or beside it.
        if cgroup.is_relative_to(root) and ".." not in cgroup.parts:
            own /= cgroup.relative_to(root)
        folders += [(f, version) for f in (own, *own.parents) if f.is_relative_to(mounted_at)]
    return folders


def parse_cgroup(
    read: Callable[[str], str], version: int, free_swap_nbytes: int
) -> tuple[int, int] | None:
    """Compute a cgroup's limit and what is left of it; ``read`` gives the text of a file, or ""."""
    # One after the other: most cgroups have no limit, and then nothing else is read.
    numbers = (_number(read(name)) for name in _FILES[version])
    if (limit := next(numbers)) is None or limit >= _NO_LIMIT or (taken := next(numbers)) is None:
        return None
    swap_limit, swap_taken = numbers
    stat = dict(line.split()[:2] for line in read(_STAT).splitlines() if " " in line)
    reclaimable = sum(int(stat.get(name, 0)) for name in _RECLAIMABLE[version])
    available = max(0, limit - taken + reclaimable)
    if swap_limit is None or swap_taken is None:
        return limit, available + free_swap_nbytes
    left = max(0, swap_limit - swap_taken)
    if version == 1:
        return limit, min(available + free_swap_nbytes, left + reclaimable)
    return limit, available + min(free_swap_nbytes, left)


def _mount(mounts: str, version: int) -> tuple[str, Path] | None:
    """Return root and mount point of the memory controller of a version; ``None`` for none."""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.partition(" ")
        if kind == "cgroup2" if version == 2 else "memory" in options.split(" ")[-1].split(","):
            root, mounted_at = before.split()[3:5]
            # mountinfo writes blanks and backslashes in octal.
            path = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), mounted_at)
            return root, Path(path)
    return None


def _number(text: str) -> int | None:
    """Return the number in a file; ``None`` if it is not there, or is "max"."""
    return int(text) if text.strip().isdecimal() else None


def _read(*path: str | Path) -> str:
    """Return the text of a file of the kernel; empty if it cannot be read."""
    with suppress(OSError):
        return Path(*path).read_text(errors="replace")
    return ""
