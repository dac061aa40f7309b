"""Checkpoints on the disk of each node."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, Literal

import torch.distributed as dist

from localckpt.managers.store_manager import StoreCheckpointManager
from localckpt.replication.strategies import ReplicationStrategy
from localckpt.storage.disk import DiskStore

__all__ = ["LocalCheckpointManager"]


class LocalCheckpointManager(StoreCheckpointManager):
    """Keeps each rank's shards, and replicas of others', on the node's own disk.

    All ranks of a node share the directory. With a replication strategy that has its process
    groups, making the manager is a collective: placement is checked at once.

    Args:
        root_local_ckpt_dir: Directory on a disk of this node; made if it is not there.
        session_id, repl_strategy: As for :class:`BaseCheckpointManager`.
        keep_last: How many complete checkpoints to keep; the disk holds one more for each save
            under way.
        timeout, process_group, async_worker, safe_globals: As for :class:`BaseCheckpointManager`.

    Raises:
        StorageError: The directory cannot be used, or another live job uses it.
        SameMachineReplicationException: Replicas would be lost together with their originals.
    """

    def __init__(
        self,
        root_local_ckpt_dir: str | os.PathLike[str],
        session_id: str = "",
        repl_strategy: ReplicationStrategy | None = None,
        *,
        keep_last: int = 2,
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
        self._use(
            lambda: DiskStore(
                root_local_ckpt_dir, session_id, self.rank, timeout, writer=async_worker
            )
        )
