"""Staging buffers for images, in a pool: faulted in once, and reused by every save.

They are on 2 MiB pages, which a thread of the trainer writes to disk fastest. Forks of the trainer
(data loader workers) do not inherit them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

from localckpt.errors import CheckpointingException, StorageError
from localckpt.memory.host_memory import (
    HUGE_PAGE_NBYTES,
    address_of,
    map_memory,
    populate,
    prefer_huge_pages,
    round_up,
)
from localckpt.memory.limits import memory_limits
from localckpt.storage.failures import KEPT
from localckpt.waiting import wait_until

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 0.001
# A buffer that is larger than that takes memory that nobody uses.
_ROOM = 1.25

_ONLY_HERE = "this save is staged in memory that only its own process can see: run it in a thread"


class Buffer(ABC):
    """Page-aligned memory of a fixed size that saves reserve and give back."""

    owner: Hashable = None
    """Last owner; a slot compares it to know whether the buffer is still its own."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self.readers: set[Hashable] = set()
        """Readers of the bytes in this process; the buffer is in use while there is one."""
        self.content: tuple[Hashable, int] | None = None
        """Name and size of the committed image that is in the buffer until it is taken again."""
        self.held_nbytes = 0
        """Size of the committed image that was there when it was taken; 0 for none."""
        self._view = memoryview(b"")

    @property
    def view(self) -> memoryview:
        """All bytes, writable; a whole number of pages. Empty once the buffer is closed."""
        if os.getpid() != self._process:
            raise CheckpointingException(_ONLY_HERE)
        return self._view

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError(_ONLY_HERE)

    @property
    @abstractmethod
    def in_use(self) -> bool:
        """True if a save has taken the buffer and not given it back, or if it has a reader."""

    def take(self, owner: Hashable = None) -> None:
        """Reserve the buffer, and record its owner."""
        # Set before the buffer is in use, so that an interrupt leaves none in use without owner.
        self.held_nbytes = 0 if self.content is None else self.content[1]
        self.owner, self.content = owner, None

    @abstractmethod
    def give_back(self) -> None:
        """Release the buffer."""

    @abstractmethod
    def close(self) -> None:
        """Free the memory. May be called twice."""

    def pin(self, device: torch.device) -> None:
        """Page-lock the memory, so that CUDA copies fast and asynchronously, if there is CUDA."""
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


