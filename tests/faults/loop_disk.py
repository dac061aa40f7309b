"""A small ext4 of its own in a file, and what is left of it when the power is cut.

The file is what the device has: what the file system has not submitted yet is not in it. A copy of
it, mounted, is the disk after the power has come back.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["DiskAfterPowerCut", "LoopDisk", "loop_disk", "old_disk"]

_NBYTES = 24 << 20
# The kernel would commit by itself every 5 s; here only who asks for it gets it.
_OPTIONS = "loop,commit=300,noinit_itable"
_MKFS = ["-q", "-F", "-b", "4096", "-J", "size=4", "-E", "lazy_itable_init=0,lazy_journal_init=0"]
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_TRIES = 20


class LoopDisk:
    """A mounted file system, and the file that it is in.

    Attributes:
        root: Where it is mounted.
    """

    def __init__(self, backing: Path, root: Path) -> None:
        self.root = root
        self._backing = backing

    def cut_power(self) -> DiskAfterPowerCut:
        """The disk as it would be found."""
        copy = self._backing.with_name("after")
        for _ in range(_TRIES):
            before = self._backing.stat().st_mtime_ns
            _copy_sparse(self._backing, copy)
            if self._backing.stat().st_mtime_ns == before:
                return DiskAfterPowerCut(copy, self.root.with_name("after"))
        pytest.fail("the device is written to all the time")

    def commit_names(self) -> None:
        """Make the names that there are durable, as the kernel does when it likes.

        Data that nobody has synced stays where it is.
        """
        fd = os.open(self.root / "unrelated", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(fd, b"x")
            os.fsync(fd)
        finally:
            os.close(fd)


class DiskAfterPowerCut:
    """The disk with the power back."""

    def __init__(self, image: Path, root: Path) -> None:
        self._image = image
        self._root = root

    @contextmanager
    def mounted(self) -> Iterator[Path]:
        """The file system after its recovery; gone after the block."""
        self._root.mkdir(exist_ok=True)
        done = _mount(self._image, self._root)
        assert done.returncode == 0, done.stderr
        try:
            yield self._root
        finally:
            _unmount(self._root)


@pytest.fixture
def loop_disk(tmp_path: Path, shm_roots: Callable[[int], list[Path]]) -> Iterator[LoopDisk]:
    """An empty ext4; skips where none can be made and mounted."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a file system")
    mkfs = shutil.which("mkfs.ext4", path=_PATH)
    if mkfs is None:
        pytest.skip("needs mkfs.ext4 (e2fsprogs)")
    # In memory, so that no other disk's speed matters.
    backing = shm_roots(1)[0] / "disk"
    with backing.open("wb") as file:
        file.truncate(_NBYTES)
    subprocess.run([mkfs, *_MKFS, str(backing)], timeout=30, check=True)
    root = tmp_path / "disk"
    root.mkdir()
    done = _mount(backing, root)
    if done.returncode:
        pytest.skip(f"cannot mount a file: {done.stderr.strip()}")
    try:
        yield LoopDisk(backing, root)
    finally:
        _unmount(root)


@contextmanager
def old_disk(kind: str, backing: Path, root: Path) -> Iterator[None]:
    """Inside, an empty ext2 or ext3 is mounted at a directory; skips where none can be made."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a file system")
    mkfs = shutil.which(f"mkfs.{kind}", path=_PATH)
    if mkfs is None:
        pytest.skip(f"needs mkfs.{kind} (e2fsprogs)")
    with backing.open("wb") as file:
        file.truncate(_NBYTES)
    subprocess.run([mkfs, "-q", "-F", "-b", "4096", str(backing)], timeout=30, check=True)
    root.mkdir()
    done = _mount(backing, root, kind=kind, options="loop")
    if done.returncode:
        pytest.skip(f"cannot mount an {kind}: {done.stderr.strip()}")
    try:
        yield
    finally:
        _unmount(root)


def _mount(
    image: Path, root: Path, *, kind: str = "ext4", options: str = _OPTIONS
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["mount", "-t", kind, "-o", options, str(image), str(root)],
        env=os.environ | {"PATH": _PATH},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def _unmount(root: Path) -> None:
    done = subprocess.run(["umount", str(root)], capture_output=True, timeout=30, check=False)
    if done.returncode:
        # Somebody still looks into it: it goes when they do.
        subprocess.run(["umount", "--lazy", str(root)], timeout=30, check=True)


def _copy_sparse(source: Path, target: Path) -> None:
    with source.open("rb") as old, target.open("wb") as new:
        size = os.fstat(old.fileno()).st_size
        new.truncate(size)
        start = 0
        while start < size:
            try:
                start = os.lseek(old.fileno(), start, os.SEEK_DATA)
            except OSError:
                break
            stop = os.lseek(old.fileno(), start, os.SEEK_HOLE)
            while start < stop:
                data = os.pread(old.fileno(), stop - start, start)
                start += os.pwrite(new.fileno(), data, start)
