"""Interface of a node's checkpoint storage, and its slots: memory reserved for one piece each.

A store reserves a slot. The slot is filled from a state of this rank, or by a peer, and committed
once. In the end it is released, or discarded together with the files written from it.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localckpt.errors import MismatchError, StorageError
from localckpt.ids import ShardIdentity, ShardRecord
from localckpt.lineage import Lineage
from localckpt.memory.digests import HeldBlocks
from localckpt.memory.limits import memory_limits
from localckpt.state_dict.source import MemorySource, ShardSource, read_header
from localckpt.storage.buffers import Buffer
from localckpt.storage.catalog import Problem
from localckpt.storage.notes import TrustNotes
from localckpt.storage.preflight import MemoryNeeds
from localckpt.storage.write import Digests, Place, StagedImage
from localckpt.threads import Task
from localckpt.trust import Trusts

if TYPE_CHECKING:
    import torch

    from localckpt.memory.gpu_copies import CopiesUnderWay


@dataclass(frozen=True, slots=True)
class Stored:
    """Piece in a store, or a file that cannot be used, with its problem."""

    name: str
    record: ShardRecord | None = None
    problem: Problem | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.problem or self.record}"


class Claim(TrustNotes):
    """One rank's claim on its part of a store, and the notes in it; this base class keeps none."""

    owner = ""
    """Process that holds the claim; empty if the store has no owners."""

    def newest_epoch(self) -> int:
        """Return the highest epoch that began here, even if no shard of it is left; 0 for none."""
        return 0

    def begin_epoch(self, epoch: int, owners: Collection[str], timeout_s: float) -> None:
        """Note that an epoch has begun, so that its number is known without any of its shards.

        Raises StorageError if a job of other ``owners`` is alive here until the deadline.
        """

    def noted_lineages(self) -> list[Lineage]:
        """Return the lineages of the last epochs of all ranks here, each once."""
        return []

    def note_lineage(self, lineage: Lineage) -> None:
        """Note an epoch's lineage, before it saves for the first time; raises StorageError."""

    def noted_trusts(self) -> Trusts:
        return Trusts()


