"""Mappings, pages and addresses of host memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

PAGE_NBYTES = 4096
HUGE_PAGE_NBYTES = 2 << 20

_PyBUF_WRITE = 0x200
# About 20 times cheaper than a ctypes array type for each size.
_memoryview_of = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int
)(("PyMemoryView_FromMemory", ctypes.pythonapi))

# From linux/mman.h, since 5.14; Python has no name for it.
_MADV_POPULATE_WRITE = 23
# Called through ctypes, which releases the GIL; Python's mmap.madvise holds it.
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
    """Return the address of a writable view's first byte, valid as long as the view lives."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if len(view) else 0


def memory_at(address: int, nbytes: int) -> memoryview:
    """Return a writable view of the bytes at an address; their owner must outlive the view."""
    view: memoryview = _memoryview_of(address, nbytes, _PyBUF_WRITE)
    return view


def prefer_huge_pages(address: int, nbytes: int) -> None:
    """Ask for 2 MiB pages, with which the first touch of 1.5 GB takes half as long."""
    start = round_up(address, PAGE_NBYTES)
    stop = (address + nbytes) // PAGE_NBYTES * PAGE_NBYTES
    if stop - start >= HUGE_PAGE_NBYTES:
        _madvise(start, stop - start, mmap.MADV_HUGEPAGE)


def populate(address: int, nbytes: int) -> None:
    """Allocate all pages of a mapping before their first touch, if the kernel can (5.14)."""
    _madvise(address // PAGE_NBYTES * PAGE_NBYTES, nbytes, _MADV_POPULATE_WRITE)


def map_memory(nbytes: int, fd: int | None = None) -> memoryview:
    """Map memory, private without a file, that forks do not inherit; freed with its last view.

    A fork that inherited private memory would keep its old pages alive, and this process would copy
    each page at its next write. A fork that inherited shared memory would keep it from being freed.

    Python's ``mmap`` does not suit memory with MADV_DONTFORK: when a fork collects the object, it
    unmaps whatever now lies at that address in the fork. It also keeps the file open in all forks.
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
    # Not unmapped at exit: threads may still use the memory, and the kernel frees it anyway.
    weakref.finalize(memory, _unmap, os.getpid(), address, nbytes).atexit = False
    return memoryview(memory).cast("B")


def _unmap(process: int, address: int, nbytes: int) -> None:
    if os.getpid() == process:
        _munmap(address, nbytes)


def round_up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple
