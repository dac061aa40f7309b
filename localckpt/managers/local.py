"""Checkpoints on the disk of each node."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Unpack

from localckpt.managers.manager import CheckpointManager
from localckpt.options import Options, StoreOptions
from localckpt.ranks.ranks import MANAGER, Ranks, refused_together
from localckpt.replication.strategies import ReplicationStrategy
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.storage.directory import DirectoryStore, ReadOnlyStore


class LocalCheckpointManager(CheckpointManager):
    """Keeps each rank's shards, and replicas of others', on the node's own disk.

    All ranks of a node share the directory. With a replication strategy that has its process
    groups, making the manager is a collective: placement is checked at once.

    Args:
        root_local_ckpt_dir: Directory on a disk of this node; made if it is not there.
        session_id: A name for the training run; two runs may share a directory.
        repl_strategy: Protects this rank's shards on other nodes; ``None`` for none.
        options: See :class:`localckpt.options.Options`. ``keep_last`` is 2 by default.

    Raises:
        StorageError: The directory cannot be used, or another live job uses it.
        SameMachineReplicationException: Replicas would be lost together with their originals.
    """

    store: DirectoryStore

    def __init__(
        self,
        root_local_ckpt_dir: str | os.PathLike[str],
        session_id: str = "",
        repl_strategy: ReplicationStrategy | None = None,
        **options: Unpack[StoreOptions],
    ) -> None:
        with refused_together(MANAGER, options.get("process_group"), options.get("timeout")):
            chosen = Options.of_store(options, keep_last=2)

        def open_store(ranks: Ranks, allowed: SafeGlobals) -> DirectoryStore:
            place = root_local_ckpt_dir, session_id, ranks.rank, chosen.timeout
            if chosen.read_only:
                return ReadOnlyStore(*place)
            return DirectoryStore(*place, num_buffers=chosen.num_buffers)

        super().__init__(session_id, repl_strategy, chosen, open_store)

    @property
    def local_ckpt_dir(self) -> Path:
        """The folder of this rank's shards."""
        return self.store.folder
