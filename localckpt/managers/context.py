"""Objects that the saves, the loads and the searches of one manager share."""

from __future__ import annotations

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

__all__ = ["Context"]


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """Objects that the saves, the loads and the searches of one manager share."""

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

    @property
    def images(self) -> DirectoryStore | None:
        """The store, if it keeps images; ``None`` for the hooks of a user's manager."""
        return self.store if isinstance(self.store, DirectoryStore) else None
