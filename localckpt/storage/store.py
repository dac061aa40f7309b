"""Interface of a node's checkpoint storage, and the life cycle of its slots.

Managers use this module and ``slot.py``. Implementations are ``disk.py``, ``memory.py``, and
``hooks.py`` for a user's own storage.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from localckpt.ids import Checkpoint, CkptID, ShardIdentity, ShardRecord
from localckpt.lineage import Lineage
from localckpt.memory.limits import memory_limits
from localckpt.state_dict.source import ShardSource
from localckpt.storage.buffers import Buffer
from localckpt.storage.preflight import MemoryNeeds
from localckpt.storage.problem import Problem
from localckpt.storage.slot import Slot
from localckpt.trust import Mark, Measured, Resumes, Trust

__all__ = ["Claim", "Store", "Stored"]


@dataclass(frozen=True, slots=True)
class Stored:
    """Piece in a store, or a file that cannot be used.

    Attributes:
        name: Name of the file, for messages; empty if there is no file.
        record: Record of the piece; ``None`` for a file that cannot be used.
        problem: Problem of a file that cannot be used; else ``None``.
    """

    name: str
    record: ShardRecord | None = None
    problem: Problem | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.problem or self.record}"


class Claim:
    """One rank's claim on its part of a store, and the notes in it; this base class keeps none."""

    owner = ""
    """Process that holds the claim; empty if the store has no owners."""

    def newest_epoch(self) -> int:
        """Return the highest epoch that began here, even if no shard of it is left; 0 for none."""
        return 0

    def begin_epoch(self, epoch: int, owners: Collection[str], timeout_s: float) -> None:
        """Note that an epoch has begun, so that its number is known without any of its shards.

        Args:
            epoch: Number of the epoch.
            owners: Owners of the job's ranks that share this store.
            timeout_s: Deadline, in seconds, of a wait for another job that is ending.

        Raises:
            StorageError: Another job is alive here, or the epoch cannot be noted.
        """

    def noted_lineages(self) -> list[Lineage]:
        """Return the lineages of the last epochs of all ranks here, each once."""
        return []

    def note_lineage(self, lineage: Lineage) -> None:
        """Note an epoch's lineage, before the epoch saves for the first time.

        Raises:
            StorageError: The lineage cannot be noted here.
        """

    def noted_trust(self) -> Trust:
        """Return the notes here on starts of the job in vain, and on marks of checkpoints."""
        return Trust()

    def note_resume(self, resumes: Resumes) -> None:
        """Note that the job resumes from a checkpoint; raises StorageError."""

    def take_back_resume(self, resumes: Resumes) -> None:
        """Remove one note of :meth:`note_resume`, also in a signal handler; raises StorageError."""

    def forget_resumes(self) -> None:
        """Remove this session's notes of :meth:`note_resume`; raises StorageError."""

    def note_mark(self, mark: Mark) -> None:
        """Note a mark; raises StorageError."""

    def note_measured(self, measured: Measured) -> None:
        """Note the metric of a checkpoint, unless it is noted; raises StorageError."""

    def forget_measured(self, is_over: Callable[[Checkpoint], bool]) -> None:
        """Remove all ranks' notes here of metrics of checkpoints that are over.

        Raises:
            StorageError: They cannot be removed.
        """

    def note_drained(self, drained: Collection[Checkpoint]) -> None:
        """Note which checkpoints were drained to shared storage, and no others.

        Raises:
            StorageError: They cannot be noted here.
        """


class Store(ABC):
    """One rank's access to the pieces of its node.

    One thread saves and loads, another one receives the pieces of other ranks.

    Args:
        domain: Name of the failure domain; ranks with the same domain share a store.
        claim: This rank's claim on the store.
    """

    keeps_images = True
    """True if the store keeps images byte for byte."""

    def __init__(self, domain: str, claim: Claim) -> None:
        self.domain = domain
        self.claim = claim
        self._slots: list[Slot] = []

    @property
    def slots(self) -> list[Slot]:
        """Slots that are reserved, and not yet released or discarded."""
        return list(self._slots)

    def reserve(
        self, identity: ShardIdentity, nbytes: int, timeout_s: float, *, is_kept: bool = True
    ) -> Slot:
        """Reserve memory for a piece.

        Args:
            identity: Identity of the piece.
            nbytes: Size of its image.
            timeout_s: Deadline, in seconds, of a wait for older saves.
            is_kept: True if the slot may be committed; see :class:`Slot`.

        Raises:
            StorageError: There is no room.
            MismatchError: This store cannot keep pieces of this kind.
            CheckpointingException: Older saves used all memory until the deadline.
        """
        slot = Slot(identity, nbytes, self._plan, is_kept=is_kept)
        # Listed before it has memory, so that after an interrupt or an error the slot is still
        # released or discarded.
        self._slots.append(slot)
        slot.take(self._take_memory(slot, timeout_s))
        return slot

    def memory_needs(self, nbytes: int) -> MemoryNeeds:
        """Return the memory that saves take here, besides replicas; raises StorageError.

        Args:
            nbytes: Size of this rank's image.
        """
        return MemoryNeeds(nbytes, 1, 0, 0, memory_limits())

    def limit_buffers(self, count: int) -> None:  # noqa: B027 - not all stores have more than one
        """Use no more than ``count`` staging buffers for each image from now on."""

    @abstractmethod
    def to_commit(self, slots: Sequence[Slot]) -> list[tuple[Any, CkptID]]:
        """Return what the ``_save`` hook is called with to commit filled slots, in their order.

        A slot is committed once.

        Raises:
            StorageError: The store refused, or a slot was given back.
        """

    def release(self, slots: Sequence[Slot]) -> None:
        """Release slots whose pieces are committed, or will not be.

        Unfinished files are removed; committed pieces stay. No write of the slots may be under way.
        """
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
        """Release the slots of a failed save, and remove what was written of their pieces.

        Their memory may still be read or written.
        """
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
        """Open the image of a piece that any rank of this node has committed.

        Raises:
            StorageError: The piece is not here, or cannot be opened.
        """

    @abstractmethod
    def quarantine(self, identity: ShardIdentity, problem: Problem) -> None:
        """Keep a bad piece from being read again."""

    @abstractmethod
    def close(self) -> None:
        """Release the store's resources. Does nothing in a fork."""

    # Methods of an implementation for the memory of slots, and for the files written from them.

    @abstractmethod
    def _take_memory(self, slot: Slot, timeout_s: float) -> Buffer:
        """Take memory that the slot owns; raises as :meth:`reserve`."""

    @abstractmethod
    def _give_back(self, slot: Slot, *, was_unfinished: bool) -> None:
        """Reclaim the memory of a slot, which is no longer in use."""

    @abstractmethod
    def _drop_memory(self, slot: Slot) -> None:
        """Retire a slot's memory, which may still be in use, even if the slot has not noted it."""

    def _plan(self, slot: Slot) -> None:  # noqa: B027 - not all stores have something to plan
        """Prepare the commit of a filled slot."""

    def _remove_unfinished(self, identity: ShardIdentity) -> bool:
        """Remove the unfinished file of a piece; return whether there was one."""
        return True

    def _remove(self, identity: ShardIdentity) -> None:  # noqa: B027 - nothing is, without files
        """Remove the unfinished and the committed file of a piece."""

    def _forget(self, slot: Slot) -> None:
        slot.forget_content()
        with suppress(ValueError):
            self._slots.remove(slot)
