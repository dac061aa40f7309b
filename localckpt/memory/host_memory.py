"""Addresses of host memory, and what the kernel is asked to do with it."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

__all__ = [
    "HUGE_PAGE_NBYTES",
    "PAGE_NBYTES",
    "address_of",
    "map_memory",
    "memory_at",
    "populate",
    "prefer_huge_pages",
    "round_up",
]

PAGE_NBYTES = 4096
HUGE_PAGE_NBYTES = 2 << 20

_PyBUF_WRITE = 0x200
# Some 20 times cheaper than an array type of ctypes for each size.
_memoryview_of = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int
)(("PyMemoryView_FromMemory", ctypes.pythonapi))

# From linux/mman.h, since 5.14; Python has no name for it.
_MADV_POPULATE_WRITE = 23
# Python's own mmap.madvise would keep all other threads from running meanwhile.
_libc = ctypes.CDLL(None, use_errno=True)
_madvise = _libc.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_mmap, _munmap = _libc.mmap, _libc.munmap
_mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_mmap.restype = ctypes.c_void_p
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value
_MADV_DONTFORK = 10


def address_of(view: memoryview) -> int:
    """Address of a writable view's first byte; the view must stay alive while it is used."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if len(view) else 0


def memory_at(address: int, nbytes: int) -> memoryview:
    """Writable bytes at an address; whoever owns them must stay alive while the view is used."""
    view: memoryview = _memoryview_of(address, nbytes, _PyBUF_WRITE)
    return view


def prefer_huge_pages(address: int, nbytes: int) -> None:
    """Ask for 2 MiB pages where memory has not been touched yet.

    Touching 1.5 GB for the first time takes half as long then. A kernel that has none to give says
    so, which changes nothing but that time.
    """
    start = round_up(address, PAGE_NBYTES)
    stop = (address + nbytes) // PAGE_NBYTES * PAGE_NBYTES
    if stop - start >= HUGE_PAGE_NBYTES:
        _madvise(start, stop - start, mmap.MADV_HUGEPAGE)


def populate(address: int, nbytes: int) -> None:
    """Have all pages of a mapping there before they are used; what they hold is not changed.

    An older kernel than 5.14 cannot; its pages come when they are touched.
    """
    _madvise(address // PAGE_NBYTES * PAGE_NBYTES, nbytes, _MADV_POPULATE_WRITE)


def map_memory(nbytes: int, fd: int | None = None) -> memoryview:
    """Map memory that forks of this process do not get; it is freed with the last view of it.

    A fork that got private memory would keep a copy of it, and this process would copy each page
    that it writes to from then on; one that got shared memory would keep it from being freed.

    Python's own ``mmap`` cannot be used so: in a fork it would unmap, when it is collected there,
    whatever has taken the place of the memory that the fork has not. It would also keep the file
    open, in all forks.

    Args:
        nbytes: How much.
        fd: A file to share; without it memory of this process alone.

    Raises:
        OSError: The system refuses.
    """
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if fd is None else mmap.MAP_SHARED
    address = _mmap(
        None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, kind, -1 if fd is None else fd, 0
    )
    if address in (None, _MAP_FAILED):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    _madvise(address, nbytes, _MADV_DONTFORK)
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    # Not at exit, when threads may still be using it, and the system frees it anyway.
    weakref.finalize(memory, _unmap, os.getpid(), address, nbytes).atexit = False
    return memoryview(memory).cast("B")


def _unmap(process: int, address: int, nbytes: int) -> None:
    if os.getpid() == process:
        _munmap(address, nbytes)


def round_up(nbytes: int, multiple: int) -> int:
    """Round up to the smallest multiple that is not below ``nbytes``."""
    return -(-nbytes // multiple) * multiple
