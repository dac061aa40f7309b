"""Base class of the disk and the memory manager: shards are images in a store."""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, SupportsIndex

from localckpt.async_save.request import AsyncRequest
from localckpt.availability.ordering import newest_first
from localckpt.errors import StorageError
from localckpt.failure_texts import shown
from localckpt.ids import CkptID, ShardIdentity
from localckpt.managers.back_pressure import LimitedInFlight
from localckpt.managers.base import BaseCheckpointManager
from localckpt.managers.calls import one_call
from localckpt.managers.promotion import DrainTarget, Promotion, promotable
from localckpt.managers.reports import MemoryPlan
from localckpt.managers.reprotection import Reprotection
from localckpt.managers.restoring import LoadOptions, restore
from localckpt.managers.space import SpaceCheck, plan_memory
from localckpt.options import SaveOptions
from localckpt.ranks.ranks import Ranks
from localckpt.ranks.refusals import MANAGER, refused_together
from localckpt.replication.strategies import LazyCliqueReplicationStrategy, ReplicationStrategy
from localckpt.state_dict.basic import wrapped
from localckpt.storage.directory import DirectoryStore
from localckpt.storage.kept_shard import KeptShard
from localckpt.storage.problem import Problem
from localckpt.storage.write import write_shard

__all__ = ["StoreCheckpointManager"]

logger = logging.getLogger(__name__)