class Store(ABC):
    """One rank's access to the pieces of its node, which ranks of one failure ``domain`` share.

    One thread saves and loads, another one receives the pieces of other ranks.
    """

    keeps_images = True
    """True if the store keeps images byte for byte."""
    is_written = True
    """False if slots serve loads only, whole in memory."""

    def __init__(self, domain: str, claim: Claim) -> None:
        self.domain = domain
        self.claim = claim
        self._slots: list[Slot] = []

    @property
    def slots(self) -> list[Slot]:
        """Slots that are reserved, and not yet released or discarded."""
        return list(self._slots)

    def reserve(
        self,
        identity: ShardIdentity,
        nbytes: int,
        timeout_s: float,
        *,
        is_kept: bool = True,
        may_stage: bool = False,
    ) -> Slot:
        """Reserve memory for a piece; for ``is_kept`` and ``may_stage`` see :class:`Slot`.

        Raises StorageError if there is no room, MismatchError if this store cannot keep pieces of
        this kind, and CheckpointingException if older saves used all memory until the deadline.
        """
        kinds = {"is_kept": is_kept and self.is_written, "may_stage": may_stage and self.is_written}
        slot = Slot(identity, nbytes, **kinds)
        # Listed before it has memory, so that after an interrupt or an error the slot is still
        # released or discarded.
        self._slots.append(slot)
        slot.take(self._take_memory(slot, timeout_s))
        return slot

    def memory_needs(self, nbytes: int) -> MemoryNeeds:
        """Return the memory that saves of an image take, without replicas."""
        return MemoryNeeds(nbytes, 1, 0, 0, memory_limits())

    def limit_buffers(self, count: int, most_nbytes: int) -> None:  # noqa: B027 - not all have them
        """Use no more than ``count`` staging buffers for each image from now on.

        ``most_nbytes`` are those of a buffer, unless it is 0; larger images are staged in pieces.
        """

    @abstractmethod
    def commit(self, slots: Sequence[Slot]) -> None:
        """Commit filled slots, in their order, each once.

        Raises StorageError if the store refused, or a slot was given back, and CorruptShardError if
        an image from a peer does not match its digests.
        """

    def release(self, slots: Sequence[Slot]) -> None:
        """Release slots that nobody writes: committed pieces stay, and unfinished files do not."""
        with ExitStack() as steps:
            # An ExitStack, so that an error in one release does not prevent the others.
            for slot in slots:
                steps.callback(self._release, slot)

    def _release(self, slot: Slot) -> None:
        slot.give_up()
        was_unfinished = True
        try:
            if slot.is_kept:
                was_unfinished = self._remove_unfinished(slot.identity)
        finally:
            # Even if the store has failed: it may recover, and then needs the memory again.
            self._give_back(slot, was_unfinished=was_unfinished)
        self._forget(slot)

    def discard(self, slots: Sequence[Slot]) -> None:
        """Remove what a failed save has written; the memory of its slots may still be in use."""
        for slot in slots:
            slot.give_up()
        with ExitStack() as steps:
            # An ExitStack, so that an error in one removal does not prevent the others.
            for slot in slots:
                if slot.is_kept:
                    steps.callback(self._remove, slot.identity)
            # Raises if a GPU may still write to the memory, which is then never freed or reused.
            for slot in slots:
                slot.end_filling()
            for slot in slots:
                steps.callback(self._drop_memory, slot)
        for slot in slots:
            self._forget(slot)

    @abstractmethod
    def list_stored(self) -> list[Stored]:
        """List all pieces that can be read here, of any rank, and the files that cannot be used."""

    @abstractmethod
    def holds(self, identity: ShardIdentity) -> bool:
        """Return whether a piece that this rank saved is committed here."""

    @abstractmethod
    def open(self, identity: ShardIdentity) -> ShardSource:
        """Open the image of a piece that a rank of this node has committed; raises StorageError."""

    @abstractmethod
    def quarantine(self, identity: ShardIdentity, problem: Problem) -> None:
        """Keep a bad piece from being read again."""

    def clean_up(self, iteration: int) -> None:  # noqa: B027 - the managers prune other stores
        """Prune older checkpoints, in a store that prunes by itself: an iteration is complete."""

    def clean_up_failed_save(self, iteration: int) -> None:  # noqa: B027 - as above
        """Remove what is here of an iteration whose save failed, beside its slots."""

    @abstractmethod
    def close(self) -> None:
        """Release the store's resources. Does nothing in a fork."""

    # Methods of an implementation for the memory of slots, and for the files written from them.

    @abstractmethod
    def _take_memory(self, slot: Slot, timeout_s: float) -> Buffer:
        """Take memory that the slot owns; raises as :meth:`reserve`."""

    def _give_back(self, slot: Slot, *, was_unfinished: bool) -> None:
        """Reclaim the memory of a slot, which is no longer in use."""
        self._drop_memory(slot)

    @abstractmethod
    def _drop_memory(self, slot: Slot) -> None:
        """Retire a slot's memory, which may still be in use, even if the slot has not noted it."""

    def _remove_unfinished(self, identity: ShardIdentity) -> bool:
        """Remove the unfinished file of a piece; return whether there was one."""
        return True

    def _remove(self, identity: ShardIdentity) -> None:  # noqa: B027 - nothing is, without files
        """Remove the unfinished and the committed file of a piece."""

    def _forget(self, slot: Slot) -> None:
        slot.forget_content()
        with suppress(ValueError):
            self._slots.remove(slot)


