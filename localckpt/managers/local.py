"""Managers of each kind of store: a disk, memory that outlives the process, a user's five hooks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeAlias, Unpack

from localckpt.errors import CheckpointingException
from localckpt.managers.manager import CheckpointManager, agreed_session
from localckpt.options import HookOptions, Options, StoreOptions
from localckpt.ranks.ranks import MANAGER, Ranks, refused_together, timeout_in
from localckpt.replication.strategies import ReplicationStrategy
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.storage.directory import DirectoryStore, MemoryStore, ReadOnlyStore
from localckpt.storage.hooks import Hooks, HookStore
from localckpt.storage.names import default_root

StrPath: TypeAlias = str | os.PathLike[str]


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
        root_local_ckpt_dir: StrPath,
        session_id: str = "",
        repl_strategy: ReplicationStrategy | None = None,
        **options: Unpack[StoreOptions],
    ) -> None:
        with refused_together(MANAGER, options.get("process_group"), timeout_in(options)):
            chosen = Options.of_store(options, keep_last=2)

        def open_store(
            ranks: Ranks, allowed: SafeGlobals, root: StrPath = root_local_ckpt_dir
        ) -> DirectoryStore:
            place = root, session_id, ranks.rank, chosen.timeout
            if chosen.read_only:
                return ReadOnlyStore(*place)
            buffers, limit = chosen.num_buffers, chosen.staging_limit
            return DirectoryStore(*place, num_buffers=buffers, staging_limit=limit)

        super().__init__(session_id, repl_strategy, chosen, open_store)

    @property
    def local_ckpt_dir(self) -> Path:
        """The folder of this rank's shards."""
        return self.store.folder


class InMemoryCheckpointManager(CheckpointManager):
    """Keeps each rank's shards, and replicas of others', in the node's shared memory.

    They are there after the trainer has died, and gone after the node has. A save is one copy into
    the file that keeps it.

    Args:
        session_id: A name for the training run. Without it, and without ``root``, it names the
            program: its main script, its arguments and the working directory, as the first rank
            has them.
        repl_strategy: Protects this rank's shards on other nodes; ``None`` for none.
        root: Directory in shared memory, the same for all ranks of a node; ``None`` for
            ``/dev/shm/localckpt-<uid>``.
        options: See :class:`localckpt.options.Options`. ``keep_last`` is 1 by default; memory holds
            one more for each save under way.

    Raises:
        CheckpointingException: There is neither a ``session_id`` nor a ``root``, and nothing to
            name the program by.
        StorageError: The directory cannot be used, or another live job uses it.
        SameMachineReplicationException: Replicas would be lost together with their originals.
    """

    store: DirectoryStore

    def __init__(
        self,
        session_id: str = "",
        repl_strategy: ReplicationStrategy | None = None,
        *,
        root: StrPath | None = None,
        **options: Unpack[StoreOptions],
    ) -> None:
        names_itself = root is None and not session_id
        group, timeout = options.get("process_group"), timeout_in(options)
        with refused_together("session" if names_itself else MANAGER, group, timeout):
            chosen = Options.of_store(options, keep_last=1)
            if chosen.staging_limit is not None:
                raise CheckpointingException(
                    f"staging_limit is {chosen.staging_limit}, and checkpoints in memory take what "
                    f"they have: it is for checkpoints on disk"
                )
            if names_itself and chosen.read_only:
                raise CheckpointingException(
                    f"read_only=True in {default_root()}: give the session_id of the job whose "
                    f"checkpoints are to be loaded (localckpt ls shows them)"
                )
        self._names_itself = names_itself

        def open_store(
            ranks: Ranks, allowed: SafeGlobals, root: StrPath | None = root
        ) -> DirectoryStore:
            place = root or default_root(), self.session_id, ranks.rank, chosen.timeout
            if chosen.read_only:
                return ReadOnlyStore(*place)
            buffers, most = chosen.num_buffers, chosen.retention.most
            return MemoryStore(*place, num_buffers=buffers, keep_last=most)

        super().__init__(session_id, repl_strategy, chosen, open_store)

    def _name_session(self) -> None:
        if not self._names_itself:
            return
        ranks = Ranks("session", self._options.process_group, self._options.timeout)
        try:
            self.session_id = agreed_session(ranks, self.session_id)
        finally:
            ranks.close()


class BaseCheckpointManager(Hooks, CheckpointManager):
    """Saves and loads this rank's state together with all other ranks, by hooks of a subclass.

    Every rank makes its manager and calls its methods in the same order as the others. A subclass
    that implements the five hooks keeps shards wherever it likes; the protocol, replication and
    both ways of saving come with this class. Hooks know no marks, so checkpoints are not marked.

    Args:
        session_id: A name for the training run; two runs may share a directory.
        repl_strategy: Protects this rank's shards on other nodes; ``None`` for none.
        options: See :class:`localckpt.options.Options`.
    """

    def __init__(
        self,
        session_id: str = "",
        repl_strategy: ReplicationStrategy | None = None,
        **options: Unpack[HookOptions],
    ) -> None:
        with refused_together(MANAGER, options.get("process_group"), timeout_in(options)):
            if repl_strategy is not None:
                repl_strategy.require_states(type(self).__name__)
            chosen = Options.of_hooks(options)

        def open_store(ranks: Ranks, allowed: SafeGlobals) -> HookStore:
            return HookStore(self, session_id, ranks.rank, ranks.world_size, allowed)

        super().__init__(session_id, repl_strategy, chosen, open_store)
