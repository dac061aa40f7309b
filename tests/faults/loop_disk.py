"""A small file system of its own in a file, and what is left of it when the power is cut.

The file is what the device has; a copy of it, mounted, is the disk when the power is back.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.programs import run

__all__ = ["LoopDisk", "new_disk"]

_NBYTES = 40 << 20
# The kernel would commit by itself every 5 s; here only who asks for it gets it.
_OPTIONS = {"ext4": "loop,commit=300,noinit_itable"}
_MKFS = {"ext4": ["-J", "size=4", "-E", "lazy_itable_init=0,lazy_journal_init=0"]}
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_TRIES = 20


class LoopDisk:
    """An ext4 that is mounted at ``root``, and the file that it is in."""

    def __init__(self, backing: Path, root: Path) -> None:
        self.root = root
        self._backing = backing

    def cut_power(self) -> Path:
        """The disk as it would be found, in a file."""
        copy = self._backing.with_name("after")
        for _ in range(_TRIES):
            before = self._backing.stat().st_mtime_ns
            shutil.copyfile(self._backing, copy)
            if self._backing.stat().st_mtime_ns == before:
                return copy
        pytest.fail("the device is written to all the time")

    @contextmanager
    def after(self, copy: Path) -> Iterator[Path]:
        """The file system after its recovery; gone after the block."""
        root = self.root.with_name("after")
        root.mkdir(exist_ok=True)
        done = _mount("ext4", copy, root)
        assert done.returncode == 0, done.stderr
        try:
            yield root
        finally:
            _unmount(root)

    def commit_names(self) -> None:
        """Make names durable, as the kernel does when it likes, and no data."""
        with (self.root / "unrelated").open("ab", buffering=0) as file:
            file.write(b"x")
            os.fsync(file)


@contextmanager
def new_disk(kind: str, backing: Path, root: Path) -> Iterator[None]:
    """Inside, an empty ext2, ext3 or ext4 is mounted at a directory; skips where none can be."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a file system")
    mkfs = shutil.which(f"mkfs.{kind}", path=_PATH)
    if mkfs is None:
        pytest.skip(f"needs mkfs.{kind} (e2fsprogs)")
    with backing.open("wb") as file:
        file.truncate(_NBYTES)
    options = ["-q", "-F", "-b", "4096", *_MKFS.get(kind, [])]
    subprocess.run([mkfs, *options, str(backing)], timeout=30, check=True)
    root.mkdir()
    done = _mount(kind, backing, root)
    if done.returncode:
        pytest.skip(f"cannot mount an {kind}: {done.stderr.strip()}")
    try:
        yield
    finally:
        _unmount(root)


def _mount(kind: str, image: Path, root: Path) -> subprocess.CompletedProcess[str]:
    options, env = _OPTIONS.get(kind, "loop"), os.environ | {"PATH": _PATH}
    return run("mount", "-t", kind, "-o", options, image, root, env=env)


def _unmount(root: Path) -> None:
    if run("umount", root).returncode:
        # Somebody still looks into it: it goes when they do.
        subprocess.run(["umount", "--lazy", str(root)], timeout=30, check=True)
