"""Addresses of host memory, and what the kernel is asked to do with it."""

from __future__ import annotations

import ctypes
import mmap

from localckpt.state_dict.layout import PAGE_NBYTES, round_up

__all__ = ["HUGE_PAGE_NBYTES", "address_of", "memory_at", "populate", "prefer_huge_pages"]

HUGE_PAGE_NBYTES = 2 << 20

_PyBUF_WRITE = 0x200
# Some 20 times cheaper than an array type of ctypes for each size.
_memoryview_of = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int
)(("PyMemoryView_FromMemory", ctypes.pythonapi))

# From linux/mman.h, since 5.14; Python has no name for it.
_MADV_POPULATE_WRITE = 23
# Python's own mmap.madvise would keep all other threads from running meanwhile.
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


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
