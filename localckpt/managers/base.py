"""Base class of managers that keep states in a storage of the user's own, by five hooks."""

from __future__ import annotations

from typing import Unpack

from localckpt.managers.manager import CheckpointManager
from localckpt.options import HookOptions, Options
from localckpt.ranks.ranks import MANAGER, Ranks, refused_together, timeout_in
from localckpt.replication.strategies import ReplicationStrategy
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.storage.hooks import Hooks, HookStore


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
