"""Store behind the five hooks of a user's own manager: converts between states and images."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from localckpt.errors import MismatchError, RestoreError, StorageError
from localckpt.ids import CkptID, Generation, ShardIdentity, ShardRecord
from localckpt.state_dict.basic import TensorAwareStateDict
from localckpt.state_dict.image import pack, unpack
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.source import MemorySource
from localckpt.storage.buffers import Buffer, PrivateBuffer, allocate
from localckpt.storage.catalog import Problem
from localckpt.storage.store import Claim, Slot, Store, Stored


class Hooks(ABC):
    """The five hooks by which a manager keeps states in a storage of the user's own."""

    @abstractmethod
    def _my_ckpt_ids(self) -> Iterable[CkptID]:
        """Return the IDs of all shards that are kept here, replicas of other ranks' included."""

    @abstractmethod
    def _load(self, ckpt_id: CkptID) -> TensorAwareStateDict:
        """Read a shard; raises CheckpointingException when it cannot.

        The state that it returns belongs to the caller, who may train on with its tensors.
        """

    @abstractmethod
    def _save(self, state_dict: TensorAwareStateDict, ckpt_id: CkptID) -> None:
        """Keep a shard. Its tensors are in host memory, and it belongs to the hook.

        It may run in another thread while the other hooks are called.
        """

    @abstractmethod
    def _cleanup(self, iteration: int) -> None:
        """Prune older checkpoints: ``iteration`` is complete on all ranks."""

    @abstractmethod
    def _cleanup_failed_save(self, iteration: int) -> None:
        """Remove what is here of ``iteration``, whose save failed."""


class HookStore(Store):
    """Store of one rank that keeps shards by its manager's hooks, which know them by the ID alone.

    Each rank counts as a failure domain of its own. Hooks remove old and failed shards themselves.
    """

    keeps_images = False

    def __init__(
        self, hooks: Hooks, session_id: str, rank: int, world_size: int, allowed: SafeGlobals
    ) -> None:
        super().__init__(f"rank {rank}", Claim())
        self._hooks = hooks
        self._session_id = session_id
        self._world_size = world_size
        self._allowed = allowed

    def commit(self, slots: Sequence[Slot]) -> None:
        # All of them first: a slot that was given back is an error before anything is saved.
        images = [(slot.identity, MemorySource(slot.image)) for slot in slots]
        for identity, image in images:
            state = unpack(image, expect=identity, allowed=self._allowed)
            self._hooks._save(state, identity.ckpt_id)

    def list_stored(self) -> list[Stored]:
        generation, world_size = Generation(0, 0), self._world_size
        return [
            Stored("", ShardRecord(ShardIdentity(session, generation, i, rank, world_size), 0))
            for i, rank, session in self._hooks._my_ckpt_ids()
            if session == self._session_id
        ]

    def holds(self, identity: ShardIdentity) -> bool:
        return identity.ckpt_id in {CkptID(*i) for i in self._hooks._my_ckpt_ids()}

    def load(self, identity: ShardIdentity) -> TensorAwareStateDict:
        """Load a shard's state by the ``_load`` hook; raises as :meth:`open`."""
        ckpt_id = identity.ckpt_id
        try:
            return self._hooks._load(ckpt_id)
        except (MemoryError, RestoreError):
            raise
        except Exception as error:
            # A StorageError makes the load try another copy, whatever the hook raised.
            raise StorageError(f"{ckpt_id} cannot be read: {error!r}") from error

    def open(self, identity: ShardIdentity) -> MemorySource:
        return pack(self.load(identity), identity)

    def quarantine(self, identity: ShardIdentity, problem: Problem) -> None:
        """Do nothing: there is no hook for it, and this run does not read the copy again."""

    def clean_up(self, iteration: int) -> None:
        self._hooks._cleanup(iteration)

    def clean_up_failed_save(self, iteration: int) -> None:
        self._hooks._cleanup_failed_save(iteration)

    def close(self) -> None:
        self.release(self.slots)

    def _take_memory(self, slot: Slot, timeout_s: float) -> Buffer:
        if not slot.identity.is_shard:
            raise MismatchError(
                f"{slot.identity} cannot be kept: the hooks of a manager keep states, and it has "
                f"none"
            )
        buffer = allocate(PrivateBuffer, slot.nbytes)
        buffer.take(slot)
        return buffer

    def _drop_memory(self, slot: Slot) -> None:
        if (buffer := slot.buffer) is not None:
            buffer.close()
