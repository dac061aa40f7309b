"""Pool of staging buffers, with the wait when all of them are busy."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from localckpt.errors import CheckpointingException, StorageError
from localckpt.memory.host_memory import HUGE_PAGE_NBYTES, round_up
from localckpt.memory.limits import memory_limits
from localckpt.storage.buffers import Buffer
from localckpt.storage.failures import KEPT
from localckpt.threads import Task
from localckpt.waiting import wait_until

if TYPE_CHECKING:
    import torch

__all__ = ["BufferPool", "allocate", "buffer_nbytes", "check_memory", "wait_until_free"]

logger = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 0.001
_LONGEST_PREPARE_S = 60.0


class BufferPool:
    """Pool of at most ``depth`` buffers for each purpose, or fewer where memory is short.

    One thread takes buffers. They are made in that thread, or ahead of time in another.

    Args:
        make: Makes a buffer of at least a number of bytes.
        depth: Number of saves that can be under way at once.
    """

    def __init__(self, make: Callable[[int], Buffer], depth: int = 2) -> None:
        self._make = make
        self._depth = depth
        self._lock = threading.Lock()
        self._buffers: dict[Hashable, list[Buffer]] = {}
        self._preparing: dict[Hashable, Task[None]] = {}
        self._closed = False
        self._process = os.getpid()

    def prepare(self, purpose: Hashable, nbytes: int, pin: torch.device | None = None) -> None:
        """Make missing buffers in the background, so that no save waits for them.

        Args:
            purpose: As for :meth:`take`.
            nbytes: Size of the images.
            pin: GPU for whose copies the buffers are page-locked; ``None`` for none.
        """
        with self._lock:
            count = len(self._buffers.setdefault(purpose, []))
            if self._closed or purpose in self._preparing or count >= self._depth:
                return
            preparing = Task(lambda: self._prepare(purpose, nbytes, pin))
            try:
                preparing.start("localckpt-prepare", daemon=True)
            except RuntimeError as error:
                # The next save makes its buffer itself.
                logger.warning("a staging buffer could not be made ahead of time: %s", error)
            else:
                self._preparing[purpose] = preparing

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        with self._lock:
            return sum(len(b.view) for buffers in self._buffers.values() for b in buffers)

    def limit(self, depth: int) -> None:
        """Make no more than ``depth`` buffers for each purpose from now on."""
        self._depth = min(self._depth, depth)

    def await_prepared(self) -> None:
        """Wait until no buffer is being made ahead of time, or that takes too long."""
        with self._lock:
            preparing = list(self._preparing.values())
        for task in preparing:
            task.wait(_LONGEST_PREPARE_S)

    def is_busy(self, purpose: Hashable) -> bool:
        """Return whether :meth:`take` would have to wait for an older save."""
        with self._lock:
            buffers = self._buffers.get(purpose, [])
            return len(buffers) >= self._depth and all(buffer.in_use for buffer in buffers)

    def take(
        self, purpose: Hashable, nbytes: int, timeout_s: float, owner: Hashable = None
    ) -> Buffer:
        """Take a free buffer, or wait for an older save when all buffers are busy.

        Args:
            purpose: Key of the buffers that may be taken, such as a piece.
            nbytes: Bytes that the buffer must hold.
            timeout_s: Deadline of the wait, in seconds.
            owner: Owner of the buffer; see :meth:`release`.

        Raises:
            CheckpointingException: The older saves did not finish in time.
            StorageError: There is no memory.
        """
        wait_until_free(lambda: not self._must_wait(purpose, nbytes), timeout_s)
        with self._lock:
            buffers = self._buffers.setdefault(purpose, [])
            free = [buffer for buffer in buffers if not buffer.in_use]
            large = [buffer for buffer in free if len(buffer.view) >= nbytes]
            if not large and free:
                buffers.remove(free[0])
                free[0].close()
        buffer = large[0] if large else None
        if buffer is None:
            try:
                buffer = self._new(nbytes)
            except StorageError as error:
                if not self._can_do_without(purpose, error):
                    raise
        if buffer is None:
            return self.take(purpose, nbytes, timeout_s, owner)
        if not large:
            # In the pool before take(), so that release() finds the buffer after an interrupt.
            with self._lock:
                buffers.append(buffer)
        buffer.take(owner)
        return buffer

    def release(self, owner: Hashable) -> None:
        """Remove the buffers that an owner took and did not give back from the pool.

        The owner may not know its buffers, since an interrupt can come before :meth:`take` returns.
        """
        with self._lock:
            taken = [
                buffer
                for buffers in self._buffers.values()
                for buffer in buffers
                if buffer.in_use and buffer.owner == owner
            ]
        for buffer in taken:
            self.drop(buffer)

    def drop(self, buffer: Buffer) -> None:
        """Remove a buffer that may still be in use from the pool, and close it."""
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
        with self._lock:
            self._closed = True
        self.await_prepared()
        with self._lock:
            for buffers in self._buffers.values():
                for buffer in buffers:
                    buffer.close()
            self._buffers.clear()

    def _must_wait(self, purpose: Hashable, nbytes: int) -> bool:
        with self._lock:
            buffers = self._buffers.get(purpose, [])
            free = [len(buffer.view) for buffer in buffers if not buffer.in_use]
            if purpose in self._preparing:
                # Wait for the buffer that is being made rather than make one more.
                return not any(size >= nbytes for size in free)
            return not free and len(buffers) >= self._depth

    def _prepare(self, purpose: Hashable, nbytes: int, pin: torch.device | None) -> None:
        try:
            while True:
                with self._lock:
                    buffers = self._buffers.setdefault(purpose, [])
                    if self._closed or len(buffers) >= self._depth:
                        return
                buffer = self._new(nbytes)
                kept = False
                try:
                    if pin is not None:
                        buffer.pin(pin)
                    with self._lock:
                        # close() may have stopped waiting for this thread.
                        kept = not self._closed
                        if kept:
                            buffers.append(buffer)
                finally:
                    if not kept:
                        buffer.close()
        except StorageError as error:
            if not self._can_do_without(purpose, error):
                # The next save tries again, and raises the error.
                logger.warning("a staging buffer could not be made ahead of time: %s", error)
        finally:
            with self._lock:
                # With a default, since prepare() may have been interrupted before it set the key.
                self._preparing.pop(purpose, None)

    def _can_do_without(self, purpose: Hashable, error: StorageError) -> bool:
        """Make do with the buffers that are there, if there are any, after one could not be had."""
        with self._lock:
            there = len(self._buffers[purpose])
            if not there:
                return False
            self._depth = min(self._depth, there)
        logger.warning("saves do with %d staging buffers for each image: %s", there, error)
        return True

    def _new(self, nbytes: int) -> Buffer:
        return allocate(self._make, buffer_nbytes(nbytes))


def buffer_nbytes(image_nbytes: int) -> int:
    """Return the size of a buffer for an image, with room for a skeleton that grows."""
    return round_up(image_nbytes + image_nbytes // 64, HUGE_PAGE_NBYTES)


def wait_until_free(is_free: Callable[[], bool], timeout_s: float) -> None:
    """Wait until older saves have released their memory.

    Raises:
        CheckpointingException: The deadline passed first.
    """
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
    """Refuse more memory than is available, whose use would make the kernel kill a process.

    Raises:
        StorageError: Less memory is available.
    """
    tightest = min(memory_limits(), key=lambda limit: limit.available_nbytes)
    if nbytes > tightest.available_nbytes:
        raise StorageError(
            f"there is no memory for a staging buffer of {nbytes} bytes: "
            f"{tightest.available_nbytes} are available ({tightest.name})"
        ).advised("kept", KEPT)


def allocate(make: Callable[[int], Buffer], nbytes: int) -> Buffer:
    """Make a new buffer.

    Raises:
        StorageError: The node lacks the memory.
    """
    check_memory(nbytes)
    try:
        return make(nbytes)
    except (OSError, MemoryError) as error:
        raise StorageError(
            f"there is no memory for a staging buffer of {nbytes} bytes ({error})"
        ).advised("kept", KEPT) from error
