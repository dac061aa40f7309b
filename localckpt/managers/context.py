"""Objects that the saves, the loads and the searches of one manager share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from localckpt.events.stream import EventStream
from localckpt.managers.epoch import Epoch
from localckpt.managers.job_checkpoints import JobCheckpoints
from localckpt.options import Options
from localckpt.ranks.ranks import Ranks
from localckpt.replication.strategies import ReplicationStrategy
from localckpt.resuming import Resuming
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.storage.directory import DirectoryStore
from localckpt.storage.store import Store


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """Objects that the saves, the loads and the searches of one manager share.

    Attributes:
        session_id: The training run.
        options: Options of the manager.
        events: Stream of what happens here; to nowhere unless the manager was given one.
        ranks: The ranks of the job.
        strategy: Protects what is saved.
        allowed: Classes and functions that a shard may name.
        store: Keeps this rank's pieces.
        checkpoints: The complete checkpoints of the job.
        epoch: The epoch that saves belong to.
        resuming: Counts starts of the job in vain.
        placed: For each rank the place of its store, if that is no node's.
    """

    session_id: str
    options: Options
    events: EventStream
    ranks: Ranks
    strategy: ReplicationStrategy
    allowed: SafeGlobals
    store: Store
    checkpoints: JobCheckpoints
    epoch: Epoch
    resuming: Resuming
    placed: Sequence[str] = ()

    @property
    def nodes(self) -> Sequence[str]:
        """For each rank the name of the node whose store it reads, once the ranks have joined."""
        return self.placed or self.epoch.nodes

    @property
    def images(self) -> DirectoryStore | None:
        """The store, if it keeps images; ``None`` for the hooks of a user's manager."""
        return self.store if isinstance(self.store, DirectoryStore) else None
