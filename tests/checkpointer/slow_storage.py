"""Storage of this process that is slow, or hangs, as long as a file is there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["slow_down"]

_BY_PATH = ("open", "rename", "unlink", "mkdir", "rmdir")
_BY_FD = ("fsync", "pwrite")
_DURABLE = ("fsync",)


def slow_down(root: Path, flag: Path, seconds: float, *, hangs: bool) -> None:
    """Have system calls below a directory take longer while ``flag`` is there.

    Args:
        root: The directory.
        flag: A file elsewhere.
        seconds: How much longer each call takes.
        hangs: Whether it is all calls that change something; else those that make it durable.
    """

    def is_slow(place: Any) -> bool:
        path = os.readlink(f"/proc/self/fd/{place}") if isinstance(place, int) else str(place)
        return path.startswith(str(root)) and flag.exists()

    def slowed(call: Callable[..., Any]) -> Callable[..., Any]:
        def slow(place: Any, *args: Any, **options: Any) -> Any:
            if is_slow(place):
                time.sleep(seconds)
            return call(place, *args, **options)

        return slow

    for name in (*_BY_PATH, *_BY_FD) if hangs else _DURABLE:
        setattr(os, name, slowed(getattr(os, name)))