class Slot:
    """Memory reserved in a store for one piece.

    The writer gives the memory back as soon as it has written the image, for the next save to
    reuse; other readers :meth:`hold` the slot. One that is not kept is a bounce buffer, whose image
    is only read into a state. Where memory is short, one that ``may_stage`` has less than its image
    takes, and is filled piece by piece. ``covered_nbytes`` are those that the digests cover.
    """

    def __init__(
        self, identity: ShardIdentity, nbytes: int, *, is_kept: bool = True, may_stage: bool = False
    ) -> None:
        self.identity = identity
        self.nbytes = nbytes
        self.is_kept = is_kept
        self.may_stage = may_stage
        self.staged: StagedImage | None = None
        self.covered_nbytes = 0
        self.held = HeldBlocks()
        """The committed image that a peer's slot still has, of which a peer sends the changes."""
        self.written_nbytes: int | None = None
        """Bytes that were written to the file of the image; ``None`` until it is committed."""
        self.gpu: torch.device | None = None
        self.source: ShardSource | None = None
        self._buffer: Buffer | None = None
        self.reserved_at = time.monotonic()
        self._is_over = False
        self._stop_filling: Callable[[], None] | None = None
        self._digests: Digests = "compute"
        self._copies: CopiesUnderWay | None = None
        self._computing: Task[None] | None = None

    # Reserved.

    def take(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self.reserved_at = time.monotonic()

    @property
    def buffer(self) -> Buffer | None:
        """Memory of the slot; ``None`` if it has none, or another slot has taken it over."""
        buffer = self._buffer
        return buffer if buffer is not None and buffer.owner is self else None

    @property
    def image(self) -> memoryview:
        """Writable bytes of the image, while somebody has them; :meth:`reading` is for readers."""
        buffer = self.required()
        if not (buffer.in_use or buffer.readers):
            raise StorageError(
                f"the memory of {self.identity} was given back once it was written, so its image "
                f"cannot be read there"
            )
        return buffer.view[: self.nbytes]

    @property
    def place(self) -> Place:
        """Place for an image that comes from a peer."""
        return self.staged or self.image

    def open(self) -> ShardSource:
        """Return a source of the image that has come."""
        return self.staged or MemorySource(self.image)

    def pin(self, gpu: torch.device | None) -> None:
        """Page-lock the memory for copies from a GPU, if there is one."""
        if gpu is not None:
            # What is staged in pieces is sent from its file.
            self.gpu = None if self.staged is not None else gpu
            self.required().pin(gpu)

    def begin_filling(self, stop: Callable[[], None]) -> None:
        """Note that writes begin, which ``stop`` ends and awaits, or the memory is never reused."""
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
        """Note that the image is complete, but for copies and digests that are still under way."""
        self.covered_nbytes, self.source = covered_nbytes, source
        self._copies, self._computing = copies, computing
        self._digests = "done" if is_complete else "compute"

    def arrived(self) -> None:
        """Note that the image has come from a peer or was computed; MismatchError for another one.

        The writer verifies a shard's digests, and computes those of any other piece.
        """
        header = read_header(self.open())
        if header.identity != self.identity:
            raise MismatchError(
                f"expected a replica of {self.identity}, and {header.identity} arrived: the ranks "
                f"have not called save() equally often"
            )
        self.covered_nbytes = header.digests_start
        self._digests = "check" if self.identity.is_shard else "compute"

    def await_copied(self) -> None:
        """Wait for all copies into the slot, or its file; raises CheckpointingException."""
        if self._copies is not None:
            self._copies.wait()
        if self.staged is not None:
            self.staged.await_written()

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
        # The task of a save that was given up may still write digests into the memory, and the next
        # image there would get them. It waits only for copies from a GPU, which have a deadline.
        if self._computing is not None:
            self._computing.wait()
        buffer.readers.discard(reader)

    @contextmanager
    def reading(self) -> Iterator[memoryview]:
        """Context in which the image is read and its memory is not reused; raises StorageError."""
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
        """Return the memory; raises StorageError once the slot was given back."""
        buffer = self.buffer
        if buffer is None or self._is_over:
            raise StorageError(f"{self.identity} is not written: its save was given up")
        return buffer

    # Released, or discarded.

    def give_up(self) -> None:
        """Refuse all further filling and committing."""
        self._is_over = True
        if self.staged is not None:
            self.staged.give_up()

    def end_filling(self) -> None:
        """Wait until all writes into the memory have ended; raises as ``stop`` does."""
        if self._stop_filling is not None:
            self._stop_filling()

    def forget_content(self) -> None:
        """Drop all references to the state. The buffer is kept: it may still be being sent."""
        self.source = self._copies = self._stop_filling = None
        if self.staged is not None:
            self.staged.close()
