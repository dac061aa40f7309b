"""Staging buffers for images: allocated and faulted in once, and reused by every save.

Private buffers are on 2 MiB pages, which a thread of the trainer writes to disk fastest. Shared
buffers are files in shared memory, for a writer in another process, which opens them by path. Forks
of the trainer (data loader workers) inherit neither; a fork that writes maps shared buffers anew.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from localckpt.errors import CheckpointingException
from localckpt.memory.host_memory import (
    HUGE_PAGE_NBYTES,
    PAGE_NBYTES,
    address_of,
    map_memory,
    populate,
    prefer_huge_pages,
    round_up,
)
from localckpt.storage.failures import storage_errors
from localckpt.storage.open_file import open_owned

if TYPE_CHECKING:
    import torch

__all__ = ["Buffer", "PrivateBuffer", "SharedBuffer", "map_shared"]

logger = logging.getLogger(__name__)

FULL = (
    "it is full: free or enlarge it, since a worker process gets what it saves through shared "
    "memory, or have a thread save"
)
"""What to do when a staging buffer for a worker process does not fit."""


class Buffer(ABC):
    """Page-aligned memory of a fixed size that saves reserve and give back."""

    owner: Hashable = None
    """Last owner; a slot compares it to know whether the buffer is still its own."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self.readers: set[Hashable] = set()
        """Readers of the bytes in this process; the buffer is in use while there is one."""
        self._view = memoryview(b"")

    @property
    def view(self) -> memoryview:
        """All bytes, writable; a whole number of pages. Empty once the buffer is closed."""
        if os.getpid() != self._process:
            self._map_in_fork()
        return self._view

    @abstractmethod
    def _map_in_fork(self) -> None:
        """Map the bytes in this process, a fork of the process that made the buffer.

        Raises:
            CheckpointingException: The memory is private to the process that made it.
        """

    @property
    @abstractmethod
    def in_use(self) -> bool:
        """True if a save has taken the buffer and not given it back, or if it has a reader."""

    def take(self, owner: Hashable = None) -> None:
        """Reserve the buffer, and record its owner."""
        # Set before the buffer is in use, so that an interrupt leaves none in use without owner.
        self.owner = owner

    @abstractmethod
    def give_back(self) -> None:
        """Release the buffer; any process that maps it may do so."""

    @abstractmethod
    def close(self) -> None:
        """Free the memory. May be called twice."""

    def pin(self, device: torch.device) -> None:
        """Page-lock the memory for CUDA, so that copies from a GPU are fast and asynchronous.

        Without CUDA, or where the driver refuses, copies are slower but correct.
        """
        import torch

        if self._pinned or self._pin_refused or not torch.cuda.is_available():
            return
        # On the tensors' device, which has a CUDA context; a new context would take GPU memory.
        with torch.cuda.device(device):
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            code = runtime.cudaHostRegister(address_of(self.view), len(self.view), 0)
        self._pinned = int(code) == 0
        if not self._pinned:
            self._pin_refused = True
            logger.warning("CUDA cannot pin %d bytes (error %s)", len(self.view), int(code))
            # CUDA reports the refusal again at this thread's next kernel, so launch one here.
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device=device)

    def _unpin(self) -> None:
        if self._pinned and os.getpid() == self._process:
            import torch

            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(address_of(self.view))
            self._pinned = False

    _pinned = _pin_refused = False


_ONLY_HERE = "this save is staged in memory that only its own process can see: run it in a thread"


