"""Memory reserved in a store for one piece, from its reservation until it is given back.

A slot is reserved by a store, then filled: from a state of this rank, or by a peer. It is committed
once, and in the end released, or discarded with what was written of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
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
"""Work on the digests of an image that is left for its writer."""


class Slot:
    """Memory reserved in a store for one piece.

    Args:
        identity: Identity of the piece.
        nbytes: Size of its image.
        plan: Called when the slot is filled, by whoever fills it: sets :attr:`write`.
        is_kept: Whether it may be committed. Else it is a bounce buffer for an image that is only
            read into a state.

    Attributes:
        covered_nbytes: Bytes of the image that the digests cover, once the slot is filled.
        gpu: The GPU that the memory was locked for; ``None`` for none.
        reserved_at: When the store had the memory, by ``time.monotonic()``.
        source: The image, for ranks that keep a replica; ``None`` before it is filled.
        write: What commits the slot, for a store of files.
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
        """Have this memory, which the store gives."""
        self._buffer = buffer
        self.reserved_at = time.monotonic()

    @property
    def buffer(self) -> Buffer | None:
        """The memory, for the store; ``None`` when another slot has it, or none has."""
        buffer = self._buffer
        return buffer if buffer is not None and buffer.owner is self else None

    @property
    def image(self) -> memoryview:
        """The bytes of the image, writable.

        Raises:
            StorageError: The slot was given back.
        """
        return self.required().view[: self.nbytes]

    def pin(self, gpu: torch.device | None) -> None:
        """Lock the memory for copies from a GPU, if there is one."""
        if gpu is not None:
            self.gpu = gpu
            self.required().pin(gpu)

    def begin_filling(self, stop: Callable[[], None]) -> None:
        """Note who writes into the memory from here on.

        Args:
            stop: Returns when nothing is written any more. Raises CheckpointingException if that
                cannot be had; the memory is then neither freed nor used again.
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
        """Note that the image is here but for what is still under way.

        Args:
            covered_nbytes: Bytes that the digests cover.
            source: Gives the image to other ranks.
            is_complete: Whether the digests are there.
            copies: Copies of tensors that are still under way.
            computing: Computes the digests; whoever writes without it computes them as well.
        """
        self.covered_nbytes, self.source = covered_nbytes, source
        self._copies, self._computing = copies, computing
        self._digests = "done" if is_complete else "compute"
        self._plan(self)

    def arrived(self) -> None:
        """Note that a peer has sent the image, which is checked when it is written.

        The digests of a piece that was computed here are computed here, too.

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
        """Return when all values are in the slot.

        Raises:
            CheckpointingException: They are not in time.
        """
        if self._copies is not None:
            self._copies.wait()

    def await_digests(self) -> None:
        """Return when the image can be committed as it is; raises what computing them raised."""
        self.await_copied()
        if self._computing is not None:
            self._computing.result()

    def begin_sending(self) -> None:
        """Have the memory not used again before :meth:`sent`, whoever has written it by then."""
        self.required().is_being_sent = True

    def sent(self) -> None:
        """Note that other ranks have the image, or will not get it. May be called again."""
        # Another process may have written it, with digests of its own, before those are here that
        # nobody got to send: they would be put into the next image. Computing them waits for
        # nothing but copies of a GPU, which have a deadline.
        if self._computing is not None:
            self._computing.wait()
        if (buffer := self.buffer) is not None:
            buffer.is_being_sent = False

    # Committed.

    @property
    def digests(self) -> Digests:
        """Work that is left for whoever writes the image."""
        computing = self._computing
        if computing is not None and computing.done() and computing.error is None:
            return "done"
        return self._digests

    def required(self) -> Buffer:
        """The memory, of a slot that can be filled or committed.

        Raises:
            StorageError: The slot was given back.
        """
        buffer = self.buffer
        if buffer is None or self._is_over:
            raise StorageError(f"{self.identity} is not written: its save was given up")
        return buffer

    # Released, or discarded.

    def give_up(self) -> None:
        """Let no job be made of it any more."""
        self._is_over = True

    def end_filling(self) -> None:
        """Return when nothing writes into the memory any more; raises as ``stop`` does."""
        self._stop_filling()

    def forget_content(self) -> None:
        """Refer to no state any more. The buffer stays known: it may still be being sent."""
        self.source, self._copies, self._stop_filling = None, None, _nothing


def _nothing() -> None:
    """Do nothing: the slot is filled by nobody."""
