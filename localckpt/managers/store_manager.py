"""What the disk and the memory manager have in common: shards are images in a store."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch.distributed as dist

from localckpt.errors import CheckpointingException, StorageError
from localckpt.ids import CkptID, ShardIdentity
from localckpt.managers.base import BaseCheckpointManager
from localckpt.managers.joining import JOINING
from localckpt.managers.shelf import LoadOptions
from localckpt.managers.stored import StoreShelf
from localckpt.replication.agreement import give_up
from localckpt.replication.strategies import LazyCliqueReplicationStrategy, ReplicationStrategy
from localckpt.storage.store import Store
from localckpt.storage.write import write_shards

__all__ = ["StoreCheckpointManager"]


class StoreCheckpointManager(BaseCheckpointManager):
    """A manager whose five hooks work on a store; made by its subclasses."""

    def __init__(
        self,
        session_id: str,
        repl_strategy: ReplicationStrategy | None,
        *,
        keep_last: int,
        timeout: float,
        process_group: dist.ProcessGroup | None,
        async_worker: Literal["thread", "process"],
        safe_globals: Iterable[Any],
    ) -> None:
        if keep_last < 1:
            raise CheckpointingException(f"keep_last is {keep_last}; it must be at least 1")
        if async_worker == "process" and type(self)._save is not StoreCheckpointManager._save:
            raise CheckpointingException(
                f"{type(self).__name__} has a _save of its own, which the built-in worker process "
                f"would not call: use async_worker='thread'"
            )
        super().__init__(
            session_id,
            repl_strategy,
            timeout=timeout,
            process_group=process_group,
            async_worker=async_worker,
            safe_globals=safe_globals,
        )
        self.keep_last = keep_last

    def _use(self, open_store: Callable[[], Store]) -> None:
        try:
            store = open_store()
        except Exception as error:
            give_up(self._coordinator, JOINING, error)
            raise
        self._stored = StoreShelf(store, self._allowed, self.timeout)
        self._shelf = self._stored
        lazy = isinstance(self.repl_strategy, LazyCliqueReplicationStrategy)
        if self.repl_strategy is not None and not lazy:
            # A placement that protects from nothing is an error now, not at the first save.
            try:
                self._join()
            except BaseException:
                self._stored.close()
                raise

    @property
    def store(self) -> Store:
        """This node's store."""
        return self._stored.store

    def _my_ckpt_ids(self) -> Iterable[CkptID]:
        return [record.identity.ckpt_id for record in self._stored.inventory()]

    def _load(self, ckpt_id: CkptID) -> Any:
        return self._stored.restore(self._newest(ckpt_id), None, LoadOptions())[0]

    def _save(self, state_dict: Any, ckpt_id: CkptID) -> None:
        """Carry out a write; ``state_dict`` is the staged shard's :class:`ShardWrite`."""
        write_shards([state_dict])

    def _cleanup(self, iteration: int) -> None:
        self._stored.settle(iteration)
        if len(self._complete) >= self.keep_last:
            oldest_kept = self._complete[self.keep_last - 1]
            self.store.retire(oldest_kept.version, self._adopted_ranks())

    def _cleanup_failed_save(self, iteration: int) -> None:
        self._stored.take_back(iteration)

    def _adopted_ranks(self) -> set[int]:
        """Ranks with a folder on this node that now run elsewhere; one rank looks after them."""
        assert self._domains is not None
        here = [r for r, d in enumerate(self._domains) if d == self._stored.failure_domain]
        return self.store.ranks_with_folders() - set(here) if self.rank == here[0] else set()

    def _newest(self, ckpt_id: CkptID) -> ShardIdentity:
        found = [r.identity for r in self._stored.inventory() if r.identity.ckpt_id == ckpt_id]
        if not found:
            raise StorageError(f"this node does not hold {ckpt_id}")
        return max(found, key=lambda identity: identity.version)
