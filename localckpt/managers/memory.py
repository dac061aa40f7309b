"""Checkpoints in the memory of each node, outliving the process."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, Literal

import torch.distributed as dist

from localckpt.managers.store_manager import StoreCheckpointManager
from localckpt.replication.strategies import ReplicationStrategy
from localckpt.storage.memory import MemoryStore, default_root

__all__ = ["InMemoryCheckpointManager"]


class InMemoryCheckpointManager(StoreCheckpointManager):
    """Keeps each rank's shards, and replicas of others', in the node's shared memory.

    They are there after the trainer has died, and gone after the node has. A save is one copy into
    the file that keeps it.

    Args:
        session_id, repl_strategy: As for :class:`BaseCheckpointManager`.
        keep_last: How many complete checkpoints to keep; memory holds one more for each save under
            way.
        root: Directory in shared memory, the same for all ranks of a node; ``None`` for
            ``/dev/shm/localckpt-<uid>``.
        timeout, process_group, async_worker, safe_globals: As for :class:`BaseCheckpointManager`.

    Raises:
        StorageError: The directory cannot be used, or another live job uses it.
        SameMachineReplicationException: Replicas would be lost together with their originals.
    """

    def __init__(
        self,
        session_id: str = "",
        repl_strategy: ReplicationStrategy | None = None,
        *,
        keep_last: int = 1,
        root: str | os.PathLike[str] | None = None,
        timeout: float = 300.0,
        process_group: dist.ProcessGroup | None = None,
        async_worker: Literal["thread", "process"] = "thread",
        safe_globals: Iterable[Any] = (),
    ) -> None:
        super().__init__(
            session_id,
            repl_strategy,
            keep_last=keep_last,
            timeout=timeout,
            process_group=process_group,
            async_worker=async_worker,
            safe_globals=safe_globals,
        )
        self._use(lambda: MemoryStore(root or default_root(), session_id, self.rank, timeout))
