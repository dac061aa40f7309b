"""Slot: memory reserved in a store for one piece.

A store reserves a slot. The slot is filled from a state of this rank, or by a peer, and committed
once. In the end it is released, or discarded together with the files written from it.

The writer gives the memory back as soon as it has written the image, for the next save to reuse.
Every other reader of the image holds the slot: see :meth:`Slot.hold` and :meth:`Slot.reading`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from localckpt.errors import MismatchError, StorageError
from localckpt.ids import ShardIdentity
from localckpt.state_dict.identify import read_header
from localckpt.state_dict.source import MemorySource, ShardSource
from localckpt.storage.buffers import Buffer
from localckpt.threads import Task

if TYPE_CHECKING:
    import torch

    from localckpt.memory.gpu_copies import CopiesUnderWay
    from localckpt.storage.write import ShardWrite

__all__ = ["Digests", "Slot"]

Digests = Literal["compute", "check", "done"]
"""Work on an image's digests that is left for its writer."""


class Slot:
    """Memory reserved in a store for one piece.

    Args:
        identity: Identity of the piece.
        nbytes: Size of its image.
        plan: Called with the slot once it is filled; sets :attr:`write`.
        is_kept: True if the slot may be committed. False for a bounce buffer, whose image is only
            read into a state.

    Attributes:
        covered_nbytes: Bytes of the image that the digests cover, once the slot is filled.
        gpu: GPU that the memory is page-locked for; ``None`` for none.
        reserved_at: Time when the slot got its memory, by ``time.monotonic()``.
        source: Source of the image for ranks that keep a replica; ``None`` before the slot is
            filled.
        write: Write that commits the slot, in a store of files.
    """

    def __init__(
        self,
        identity: ShardIdentity,
        nbytes: int,
        plan: Callable[[Slot], None],
        *,
        is_kept: bool = True,
    ) -> None:
        self.identity = identity
        self.nbytes = nbytes
        self.is_kept = is_kept
        self.covered_nbytes = 0
        self.gpu: torch.device | None = None
        self.source: ShardSource | None = None
        self.write: ShardWrite | None = None
        self._plan = plan
        self._buffer: Buffer | None = None
        self.reserved_at = time.monotonic()
        self._is_over = False
        self._stop_filling: Callable[[], None] = _nothing
        self._digests: Digests = "compute"
        self._copies: CopiesUnderWay | None = None
        self._computing: Task[None] | None = None

    # Reserved.

    def take(self, buffer: Buffer) -> None:
        """Record the memory that the store gives to the slot."""
        self._buffer = buffer
        self.reserved_at = time.monotonic()

    @property
    def buffer(self) -> Buffer | None:
        """Memory of the slot; ``None`` if it has none, or another slot has taken it over."""
        buffer = self._buffer
        return buffer if buffer is not None and buffer.owner is self else None

    @property
    def image(self) -> memoryview:
        """Writable bytes of the image, until it is written; :meth:`reading` is for readers.

        Raises:
            StorageError: The slot was given back, or its memory, which no reader holds.
        """
        buffer = self.required()
        if not (buffer.in_use or buffer.readers):
            raise StorageError(
                f"the memory of {self.identity} was given back once it was written, so its image "
                f"cannot be read there"
            )
        return buffer.view[: self.nbytes]

    def pin(self, gpu: torch.device | None) -> None:
        """Page-lock the memory for copies from a GPU, if there is one."""
        if gpu is not None:
            self.gpu = gpu
            self.required().pin(gpu)

    def begin_filling(self, stop: Callable[[], None]) -> None:
        """Note that writes into the memory begin.

        Args:
            stop: Returns once all writes have ended. Raises CheckpointingException if they cannot
                be ended; the memory is then neither freed nor reused.
        """
        self._stop_filling = stop

    # Filled.

    def filled(
        self,
        covered_nbytes: int,
        source: ShardSource,
        *,
        is_complete: bool,
        copies: CopiesUnderWay | None = None,
        computing: Task[None] | None = None,
    ) -> None:
        """Note that the image is complete, except for work that is still under way.

        Args:
            covered_nbytes: Bytes that the digests cover.
            source: Source of the image for other ranks.
            is_complete: True if the digests are written.
            copies: Copies of tensors that are still under way.
            computing: Task that computes the digests. A writer that does not wait for the task
                computes them again.
        """
        self.covered_nbytes, self.source = covered_nbytes, source
        self._copies, self._computing = copies, computing
        self._digests = "done" if is_complete else "compute"
        self._plan(self)

    def arrived(self) -> None:
        """Note that the image is complete, sent by a peer or computed here from peers' data.

        The writer verifies a shard's digests, and computes those of any other piece.

        Raises:
            MismatchError: The image is another shard's.
        """
        header = read_header(MemorySource(self.image))
        if header.identity != self.identity:
            raise MismatchError(
                f"expected a replica of {self.identity}, and {header.identity} arrived: the ranks "
                f"have not called save() equally often"
            )
        self.covered_nbytes = header.digests_start
        self._digests = "check" if self.identity.is_shard else "compute"
        self._plan(self)

    def await_copied(self) -> None:
        """Wait until all copies of tensors into the slot have ended.

        Raises:
            CheckpointingException: The deadline passed first.
        """
        if self._copies is not None:
            self._copies.wait()

    def await_digests(self) -> None:
        """Wait for the copies and for the task that computes the digests; raises their errors."""
        self.await_copied()
        if self._computing is not None:
            self._computing.result()

    def hold(self, reader: Hashable) -> None:
        """Keep the memory from being reused before :meth:`end_hold`, even once it is written."""
        self.required().readers.add(reader)

    def end_hold(self, reader: Hashable) -> None:
        """Note that a reader no longer needs the image. May be called again."""
        buffer = self.buffer
        if buffer is None or reader not in buffer.readers:
            return
        # The task may still write digests into the memory, even if another process has already
        # written the image with its own digests; the next image in this memory would get them.
        # The task waits only for copies from a GPU, which have a deadline.
        if self._computing is not None:
            self._computing.wait()
        buffer.readers.discard(reader)

    @contextmanager
    def reading(self) -> Iterator[memoryview]:
        """Context in which the image is read and its memory is not reused.

        Raises:
            StorageError: As for :attr:`image`.
        """
        reader = object()
        image = self.image
        self.hold(reader)
        try:
            yield image
        finally:
            self.end_hold(reader)

    # Committed.

    @property
    def digests(self) -> Digests:
        """Work on the digests that is left for the image's writer."""
        computing = self._computing
        if computing is not None and computing.done() and computing.error is None:
            return "done"
        return self._digests

    def required(self) -> Buffer:
        """Return the memory of a slot that can be filled or committed.

        Raises:
            StorageError: The slot was given back.
        """
        buffer = self.buffer
        if buffer is None or self._is_over:
            raise StorageError(f"{self.identity} is not written: its save was given up")
        return buffer

    # Released, or discarded.

    def give_up(self) -> None:
        """Refuse all further filling and committing."""
        self._is_over = True

    def end_filling(self) -> None:
        """Wait until all writes into the memory have ended; raises as ``stop`` does."""
        self._stop_filling()

    def forget_content(self) -> None:
        """Drop all references to the state. The buffer is kept: it may still be being sent."""
        self.source, self._copies, self._stop_filling = None, None, _nothing


def _nothing() -> None:
    """Do nothing: no writes into the slot's memory have begun."""
