"""Makes the copies and other pieces that a loaded checkpoint lacks, behind training.

Until the next save is complete the loaded checkpoint is all there is, and a node that came back
empty holds nothing of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter

from localckpt.availability.inventory import Inventory
from localckpt.errors import CheckpointingException, StorageError
from localckpt.events.stream import EventStream
from localckpt.failure_texts import short
from localckpt.ids import Checkpoint, CkptID, Piece, ShardIdentity
from localckpt.managers.job_checkpoints import JobCheckpoints
from localckpt.ranks.failure import Attempt
from localckpt.ranks.ranks import Ranks
from localckpt.replication.redundancy import Lacking
from localckpt.replication.retrieval import carry_out, connect_for, new_name
from localckpt.replication.shard_plans import missing_copies_of_others, plan_shards
from localckpt.replication.strategies import ReplicationStrategy
from localckpt.replication.transport import Transport
from localckpt.state_dict.source import ShardSource
from localckpt.storage.directory import DirectoryStore
from localckpt.storage.hooks import Hooks, commit_here
from localckpt.storage.problem import Problem
from localckpt.storage.slot import Slot
from localckpt.threads import Task

__all__ = ["Reprotection"]

logger = logging.getLogger(__name__)

# Keeping what was computed, opening, reserving, sending, telling the outcome; then telling sizes,
# computing pieces, completing them, telling the outcome: each has the deadline once, and
# connecting is over before.
_STEPS = 10


class Reprotection:
    """The protection of one manager's loaded checkpoints.

    Args:
        store: This rank's pieces.
        strategy: Protects what the job saves.
        session_id: The training run.
        ranks: The ranks of the job. Used by nobody else: it works behind other calls.
        hooks: Commit a piece that has arrived.
        checkpoints: Refreshed when a checkpoint has got copies.
        events: Is told how that went.
    """

    def __init__(
        self,
        store: DirectoryStore,
        strategy: ReplicationStrategy,
        session_id: str,
        ranks: Ranks,
        hooks: Hooks,
        checkpoints: JobCheckpoints,
        events: EventStream,
    ) -> None:
        self._store = store
        self._strategy = strategy
        self._session_id = session_id
        self._ranks = ranks
        self._timeout_s = ranks.timeout_s
        self._hooks = hooks
        self._checkpoints = checkpoints
        self._events = events
        self._under_way: Task[None] | None = None
        self._work: _Work | None = None

    def begin(
        self,
        checkpoint: Checkpoint,
        inventory: Inventory,
        computed: Mapping[int, int],
        computed_by: Mapping[int, int],
        slots: Sequence[Slot],
        to_replace: Mapping[ShardIdentity, Problem],
    ) -> None:
        """Begin to make what a checkpoint lacks; all ranks call it.

        Args:
            checkpoint: The checkpoint that was loaded.
            inventory: What each node holds; what is made is added to it.
            computed: Sizes of the shards that were computed.
            computed_by: The rank of the job that has each of these.
            slots: Slots of those that were computed on this rank.
            to_replace: What is damaged on this node and may be written anew, and why.

        Raises:
            PeerLostError: A rank did not answer in time.
        """
        computed_on = {owner: inventory.node_of(computed_by[owner]) for owner in computed}
        for owner, nbytes in computed.items():
            inventory.add(checkpoint, owner, computed_on[owner], nbytes)
        lacking = self._lacking(checkpoint, inventory)
        if not (lacking.copies or lacking.renewal or computed):
            return
        logger.info(
            "iteration %d: %d shards have fewer copies than asked for, %d were computed%s: making "
            "them again",
            *(checkpoint.iteration, len(lacking.copies), len(computed)),
            f", {lacking.renewal}" if lacking.renewal else "",
        )
        work = _Work(
            self._ranks,
            self._store,
            self._hooks,
            self._session_id,
            checkpoint,
            inventory,
            lacking,
            {owner: computed_by[owner] for owner in computed},
            to_replace,
        )
        work.slots += slots
        try:
            self._connect(work)
        except CheckpointingException as error:
            work.drop()
            for owner, node in computed_on.items():
                inventory.remove(checkpoint, Piece(owner), node)
            logger.warning("%d shards stay with fewer copies: %s", len(lacking.copies), error)
            self._events.emit("reprotected", step=checkpoint.iteration, error=error)
            return
        # No daemon: the interpreter must not end while it is inside of gloo.
        self._work = work
        self._under_way = Task(lambda: self._make_all(work))
        self._under_way.start("localckpt-reprotection", daemon=False)

    def _lacking(self, checkpoint: Checkpoint, inventory: Inventory) -> Lacking:
        if checkpoint.world_size == self._ranks.world_size:
            return self._strategy.lacking(checkpoint, inventory)
        # The job's groups are not those of the ranks that saved it; whole copies protect any.
        tolerated = max(
            (group.tolerated for group in self._strategy.protection.values()), default=0
        )
        return Lacking(missing_copies_of_others(checkpoint, inventory, 1 + tolerated))

    def finish(self) -> None:
        """Return when nothing is under way any more.

        Raises:
            CheckpointingException: It does not come to an end.
        """
        if self._under_way is None:
            return
        deadline_s = _STEPS * self._timeout_s
        # An interrupt may have kept it from starting.
        if self._under_way.begins() and not self._under_way.wait(deadline_s):
            raise CheckpointingException(
                f"making copies of the loaded checkpoint has not ended after {deadline_s:g} s: is "
                f"the disk of this node stuck?"
            )
        self._under_way = self._work = None

    def cancel(self) -> None:
        """Give up what is under way; :meth:`finish` then does not wait for other ranks."""
        if self._under_way is not None and not self._under_way.done():
            self._ranks.stop_waiting()
            if (work := self._work) is not None:
                work.abort()

    def _connect(self, work: _Work) -> None:
        """Connect the ranks that take part; beforehand, so that :meth:`cancel` can cut them off."""
        ranks = self._ranks
        name = ranks.decide("name the connections for copies", new_name, itemgetter(0))
        with Attempt() as connecting:
            work.connect(name, self._strategy.rate_limit)
        try:
            ranks.agree("connect the ranks that make copies", connecting)
        except BaseException:
            work.disconnect()
            raise

    def _make_all(self, work: _Work) -> None:
        began = time.monotonic()
        iteration = work.checkpoint.iteration
        try:
            problems = work.keep_computed() if work.computed else []
            problems += work.make_copies() if work.lacking.copies else []
            problems += work.lacking.renewal.make(work) if work.lacking.renewal else []
        except CheckpointingException as error:
            logger.warning("shards of iteration %d stay with fewer copies: %s", iteration, error)
            self._events.emit("reprotected", began=began, step=iteration, error=error)
            return
        finally:
            work.disconnect()
            work.drop()
        self._checkpoints.refresh(work.checkpoint, work.inventory)
        if problems:
            # Ranks that failed together say the same.
            why = "; ".join(dict.fromkeys(problems))
            logger.warning(
                "shards of iteration %d have fewer copies than asked for until the next save: %s",
                iteration,
                why,
            )
            self._events.emit(
                "reprotected",
                began=began,
                step=iteration,
                outcome="failed",
                details={"error": short(why)},
            )
            return
        self._events.emit("reprotected", began=began, step=iteration, nbytes=work.nbytes)
        logger.info(
            "all shards of iteration %d have their copies again: %d bytes came here in %.3f s",
            *(iteration, work.nbytes, time.monotonic() - began),
        )


class _Work:
    """The making of what one checkpoint lacks; see :class:`Keeper`.

    All but slots and what is replaced is alike on all ranks.

    Args:
        ranks, store, hooks, session_id: As for :class:`Reprotection`.
        checkpoint, inventory, to_replace: As for :meth:`Reprotection.begin`.
        lacking: What is to be made.
        computed: Shards that were computed, with the rank of the job that has each.
    """

    def __init__(
        self,
        ranks: Ranks,
        store: DirectoryStore,
        hooks: Hooks,
        session_id: str,
        checkpoint: Checkpoint,
        inventory: Inventory,
        lacking: Lacking,
        computed: Mapping[int, int],
        to_replace: Mapping[ShardIdentity, Problem],
    ) -> None:
        self.ranks = ranks
        self.checkpoint = checkpoint
        self.inventory = inventory
        self.lacking = lacking
        self.computed = dict(computed)
        self.slots: list[Slot] = []
        self.nbytes = 0
        self._store = store
        self._hooks = hooks
        self._session_id = session_id
        self._to_replace = dict(to_replace)
        self._transport: Transport | None = None
        wanted: dict[int, list[int]] = {}
        for owner, receivers in lacking.copies.items():
            for rank in receivers:
                wanted.setdefault(rank, []).append(owner)
        self._plan = plan_shards(checkpoint, session_id, inventory, wanted)

    def connect(self, name: str, rate_limit: float | None) -> None:
        """Connect this rank to those that it works with; see :meth:`Renewal.connect`."""
        rank, timeout_s = self.ranks.rank, self.ranks.timeout_s
        self._transport = connect_for(self._plan, name, rank, timeout_s, rate_limit=rate_limit)
        if self.lacking.renewal is not None:
            self.lacking.renewal.connect(name, rank, timeout_s, rate_limit)

    def disconnect(self) -> None:
        """Give up the connections."""
        for connected in (self._transport, self.lacking.renewal):
            if connected is not None:
                connected.close()

    def abort(self) -> None:
        """Cut the connections off under whoever uses them."""
        for connected in (self._transport, self.lacking.renewal):
            if connected is not None:
                connected.abort()

    def drop(self) -> None:
        """Give all slots back, whatever became of them."""
        try:
            self._store.release(self.slots)
        except StorageError as error:
            logger.warning("what is unfinished could not be removed: %s", error)

    def keep_computed(self) -> list[str]:
        """Write what was computed; what went wrong."""
        with Attempt() as keeping:
            # No others are there yet.
            self.commit(self.slots)
        phase = f"keep what was computed of iteration {self.checkpoint.iteration}"
        failed = self.ranks.merge(phase, Attempt(), keeping.error_text)
        for owner, rank in self.computed.items():
            if rank in failed:
                node = self.inventory.node_of(rank)
                self.inventory.remove(self.checkpoint, Piece(owner), node)
        return [*failed.values()]

    def make_copies(self) -> list[str]:
        """Have shards sent to where they are missing; what went wrong."""
        slots: list[Slot] = []

        def accept(id_: CkptID, nbytes: int) -> memoryview:
            slots.append(self.reserve(self.identity(id_.rank), nbytes))
            return slots[-1].image

        with Attempt() as copying:
            carry_out(
                self.ranks,
                self._plan,
                lambda id_: self.open(self.identity(id_.rank)),
                accept,
                self.ranks.timeout_s,
                self._transport,
            )
            self.commit(slots)
        phase = f"restore the copies of iteration {self.checkpoint.iteration}"
        failed = self.ranks.merge(phase, Attempt(), copying.error_text)
        nbytes = self.inventory.shards(self.checkpoint)
        for owner, receivers in self.lacking.copies.items():
            for receiver in (rank for rank in receivers if rank not in failed):
                node = self.inventory.node_of(receiver)
                self.inventory.add(self.checkpoint, owner, node, nbytes[owner])
        return [*failed.values()]

    def identity(self, rank: int) -> ShardIdentity:
        # A piece that is made anew says of which lineage it is, as what was there before did.
        lineage = self.inventory.lineages.get(self.checkpoint.generation.epoch_id)
        return replace(self.checkpoint.shard(rank, self._session_id), lineage=lineage)

    def open(self, identity: ShardIdentity) -> ShardSource:
        return self._store.open(identity)

    def reserve(self, identity: ShardIdentity, nbytes: int) -> Slot:
        slot = self._store.reserve(identity, nbytes, self.ranks.timeout_s)
        self.slots.append(slot)
        return slot

    def commit(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            slot.arrived()
            with self._store.replacing(slot.identity, self._to_replace.get(slot.identity)):
                commit_here(self._store, self._hooks, [slot])
            if not self._store.holds(slot.identity):
                raise StorageError(f"{slot.identity} was written, and is not there")
            self.nbytes += slot.nbytes
