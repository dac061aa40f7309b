"""Interface of a node's checkpoint storage, and the life of its slots.

Managers know this module and ``slot.py``. Implementations: ``disk.py``, ``memory.py``, and
``hooks.py`` for a user's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from localckpt.ids import CkptID, ShardIdentity, ShardRecord
from localckpt.lineage import Lineage
from localckpt.state_dict.source import ShardSource
from localckpt.storage.buffers import Buffer
from localckpt.storage.problem import Problem
from localckpt.storage.slot import Slot

__all__ = ["Claim", "CommitJob", "Store", "Stored", "run_commit"]


@dataclass(frozen=True, slots=True)
class Stored:
    """A piece in a store, or a file that cannot be used.

    Attributes:
        name: Name of the file, for people; empty where there is none.
        record: The piece; ``None`` for a file that cannot be used.
        problem: Why it cannot.
    """

    name: str
    record: ShardRecord | None = None
    problem: Problem | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.problem or self.record}"


@dataclass(frozen=True, slots=True)
class CommitJob:
    """Pieces that are to be committed, in plain data.

    Attributes:
        commit: Commits one of them, given what ``pieces`` holds for it.
        pieces: In their order.
    """

    commit: Callable[[Any, CkptID], None]
    pieces: tuple[tuple[Any, CkptID], ...]


def run_commit(job: CommitJob) -> None:
    """Commit the pieces of a job one after another, in whatever process this is."""
    for piece, ckpt_id in job.pieces:
        job.commit(piece, ckpt_id)


class Claim:
    """One rank's hold on its part of a store, and the notes that it keeps there: here none."""

    owner = ""
    """The process that has it; empty where nobody asks."""

    def newest_epoch(self) -> int:
        """The highest epoch that began here, whether or not a shard of it is left; 0 for none."""
        return 0

    def begin_epoch(self, epoch: int, owners: Collection[str], timeout_s: float) -> None:
        """Note that an epoch has begun, even if none of its shards will be left.

        Args:
            epoch: Its number.
            owners: The owners of the job's ranks that share this store.
            timeout_s: How long the owner of another job that is ending may take.

        Raises:
            StorageError: Another job is alive here, or the epoch cannot be noted.
        """

    def noted_lineages(self) -> list[Lineage]:
        """Lineages of the epochs that began here last, each once."""
        return []

    def note_lineage(self, lineage: Lineage) -> None:
        """Note what an epoch resumed from, before it saves for the first time.

        Raises:
            StorageError: It cannot be noted here.
        """


class Store(ABC):
    """One rank's access to the pieces of its node.

    One thread saves and loads, another takes in the pieces of other ranks.

    Args:
        domain: Name of what is lost together: ranks with the same share a store.
        claim: This rank's hold on the store.
    """

    keeps_images = True
    """True if an image is kept byte for byte."""

    def __init__(self, domain: str, claim: Claim) -> None:
        self.domain = domain
        self.claim = claim
        self._slots: list[Slot] = []

    @property
    def slots(self) -> list[Slot]:
        """Slots that were reserved, and neither released nor discarded."""
        return list(self._slots)

    def reserve(
        self, identity: ShardIdentity, nbytes: int, timeout_s: float, *, is_kept: bool = True
    ) -> Slot:
        """Reserve memory for a piece.

        Args:
            identity: Identity of the piece.
            nbytes: Size of its image.
            timeout_s: The longest wait for older saves, in seconds.
            is_kept: Whether it may be committed; see :class:`Slot`.

        Raises:
            StorageError: There is no room.
            MismatchError: Such a piece cannot be kept here.
            CheckpointingException: Older saves kept all memory busy for too long.
        """
        slot = Slot(identity, nbytes, self._plan, is_kept=is_kept)
        # Known before it has memory: neither an interrupt nor an error leaves anything of it that
        # nobody gives back or removes.
        self._slots.append(slot)
        slot.take(self._take_memory(slot, timeout_s))
        return slot

    @abstractmethod
    def commit(self, slots: Sequence[Slot]) -> CommitJob:
        """Make the job that commits what is in slots, once for each.

        Raises:
            StorageError: The store refused, or a slot was given back.
        """

    def release(self, slots: Sequence[Slot]) -> None:
        """Give slots back whose pieces are committed, or will not be.

        What is unfinished of them is removed; what is committed stays, whenever it was. Nobody may
        be writing them.
        """
        with ExitStack() as steps:
            # One that cannot be cleaned up keeps no other from being given back.
            for slot in slots:
                steps.callback(self._release, slot)

    def _release(self, slot: Slot) -> None:
        slot.give_up()
        was_unfinished = True
        try:
            if slot.is_kept:
                was_unfinished = self._remove_unfinished(slot.identity)
        finally:
            # Also when the store does not work: it may again, and nobody else gives this back.
            self._give_back(slot, was_unfinished=was_unfinished)
        self._forget(slot)

    def discard(self, slots: Sequence[Slot]) -> None:
        """Give slots back of a save that failed, and remove what was written of them.

        Somebody may still be reading or writing their memory.
        """
        for slot in slots:
            slot.give_up()
        with ExitStack() as steps:
            # One that cannot be removed keeps no other from being removed.
            for slot in slots:
                if slot.is_kept:
                    steps.callback(self._remove, slot.identity)
            # Memory that a GPU may still write to is neither freed nor used again.
            for slot in slots:
                slot.end_filling()
            for slot in slots:
                steps.callback(self._drop_memory, slot)
        for slot in slots:
            self._forget(slot)

    @abstractmethod
    def list_stored(self) -> list[Stored]:
        """All pieces that can be read here, whichever rank they belong to, and bad files."""

    @abstractmethod
    def holds(self, identity: ShardIdentity) -> bool:
        """Return whether a piece that was saved here is committed and can be found again."""

    @abstractmethod
    def open(self, identity: ShardIdentity) -> ShardSource:
        """The image of a piece that any rank of this node has committed.

        Raises:
            StorageError: It is not there, or cannot be opened.
        """

    @abstractmethod
    def quarantine(self, identity: ShardIdentity, problem: Problem) -> None:
        """Keep a bad piece from being found again."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the store holds open. In a fork it does nothing."""

    # What an implementation does with the memory of slots, and with what is written of them.

    @abstractmethod
    def _take_memory(self, slot: Slot, timeout_s: float) -> Buffer:
        """Memory for a slot, which is its owner; raises as :meth:`reserve`."""

    @abstractmethod
    def _give_back(self, slot: Slot, *, was_unfinished: bool) -> None:
        """Take the memory of a slot back, which nobody uses any more."""

    @abstractmethod
    def _drop_memory(self, slot: Slot) -> None:
        """Take the memory of a slot out of use, noted or not: somebody may still use it."""

    def _plan(self, slot: Slot) -> None:  # noqa: B027 - not all stores have something to plan
        """Get ready what a filled slot needs to be committed."""

    def _remove_unfinished(self, identity: ShardIdentity) -> bool:
        """Remove what is unfinished of a piece; whether there was any."""
        return True

    def _remove(self, identity: ShardIdentity) -> None:  # noqa: B027 - nothing is, without files
        """Remove what is unfinished or committed of a piece."""

    def _forget(self, slot: Slot) -> None:
        slot.forget_content()
        with suppress(ValueError):
            self._slots.remove(slot)