class StoreCheckpointManager(BaseCheckpointManager):
    """Manager whose five hooks work on a store; the base of the built-in managers."""

    def _use_store(
        self,
        session_id: str,
        repl_strategy: ReplicationStrategy | None,
        options: SaveOptions,
        open_store: Callable[[], DirectoryStore],
    ) -> None:
        """Set the manager up, and open its store; called once, by the constructor."""
        with refused_together(MANAGER, options.process_group, options.timeout):
            # Before anything can fail, so that all ranks have made as many.
            self._reprotecting = Ranks("redundancy", options.process_group, options.timeout)
            self.read_only = options.read_only
            self._set_up(session_id, repl_strategy, options)
            parts = self._parts
            self.store = parts.open(open_store)
            self.store.on_quarantine = self._note_quarantined
            parts.in_flight = LimitedInFlight(self.store, parts.ranks, options)
            parts.space = SpaceCheck(self.store, options.retention.most)
            if not self.read_only:
                parts.reprotection = Reprotection(parts, self.store, self._reprotecting)
        lazy = isinstance(self.repl_strategy, LazyCliqueReplicationStrategy)
        if self.repl_strategy is not None and not lazy:
            # A placement that protects from nothing is an error now, not at the first save.
            try:
                self._join()
            except BaseException:
                parts.close_store()
                for ranks in self._all_ranks():
                    ranks.abandon()
                raise

    def __repr__(self) -> str:
        return shown(self, self.session_id, self.store.root)

    def _all_ranks(self) -> tuple[Ranks, ...]:
        return (*super()._all_ranks(), self._reprotecting)

    def warm_up(self, state_dict: Any) -> None:
        """Prepare, in the background, for saves of such a state; its values are not read.

        Lays it out and makes the staging buffers, which the first save would have to wait for.

        Raises:
            CheckpointingException: The state holds something that cannot be saved.
        """
        self._require_writable()
        self._calls.require_own_process()
        self._parts.await_reprotected()
        parts = self._parts
        identity = parts.epoch.identity(0)
        neighbours = parts.capture.neighbours(parts.epoch.known_nodes, self.rank)
        capture = parts.capture.planner.capture(wrapped(state_dict), neighbours)
        self.store.prepare(identity.piece, capture.nbytes(identity), capture.gpu)

    @one_call
    def promote(
        self, iteration: SupportsIndex, to: DrainTarget, *, rate_limit: float | None = None
    ) -> AsyncRequest:
        """Drain a complete checkpoint to shared storage, behind training; all ranks call it.

        It is written from the images on the nodes, so training neither copies its state once more
        nor waits. Each rank drains its own shard; one that its node lacks is drained from a copy by
        a rank whose node has it. What several ranks have alike is written once.
        The nodes keep the checkpoint until the promotion is finalized. A drain that was cut off
        goes on where it was when the same checkpoint is promoted again.

        Args:
            iteration: The checkpoint; the newest one, if several have the number.
            to: A :class:`GlobalCheckpointManager` of the same ranks.
            rate_limit: Bytes a second that each rank writes at most; ``None`` for any number. The
                ranks of a node together write as many times more.

        Returns:
            The request to hand to an :class:`AsyncCallsQueue`, which raises whatever goes wrong
            from here on. Give promotions a queue of their own: a queue finalizes its calls in
            order, and saves would wait.

        Raises:
            NoReplicasAvailableError: The checkpoint is not complete, or not kept any more.
            MismatchError: Another number of ranks has saved it.
            CheckpointingException: Its save is under way; or it is marked bad; or ``to`` is closed,
                or of other ranks. As all of these the same on every rank, and nothing was done.
            PeerLostError: A rank did not answer in time, when the job had not looked yet what the
                nodes hold.
        """
        self._require_writable()
        iteration = operator.index(iteration)
        parts = self._parts
        # This rank's shard may be among what a load has fetched, and not be kept yet.
        parts.await_reprotected()
        checkpoints = parts.checkpoints
        if checkpoints.seen is None and not checkpoints.complete:
            self._find_latest()
        checkpoint = promotable(iteration, checkpoints, self.world_size)
        identity = checkpoint.shard(self.rank, self.session_id)
        shard = KeptShard(self.store, identity, parts.allowed)
        promotion = Promotion(checkpoint, shard, to, rate_limit, checkpoints)
        parts.promotions = [*(p for p in parts.promotions if not p.is_over), promotion]
        return promotion.request(partial(self._finalize_promotion, promotion))

    def _finalize_promotion(self, promotion: Promotion) -> None:
        promotion.finalize()
        logger.info("iteration %d is drained", promotion.checkpoint.iteration)

    def wait_staged(self) -> None:
        """Wait until no save reads the state, which may then be changed in any way.

        Only with ``guard`` is there something to wait for, and its optimizers wait by themselves.
        """
        self._parts.capture.await_copied()

    def memory_plan(self) -> MemoryPlan:
        """Return the memory of this node that saves of this rank take.

        Raises:
            CheckpointingException: Nothing was saved yet, nor :meth:`warm_up` called.
        """
        return plan_memory(self.store)

    def _my_ckpt_ids(self) -> Iterable[CkptID]:
        return [identity.ckpt_id for identity in self._shards_here()]

    def _load(self, ckpt_id: CkptID) -> Any:
        identity = self._newest(ckpt_id)
        return restore(self.store, identity, {}, LoadOptions(), self._parts.allowed)[0]

    def _save(self, state_dict: Any, ckpt_id: CkptID) -> None:
        """Carry out a write; ``state_dict`` is a :class:`ShardWrite`."""
        write_shard(state_dict)

    def _cleanup(self, iteration: int) -> None:
        checkpoints, events = self._parts.checkpoints, self._parts.events
        if (over := checkpoints.keep(iteration, self._parts.options.retention)) is not None:
            began = time.monotonic()
            if self.store.prune(lambda shard: over.takes(shard.checkpoint), self._adopted_ranks()):
                kept = sorted({checkpoint.iteration for checkpoint in checkpoints.complete})
                events.emit("pruned", began=began, step=iteration, details={"kept": kept})

    def _cleanup_failed_save(self, iteration: int) -> None:
        """Do nothing: what was written is removed with the slots of the save."""

    def _note_quarantined(self, path: Path, problem: Problem) -> None:
        details = {"path": str(path), "error": str(problem)}
        self._parts.events.emit("quarantined", details=details)

    def _adopted_ranks(self) -> set[int]:
        """Return the ranks whose folders this rank cleans up: they now run on other nodes."""
        nodes = self._parts.epoch.nodes
        here = [rank for rank, node in enumerate(nodes) if node == nodes[self.rank]]
        return self.store.claim.ranks() - set(here) if self.rank == here[0] else set()

    def _newest(self, ckpt_id: CkptID) -> ShardIdentity:
        found = [identity for identity in self._shards_here() if identity.ckpt_id == ckpt_id]
        if not found:
            raise StorageError(f"this node does not hold {ckpt_id}")
        lineages = {i.lineage.epoch: i.lineage for i in found if i.lineage is not None}
        by_checkpoint = {identity.checkpoint: identity for identity in found}
        return by_checkpoint[newest_first(by_checkpoint, lineages)[0]]

    def _shards_here(self) -> list[ShardIdentity]:
        records = [stored.record for stored in self.store.list_stored() if stored.record]
        return [record.identity for record in records if record.identity.is_shard]
