"""Parts of a manager: the objects that its saves and loads share, made and closed together."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

from localckpt.errors import StorageError
from localckpt.events.stream import EventStream
from localckpt.managers.capture import StateCapture
from localckpt.managers.epoch import Epoch
from localckpt.managers.handed_over import ForeignQueues
from localckpt.managers.in_flight import InFlight
from localckpt.managers.job_checkpoints import JobCheckpoints
from localckpt.managers.promotion import Promotion
from localckpt.managers.replica_check import ReplicaCheck
from localckpt.managers.replicator import Replicator
from localckpt.managers.reprotection import Reprotection
from localckpt.managers.space import SpaceCheck
from localckpt.options import SaveOptions
from localckpt.ranks.ranks import Ranks
from localckpt.ranks.refusals import MANAGER
from localckpt.replication.strategies import NoReplication, ReplicationStrategy
from localckpt.resuming import Resuming
from localckpt.state_dict.global_view import Job
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.storage.hooks import Hooks
from localckpt.storage.store import Store
from localckpt.threads import SerialThread, Task

__all__ = ["Parts"]

logger = logging.getLogger(__name__)

# Notes of metrics that a stuck disk holds up do not hold up the end.
_NOTED_S = 2.0

StoreT = TypeVar("StoreT", bound=Store)


class Parts:
    """Parts of one manager.

    Args:
        session_id: The training run.
        repl_strategy: Protects what is saved; ``None`` for nothing.
        options: Options of the manager.
        hooks: The five hooks of the manager.
        hint: As for :class:`Ranks`.

    Attributes:
        events: What happens here; to nowhere unless the manager was given a stream.
        ranks: The ranks of the job.
        strategy: Protects what is saved.
        allowed: Classes and functions that a shard may name.
        checkpoints: The complete checkpoints of the job.
        in_flight: Saves that are not over.
        space: Looks whether there is room; ``None`` where nobody can know.
        reprotection: Makes the copies that a loaded checkpoint lacks; ``None`` for none.
        replica_check: Compares what ranks have in common.
        promotions: Promotions of checkpoints to shared storage that may not be over.
        store: Keeps shards.
        epoch: The epoch that saves belong to.
        resuming: Counts starts of the job in vain.
        capture: Captures states in slots of the store.
        replicator: Replicates what is saved; ``None`` without a strategy.
        foreign: Saves that queues of other libraries carry out.
    """

    store: Store
    epoch: Epoch
    resuming: Resuming
    capture: StateCapture
    replicator: Replicator | None
    foreign: ForeignQueues

    def __init__(
        self,
        session_id: str,
        repl_strategy: ReplicationStrategy | None,
        options: SaveOptions,
        hooks: Hooks,
        hint: Callable[[], str],
    ) -> None:
        self.session_id = session_id
        self.options = options
        self.hooks = hooks
        self.events = options.events or EventStream()
        # Without the session in its name: ranks with different ones must meet, to learn of it.
        self.ranks = Ranks(MANAGER, options.process_group, options.timeout, hint=hint)
        self._is_protected = repl_strategy is not None
        self.strategy = repl_strategy or NoReplication(options.timeout, options.process_group)
        self.allowed = SafeGlobals(options.safe_globals)
        self.checkpoints = JobCheckpoints(self.strategy)
        self.in_flight = InFlight()
        self.space: SpaceCheck | None = None
        self.reprotection: Reprotection | None = None
        self.replica_check = ReplicaCheck(options, self.ranks, self.events)
        self.promotions: list[Promotion] = []
        self._noting = SerialThread("localckpt-note")
        self._noted: Task[None] | None = None

    def open(self, open_store: Callable[[], StoreT]) -> StoreT:
        """Open the store, and make the parts that need it; returns the store."""
        store = self.store = open_store()
        self.epoch = Epoch(
            *(self.ranks, store, self.strategy, self.session_id, self.checkpoints, self.events),
            is_elastic=self.options.elastic,
        )
        self.resuming = Resuming(store.claim, self.options.max_attempts)
        job = Job(self.ranks.rank, self.ranks.global_ranks)
        self.capture = StateCapture(store, self.allowed, self.options, job)
        self.replicator = Replicator(self.strategy, self.options) if self._is_protected else None
        self.foreign = ForeignQueues(self.options.timeout)
        return store

    def note_metrics(self) -> None:
        """Have this node note the metrics of complete checkpoints, and no others, behind training.

        All of them, since the node may have taken the place of another one.
        """
        nodes, rank = self.epoch.nodes, self.ranks.rank
        if self.options.retention.best is None or nodes.index(nodes[rank]) != rank:
            return
        measured = self.checkpoints.measured

        def note() -> None:
            try:
                for metric in measured.values():
                    self.store.claim.note_measured(metric)
                # Saves under way may have noted theirs.
                self.store.claim.forget_measured(
                    lambda c: c not in measured and c.iteration not in self.checkpoints.under_way
                )
            except StorageError as error:
                logger.warning("this node has not noted the metrics of checkpoints: %s", error)

        self._noted = Task(note)
        try:
            self._noting.submit(self._noted)
        except RuntimeError:
            self._noted.run()

    def await_reprotected(self) -> None:
        """Wait until no copies of a loaded checkpoint are made behind other calls."""
        if self.reprotection is not None:
            self.reprotection.finish()

    def stop_waiting(self) -> None:
        """End the exchanges with other ranks, which may not come any more."""
        if self.replicator is not None:
            self.replicator.cancel()
        if self.reprotection is not None:
            self.reprotection.cancel()

    def close(self) -> None:
        """Wait for all work, and close all parts but the connections of ranks."""
        with ExitStack() as closing:
            if not self._is_protected:
                closing.callback(self.strategy.close)
            closing.callback(self.close_store)
            if self._noted is not None:
                closing.callback(self._noted.wait, min(_NOTED_S, self.options.timeout))
            closing.callback(self.foreign.close)
            if self.replicator is not None:
                closing.callback(self.replicator.close)
            closing.callback(self.in_flight.clear)
            for promotion in self.promotions:
                closing.callback(promotion.await_end, self.options.timeout)
            self.await_reprotected()

    def close_store(self) -> None:
        """Close the store, and the capture of states."""
        with ExitStack() as closing:
            closing.callback(self.store.close)
            self.capture.close()
