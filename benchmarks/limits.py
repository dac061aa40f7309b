"""What the machine can do at best: one copy, one write, one read of the same bytes.

Nothing here comes from the package, so that a mistake in it cannot be in both sides of a ratio.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

__all__ = [
    "HugeBuffer",
    "RecycledFile",
    "drop_from_page_cache",
    "read_direct_s",
    "read_warm_into_new_memory_s",
    "read_warm_s",
    "settle",
]

_HUGE_PAGE = 2 << 20
_MADV_POPULATE_WRITE = 23  # linux/mman.h, since 5.14
_COPY_PIECE = 8 << 20
_WRITE_BLOCK = 16 << 20
_READ_PIECE = 4 << 20
_SECTOR = 4096


class HugeBuffer:
    """Private memory on 2 MiB pages, faulted in once."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._map = mmap.mmap(
            -1, _round_up(nbytes, _HUGE_PAGE) + _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        self._map.madvise(mmap.MADV_HUGEPAGE)
        self._map.madvise(_MADV_POPULATE_WRITE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.address = _round_up(start, _HUGE_PAGE)
        first = self.address - start
        # Whole sectors, as O_DIRECT wants them.
        self.view = memoryview(self._map)[first : first + _round_up(nbytes, _SECTOR)]

    def copy_from_s(self, tensors: Sequence[torch.Tensor]) -> float:
        """Seconds for one thread to copy the tensors in, one after another."""
        copies = []
        address = self.address
        for tensor in tensors:
            for start in range(0, tensor.nbytes, _COPY_PIECE):
                length = min(_COPY_PIECE, tensor.nbytes - start)
                copies.append((address + start, tensor.data_ptr() + start, length))
            address += tensor.nbytes
        if address > self.address + self.nbytes:
            raise ValueError("the tensors are larger than the buffer")
        began = time.perf_counter()
        for target, source, length in copies:
            ctypes.memmove(target, source, length)
        return time.perf_counter() - began

    def copy_to_s(self, tensors: Sequence[torch.Tensor]) -> float:
        """Seconds for one thread to copy the bytes back into the tensors."""
        began = time.perf_counter()
        address = self.address
        for tensor in tensors:
            for start in range(0, tensor.nbytes, _COPY_PIECE):
                length = min(_COPY_PIECE, tensor.nbytes - start)
                ctypes.memmove(tensor.data_ptr() + start, address + start, length)
            address += tensor.nbytes
        return time.perf_counter() - began


class RecycledFile:
    """A file that is written once to have its blocks, and from then on overwritten."""

    def __init__(self, path: Path, buffer: HugeBuffer) -> None:
        self.path = path
        self._buffer = buffer
        flags = os.O_RDWR | os.O_CREAT | os.O_DIRECT
        try:
            self._fd = os.open(path, flags, 0o600)
        except OSError as error:
            raise SystemExit(
                f"{path.parent} takes no O_DIRECT ({error.strerror}), so there is no limit to "
                f"compare with; choose another file system with --dir"
            ) from error
        os.posix_fallocate(self._fd, 0, len(buffer.view))
        self.write_s()

    def write_s(self) -> float:
        """Seconds for one thread to write the buffer and fsync."""
        began = time.perf_counter()
        view = self._buffer.view
        for start in range(0, len(view), _WRITE_BLOCK):
            block = view[start : start + _WRITE_BLOCK]
            written = os.pwrite(self._fd, block, start)
            if written != len(block):
                raise OSError(f"short write to {self.path}: {written} of {len(block)} bytes")
        os.fsync(self._fd)
        return time.perf_counter() - began

    def close(self) -> None:
        os.close(self._fd)


def read_warm_s(path: Path, buffer: HugeBuffer, threads: int = 2) -> float:
    """Seconds to read a file that is in the page cache into the buffer."""
    return _read_s(path, buffer.view, os.O_RDONLY, threads)


def read_warm_into_new_memory_s(path: Path, threads: int = 2) -> float:
    """Seconds to read a file that is in the page cache into memory that was never touched."""
    nbytes = path.stat().st_size
    with mmap.mmap(-1, _round_up(nbytes, _SECTOR), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as new:
        view = memoryview(new)
        try:
            return _read_s(path, view, os.O_RDONLY, threads)
        finally:
            view.release()


def read_direct_s(path: Path, buffer: HugeBuffer, threads: int = 4) -> float:
    """Seconds to read a file from the disk into the buffer, past the page cache."""
    return _read_s(path, buffer.view, os.O_RDONLY | os.O_DIRECT, threads)


def drop_from_page_cache(path: Path) -> None:
    """After this the next read of the file comes from the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def settle(seconds: float = 3.0) -> None:
    """Let the disk finish what was removed or written, which would slow what is measured next."""
    os.sync()
    time.sleep(seconds)


def _read_s(path: Path, view: memoryview, flags: int, threads: int) -> float:
    nbytes = path.stat().st_size
    if nbytes > len(view):
        raise ValueError(f"{path} is larger than the buffer")
    fd = os.open(path, flags)
    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(time.sleep, [0.0] * threads))
            began = time.perf_counter()
            read = sum(pool.map(_reader(fd, view), range(0, nbytes, _READ_PIECE)))
            seconds = time.perf_counter() - began
    finally:
        os.close(fd)
    if read < nbytes:
        raise OSError(f"read {read} of {nbytes} bytes of {path}")
    return seconds


def _reader(fd: int, view: memoryview) -> Callable[[int], int]:
    return lambda start: os.preadv(fd, [view[start : start + _READ_PIECE]], start)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