class BufferPool:
    """Pool of at most ``depth`` buffers for each purpose, which one thread takes and makes."""

    def __init__(self, make: Callable[[int], Buffer], depth: int = 2) -> None:
        self._make = make
        self._depth = depth
        self._lock = threading.Lock()
        self._buffers: dict[Hashable, list[Buffer]] = {}
        # Of another pool, for purposes that lack one.
        self._offered: list[Buffer] = []
        self._process = os.getpid()

    def prepare(self, purpose: Hashable, nbytes: int, pin: torch.device | None = None) -> None:
        """Make missing buffers, page-locked for ``pin`` if that is a GPU; raises StorageError."""
        while len(self._buffers.get(purpose, [])) < self._depth:
            buffer = self._add(purpose, nbytes)
            if buffer is not None and pin is not None:
                buffer.pin(pin)

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(len(b.view) for buffers in self._buffers.values() for b in buffers)

    def limit(self, depth: int) -> None:
        """Make no more than ``depth`` buffers for each purpose from now on."""
        self._depth = min(self._depth, depth)

    def is_busy(self, purpose: Hashable) -> bool:
        """Return whether :meth:`take` would have to wait for an older save."""
        with self._lock:
            buffers = self._buffers.get(purpose, [])
            return len(buffers) >= self._depth and all(buffer.in_use for buffer in buffers)

    def take(
        self, purpose: Hashable, nbytes: int, timeout_s: float, owner: Hashable = None
    ) -> Buffer:
        """Take a free buffer, or wait for an older save until the deadline; raises StorageError."""
        wait_until_free(lambda: not self.is_busy(purpose), timeout_s)
        with self._lock:
            buffers = self._buffers.get(purpose, [])
            free = [buffer for buffer in buffers if not buffer.in_use]
            large = [buffer for buffer in free if len(buffer.view) >= nbytes]
            if free and not large:
                buffers.remove(free[0])
                free[0].close()
            if large:
                # The one that was taken first: what others have is newer.
                buffers.remove(large[0])
                buffers.append(large[0])
        buffer = large[0] if large else self._add(purpose, nbytes)
        if buffer is None:
            return self.take(purpose, nbytes, timeout_s, owner)
        buffer.take(owner)
        return buffer

    def hand_over(self) -> list[Buffer]:
        """Take out the buffers that have committed images, which nobody reads, and return them."""
        with self._lock:
            kept = [
                buffer
                for buffers in self._buffers.values()
                for buffer in buffers
                if buffer.content is not None and not buffer.in_use
            ]
        for buffer in kept:
            self.forget(buffer)
        return kept

    def offer(self, buffer: Buffer) -> None:
        """Own a buffer of another pool, which is used where one of its size is to be made."""
        with self._lock:
            self._offered.append(buffer)

    def close_offered(self) -> None:
        """Free the buffers that were offered and not used."""
        with self._lock:
            offered, self._offered = self._offered, []
        for buffer in offered:
            buffer.close()

    def release(self, owner: Hashable) -> None:
        """Close and remove the buffers of an owner, which may not know them after an interrupt."""
        with self._lock:
            taken = [
                buffer
                for buffers in self._buffers.values()
                for buffer in buffers
                if buffer.in_use and buffer.owner == owner
            ]
        for buffer in taken:
            if self.forget(buffer):
                buffer.close()

    def forget(self, buffer: Buffer) -> bool:
        """Remove a buffer from the pool without closing it; return whether it was there."""
        with self._lock:
            for buffers in self._buffers.values():
                if buffer in buffers:
                    buffers.remove(buffer)
                    return True
        return False

    def close(self) -> None:
        """Free all buffers. Does nothing in a fork, which has none of them."""
        if os.getpid() != self._process:
            return
        self.close_offered()
        with self._lock:
            for buffers in self._buffers.values():
                for buffer in buffers:
                    buffer.close()
            self._buffers.clear()

    def _add(self, purpose: Hashable, nbytes: int) -> Buffer | None:
        """Make a buffer; without memory, ``None`` if there are others, which have to do."""
        size = buffer_nbytes(nbytes)
        with self._lock:
            free = [b for b in self._offered if not b.in_use]
            fitting = [b for b in free if nbytes <= len(b.view) <= size * _ROOM]
            if fitting:
                self._offered.remove(fitting[0])
                self._buffers.setdefault(purpose, []).append(fitting[0])
                return fitting[0]
        try:
            buffer = allocate(self._make, size)
        except StorageError as error:
            there = len(self._buffers.get(purpose, []))
            if not there:
                raise
            self.limit(there)
            logger.warning("saves do with %d staging buffers for each image: %s", there, error)
            return None
        with self._lock:
            self._buffers.setdefault(purpose, []).append(buffer)
        return buffer


def buffer_nbytes(image_nbytes: int) -> int:
    """Return the size of a buffer for an image, with room for a skeleton that grows."""
    return round_up(image_nbytes + image_nbytes // 64, HUGE_PAGE_NBYTES)


def wait_until_free(is_free: Callable[[], bool], timeout_s: float) -> None:
    """Wait until older saves have released their memory; raises CheckpointingException."""
    if is_free():
        return
    logger.info("all staging buffers are busy: waiting for an older save")
    if not wait_until(is_free, timeout_s, longest_s=_LONGEST_PAUSE_S):
        raise CheckpointingException(
            f"the saves before this one have not been written after {timeout_s:g} s: is the "
            f"disk stuck, or does nobody run the requests that save() returned? This save was "
            f"not started"
        )


def check_memory(nbytes: int) -> None:
    """Raise StorageError for more memory than there is: the kernel would kill a process."""
    tightest = min(memory_limits(), key=lambda limit: limit.available_nbytes)
    if nbytes > tightest.available_nbytes:
        raise StorageError(
            f"there is no memory for a staging buffer of {nbytes} bytes: "
            f"{tightest.available_nbytes} are available ({tightest.name})"
        ).advised("kept", KEPT)


def allocate(make: Callable[[int], Buffer], nbytes: int) -> Buffer:
    """Make a new buffer; raises StorageError if the node lacks the memory."""
    check_memory(nbytes)
    try:
        return make(nbytes)
    except (OSError, MemoryError) as error:
        raise StorageError(
            f"there is no memory for a staging buffer of {nbytes} bytes ({error})"
        ).advised("kept", KEPT) from error
