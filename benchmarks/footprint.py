"""How much memory a process and its children hold, and the most they held in a while."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

__all__ = ["family_bytes", "sampled_peak", "status_bytes"]

# Often enough to see a buffer that is held while it is written, and cheap beside a measurement.
_INTERVAL_S = 0.02


def status_bytes(name: str, pid: int | None = None) -> int:
    """A field of the kernel's own account of a process."""
    for line in Path(f"/proc/{pid or 'self'}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/{pid or 'self'}/status has no {name}")


def family_bytes() -> int:
    """Private memory of this process and its children, and shared memory counted once."""
    me = psutil.Process()
    total = sum(_private_bytes(process.pid) for process in [me, *me.children(recursive=True)])
    usage = os.statvfs("/dev/shm")
    return total + (usage.f_blocks - usage.f_bfree) * usage.f_frsize


def _private_bytes(pid: int) -> int:
    try:
        return status_bytes("RssAnon", pid)
    except (FileNotFoundError, ProcessLookupError, RuntimeError):
        return 0  # it ended in the meantime


@contextmanager
def sampled_peak() -> Iterator[list[int]]:
    """Its only element is the largest :func:`family_bytes` since entering."""
    peak, stop = [family_bytes()], threading.Event()

    def sample() -> None:
        while not stop.wait(_INTERVAL_S):
            peak[0] = max(peak[0], family_bytes())

    thread = threading.Thread(target=sample, name="memory-sampler")
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()