class PrivateBuffer(Buffer):
    """Memory of this process alone, on 2 MiB pages if the kernel has them."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        size = round_up(max(nbytes, 1), HUGE_PAGE_NBYTES)
        # One huge page more, so that the buffer can start at a 2 MiB boundary.
        whole = map_memory(size + HUGE_PAGE_NBYTES)
        skip = -address_of(whole) % HUGE_PAGE_NBYTES
        self._view = whole[skip : skip + size]
        prefer_huge_pages(address_of(self.view), size)
        populate(address_of(self.view), size)
        self._in_use = False

    @property
    def in_use(self) -> bool:
        return self._in_use or bool(self.readers)

    def take(self, owner: Hashable = None) -> None:
        super().take(owner)
        self._in_use = True

    def give_back(self) -> None:
        self._in_use = False

    def close(self) -> None:
        self._unpin()
        # The memory is freed with the last view of it.
        self._view = memoryview(b"")

    def _map_in_fork(self) -> NoReturn:
        raise CheckpointingException(_ONLY_HERE)

    def __reduce__(self) -> NoReturn:
        raise TypeError(_ONLY_HERE)


class SharedBuffer(Buffer):
    """Mapped file in shared memory, which other processes open by its path.

    The byte after the buffer's bytes is 1 while the buffer is in use, for all processes that map
    it.

    Args:
        path: The file.
        nbytes: Size of the buffer.
        create: True to make the file, which must not exist; False to map an existing one.
        to_read: As for :func:`map_shared`.
    """

    def __init__(
        self, path: Path, nbytes: int, *, create: bool = True, to_read: bool = False
    ) -> None:
        super().__init__()
        self.path = path
        self._nbytes = nbytes
        self._remove: Callable[[], object] = lambda: None
        self._map(create=create, to_read=to_read)
        if create:
            self._remove = weakref.finalize(self, _remove, os.getpid(), path)

    @property
    def in_use(self) -> bool:
        return bool(self._flag()[0]) or bool(self.readers)

    def take(self, owner: Hashable = None) -> None:
        super().take(owner)
        self._flag()[0] = 1

    def give_back(self) -> None:
        self._flag()[0] = 0

    def close(self) -> None:
        self._unpin()
        # A dummy flag, since give_back() may still be called after this.
        self._view, self._whole = memoryview(b""), memoryview(bytearray(1))
        self._remove()

    def _map(self, *, create: bool, to_read: bool) -> None:
        size = round_up(max(self._nbytes, 1), PAGE_NBYTES)
        self._whole = map_shared(self.path, size + PAGE_NBYTES, create=create, to_read=to_read)
        self._view = self._whole[:size]

    def _map_in_fork(self) -> None:
        self._map(create=False, to_read=True)
        self._process = os.getpid()

    def _flag(self) -> memoryview:
        """Return the byte that is 1 while the buffer is in use."""
        return self._whole[len(self.view) :][:1]

    def __reduce__(self) -> tuple[Callable[..., SharedBuffer], tuple[Path, int]]:
        return _attach, (self.path, self._nbytes)


def _attach(path: Path, nbytes: int) -> SharedBuffer:
    return SharedBuffer(path, nbytes, create=False, to_read=True)


def _remove(process: int, path: Path) -> None:
    if os.getpid() == process:
        path.unlink(missing_ok=True)


def map_shared(
    path: Path, nbytes: int, *, create: bool, to_read: bool = False, full: str = FULL
) -> memoryview:
    """Map a file in shared memory, and reserve all its pages.

    Args:
        path: The file.
        nbytes: Size of the mapping.
        create: True to make the file, which must not exist.
        to_read: True to map pages as they are read, which is cheaper than to fault in all of them
            for writing.
        full: What to do if shared memory is full.

    Raises:
        StorageError: There is no room, or the file cannot be opened.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL if create else 0)
    with storage_errors("map shared memory in", path, full):
        file = open_owned(path, flags)
        try:
            with file:
                fd = file.fileno()
                if os.fstat(fd).st_size < nbytes:
                    os.ftruncate(fd, nbytes)
                memory = map_memory(nbytes, fd)
                try:
                    # Before posix_fallocate, which would allocate small pages.
                    prefer_huge_pages(address_of(memory), nbytes)
                    if not to_read:
                        populate(address_of(memory), nbytes)
                    # Without reserved pages, a write to the mapping is a SIGBUS once memory is
                    # full.
                    os.posix_fallocate(fd, 0, nbytes)
                except BaseException:
                    # The error's traceback keeps this variable, which would keep the pages.
                    del memory
                    raise
        except BaseException:
            if create:
                os.unlink(path)
            raise
        return memory
