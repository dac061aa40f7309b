"""Copies of shards on other nodes, and other pieces: of a save, and what checkpoints lack.

Copies of saves are made one after the other in the order in which the saves were called, which is
the same on all ranks; who runs the requests that ``save`` returns, and when, does not matter to
them. Until the next save is complete a loaded checkpoint is all there is, and a node that came back
empty holds nothing of it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from operator import itemgetter

from localckpt.availability.inventory import Inventory, node_report, packed, ranks_by_node, unpacked
from localckpt.errors import CheckpointingException, PeerLostError, StorageError
from localckpt.events.event import Outcome
from localckpt.failure_texts import described, short
from localckpt.ids import Checkpoint, CkptID, Group, Piece, ShardIdentity
from localckpt.managers.context import Context
from localckpt.managers.recovery import Recovery
from localckpt.options import Options
from localckpt.ranks.failure import Attempt, forget_frames
from localckpt.ranks.ranks import Ranks, shaped, to_all
from localckpt.replication.base import STEPS, ReplicationStrategy
from localckpt.replication.exchange import missing_copies_of_others, plan_shards
from localckpt.replication.redundancy import Keeper, Lacking
from localckpt.replication.retrieval import carry_out, new_name
from localckpt.replication.schemes import SCHEMES
from localckpt.replication.transport import Transport, connect
from localckpt.storage.store import Slot, Store
from localckpt.storage.write import Place
from localckpt.threads import Task

logger = logging.getLogger(__name__)


class Replication:
    """Replication of one save; ``sent_nbytes`` and ``seconds`` are ``None`` until it is over."""

    def __init__(
        self, strategy: ReplicationStrategy, options: Options, identity: ShardIdentity
    ) -> None:
        self._strategy, self._options, self._identity = strategy, options, identity
        background = options.background
        self._is_behind_training = (
            not strategy.sends_from_devices if background is None else background
        )
        # Returns the slots of other ranks' shards.
        self._task: Task[list[Slot]] | None = None
        self.comes_later = False
        self.kept: list[int] = []
        self.group: Group | None = None
        self.seconds: float | None = None
        self.sent_nbytes: int | None = None

    def begin(self, store: Store, own: Slot | None, error: str | None = None) -> None:
        """Begin to make the copies; all ranks call it once for each save.

        Without ``own``, which could not be captured, the others of the clique raise ``error``, too.
        """
        self._strategy.begin_copies()
        copies = self._task = Task(partial(self._replicate, store, own, error))
        if self._is_behind_training:
            try:
                self._strategy.thread.submit(copies)
            except BaseException:
                # No thread can be had, as while the interpreter ends, or an interrupt.
                if copies.call_off():
                    self._task = None
                raise
            self.comes_later = True
            return
        self._strategy.thread.run(copies)
        failure = copies.error
        if failure is not None and (own is not None or not isinstance(failure, Exception)):
            try:
                raise failure
            finally:
                # Else the error would keep itself by these variables.
                del failure, copies

    def finish(self) -> list[Slot]:
        """Return the slots of other ranks' shards that have come here."""
        # Looked at once: another thread may drop them when they have failed.
        if (copies := self._task) is None:
            return []
        self.wait()
        if not copies.done():
            raise CheckpointingException(
                f"replicating iteration {self._identity.iteration} has not ended after "
                f"{STEPS * self._options.timeout:g} s: is a disk or a network interface stuck?"
            )
        try:
            return copies.result()
        finally:
            # An error keeps the frames that it came through: it must not be in one of them itself.
            del copies

    def wait(self) -> None:
        """Wait until nothing is sent or received, or its deadlines have passed."""
        if (copies := self._task) is not None:
            copies.wait(STEPS * self._options.timeout)

    def waits_for(self) -> str:
        """Describe, in any thread, the peers that it waits for; empty if it is over."""
        if (copies := self._task) is None or copies.done():
            return ""
        if not (peers := self._strategy.waits_for()):
            return ""
        own = self._identity
        return f"rank {own.rank} was replicating iteration {own.iteration}, and waited for {peers}"

    def forget_error(self) -> None:
        """Drop what is over: it may hold an error, whose frames hold the save."""
        if self._task is not None and self._task.done():
            self._task = None

    def _replicate(self, store: Store, own: Slot | None, error: str | None) -> list[Slot]:
        began = time.monotonic()
        try:
            with Attempt() as staging:
                if own is not None:
                    own.await_copied()
            slots = self._strategy.protect(
                own,
                self._identity,
                store,
                self._options.timeout,
                on_gpu=bool(own and own.gpu) and not self._is_behind_training,
                error=error or staging.error_text,
            )
        except Exception as failure:
            # Else the frames, and with them the images, would stay until cycles are collected.
            forget_frames(failure)
            if self._options.strict or not isinstance(failure, PeerLostError):
                raise
            logger.warning(
                "iteration %d has no copies of the shards of this clique: %s",
                *(self._identity.iteration, str(failure)),
            )
            return []
        finally:
            if own is not None:
                own.end_hold("replication")
        pieces = [slot.identity.piece for slot in slots]
        self.kept = [piece.rank for piece in pieces if piece.is_shard]
        if not all(piece.is_shard for piece in pieces):
            self.group = self._strategy.protection[self._identity.rank]
        self.seconds = time.monotonic() - began
        self.sent_nbytes = self._strategy.sent_nbytes
        return slots


# Keeping what was computed, opening, reserving, sending, telling the outcome; then telling sizes,
# computing pieces, completing them, telling the outcome: each has the deadline once, and
# connecting is over before.
PROTECTING_STEPS = 10


class Reprotection:
    """Making of the pieces that checkpoints lack, behind training, on all ranks together."""

    def __init__(self, context: Context, ranks: Ranks) -> None:
        self._context, self.ranks = context, ranks
        self._under_way: Task[str] | None = None
        self._work: _Work | None = None
        self.checkpoint: Checkpoint | None = None
        """The checkpoint that :meth:`repair` is at."""

    # After a load, until the next save.

    def begin(self, recovery: Recovery) -> None:
        """Begin to make the pieces that a loaded checkpoint lacks; all ranks call it."""
        if (work := self._prepared(recovery)) is None:
            return
        note = self._context.checkpoints.refresh
        # No daemon: the interpreter must not end while it is inside of gloo.
        self._under_way = Task(lambda: self._make_all(work, note))
        self._under_way.start("localckpt-reprotection", daemon=False)

    def finish(self) -> None:
        if self._under_way is None:
            return
        deadline_s = PROTECTING_STEPS * self.ranks.timeout_s
        if not self._under_way.wait(deadline_s):
            raise CheckpointingException(
                f"making copies of the loaded checkpoint has not ended after {deadline_s:g} s: is "
                f"the disk of this node stuck?"
            )
        self._under_way = self._work = None

    # Beside saves, in a thread.

    def look(self, checkpoints: Collection[Checkpoint]) -> Inventory:
        """Look at all nodes for the pieces of some checkpoints; all ranks call it."""
        context, mine = self._context, None
        inventory = Inventory(ranks_by_node(context.nodes), SCHEMES)
        with Attempt() as looking:
            # On every rank, since each may have to read files of its node.
            stored = context.store.list_stored()
            records = [s.record for s in stored if s.record is not None]
            if inventory.is_leader(self.ranks.rank):
                those = [r for r in records if r.identity.checkpoint in checkpoints]
                mine = node_report(those, context.store.claim.noted_lineages())
        what = "look for pieces that are lost"
        inventory.merge_all(self.ranks.decide(what, looking.of(mine), packed, read=unpacked))
        for checkpoint in checkpoints:
            context.checkpoints.note_found(checkpoint, inventory)
        return inventory

    def repair(self, checkpoint: Checkpoint, inventory: Inventory) -> None:
        """Make the pieces that a checkpoint lacks, unless it is not kept; all ranks call it."""
        checkpoints, self.checkpoint = self._context.checkpoints, checkpoint
        # Some ranks may have finalized a later save than others.
        if not self.ranks.decide(
            f"repair iteration {checkpoint.iteration}",
            lambda: checkpoint in checkpoints.complete,
            all,
            read=shaped(bool),
        ):
            return
        beside = replace(self._context, ranks=self.ranks, placed=self._context.nodes)
        recovery, is_computed = Recovery(beside, inventory, checkpoint, []), False
        while not is_computed:
            recovery.drop()
            lost = recovery.plan()
            is_computed = recovery.run({s: s % self.ranks.world_size for s in lost})
        checkpoints.note_found(checkpoint, inventory)
        if (work := self._prepared(recovery)) is None:
            return
        if (why := self._make_all(work, checkpoints.note_found)) and not self.ranks.is_aborted:
            # What was sent may be bad: no load has verified it before.
            for identity in work.sent:
                recovery.verify_again(identity, why)

    # Of both.

    def abort(self) -> None:
        """Abort what is under way, and what would follow; nothing waits for other ranks then."""
        self.ranks.abort()
        if (work := self._work) is not None:
            work.abort()

    def _prepared(self, recovery: Recovery) -> _Work | None:
        """Plan the pieces to make, and connect; ``None`` for none, or if that cannot be done."""
        checkpoint, inventory = recovery.checkpoint, recovery.inventory
        computed = {owner: recovery.computed_by[owner] for owner in recovery.nbytes}
        for owner, rank in computed.items():
            inventory.add(checkpoint, owner, inventory.node_of(rank), recovery.nbytes[owner])
        lacking = self._lacking(checkpoint, inventory)
        if not (lacking.copies or lacking.renewal or computed):
            return None
        logger.info(
            "iteration %d: %d shards have fewer copies than asked for, %d were computed%s: making "
            "them again",
            *(checkpoint.iteration, len(lacking.copies), len(computed)),
            f", {lacking.renewal}" if lacking.renewal else "",
        )
        self._work = work = _Work(self._context, self.ranks, recovery, computed, lacking)
        try:
            self._connect(work)
        except CheckpointingException as error:
            work.drop()
            for owner, rank in computed.items():
                inventory.remove(checkpoint, Piece(owner), inventory.node_of(rank))
            logger.log(
                self._level,
                "%d shards stay with fewer copies: %s",
                *(len(lacking.copies), described(error)),
            )
            self._context.events.emit("reprotected", step=checkpoint.iteration, error=error)
            return None
        return work

    @property
    def _level(self) -> int:
        return logging.INFO if self.ranks.is_aborted else logging.WARNING

    def _lacking(self, checkpoint: Checkpoint, inventory: Inventory) -> Lacking:
        if checkpoint.world_size == self.ranks.world_size:
            return self._context.strategy.lacking(checkpoint, inventory)
        # The job's groups are not those of the ranks that saved it; whole copies protect any.
        tolerated = max(
            (group.tolerated for group in self._context.strategy.protection.values()), default=0
        )
        return Lacking(missing_copies_of_others(checkpoint, inventory, 1 + tolerated))

    def _connect(self, work: _Work) -> None:
        """Connect the ranks that take part."""
        ranks = self.ranks
        name = ranks.decide(
            *("name the connections for copies", new_name, itemgetter(0)), read=shaped(str)
        )
        with Attempt() as connecting:
            work.connect(name, self._context.strategy.rate_limit)
        try:
            ranks.decide("connect the ranks that make copies", connecting)
        except BaseException:
            work.disconnect()
            raise

    def _make_all(self, work: _Work, note: Callable[[Checkpoint, Inventory], None]) -> str:
        """Make what lacks, and ``note`` what is there then; return what went wrong on any rank."""
        began, emit = time.monotonic(), self._context.events.emit
        iteration = work.checkpoint.iteration
        try:
            problems = work.keep_computed() if work.computed else []
            problems += work.make_copies() if work.lacking.copies else []
            problems += work.lacking.renewal.make(work) if work.lacking.renewal else []
        except CheckpointingException as error:
            problems = [described(error)]
        finally:
            work.disconnect()
            work.drop()
        note(work.checkpoint, work.inventory)
        # Ranks that failed together say the same.
        if why := "; ".join(dict.fromkeys(problems)):
            logger.log(
                self._level,
                "shards of iteration %d have fewer copies than asked for until the next save: %s",
                *(iteration, why),
            )
            outcome: Outcome = "stopped" if self.ranks.is_aborted else "failed"
            details = {"error": short(why)}
            emit("reprotected", began=began, step=iteration, outcome=outcome, details=details)
            return why
        emit("reprotected", began=began, step=iteration, nbytes=work.nbytes)
        logger.info(
            "all shards of iteration %d have their copies again: %d bytes came here in %.3f s",
            *(iteration, work.nbytes, time.monotonic() - began),
        )
        return ""


class _Work(Keeper):
    """Making of the pieces that one checkpoint lacks; equal on all ranks but for slots."""

    def __init__(
        self,
        context: Context,
        ranks: Ranks,
        recovery: Recovery,
        computed: Mapping[int, int],
        lacking: Lacking,
    ) -> None:
        checkpoint, inventory = recovery.checkpoint, recovery.inventory
        super().__init__(ranks, checkpoint, inventory, context.store, context.session_id)
        self.lacking = lacking
        self.computed = computed
        self.slots += recovery.slots.values()
        self._transport: Transport | None = None
        self._limited_s = 0.0
        wanted: dict[int, list[int]] = {}
        for owner, receivers in lacking.copies.items():
            for rank in receivers:
                wanted.setdefault(rank, []).append(owner)
        self._plan = plan_shards(self.checkpoint, self._session_id, self.inventory, wanted)

    @property
    def sent(self) -> list[ShardIdentity]:
        """Shards that this rank sends."""
        return [self.identity(entry.id_.rank) for entry in self._plan.sends(self.ranks.rank)]

    def connect(self, name: str, rate_limit: float | None) -> None:
        """Connect this rank to the ranks that it works with; see :meth:`Renewal.connect`."""
        ranks = self.ranks
        if rate_limit is not None:
            nbytes, moved = self.inventory.shards(self.checkpoint), Counter[int]()
            for entry in self._plan.transfers:
                moved.update(dict.fromkeys((entry.sender, entry.receiver), nbytes[entry.id_.rank]))
            self._limited_s = max(moved.values(), default=0) / rate_limit
        self._transport = connect(
            *(name, self._plan.peers(ranks.rank), ranks.rank, ranks.timeout_s),
            in_pairs=True,
            rate_limit=rate_limit,
            is_given_up=lambda: ranks.is_aborted,
        )
        if self.lacking.renewal is not None:
            self.lacking.renewal.connect(name, ranks, rate_limit)
        if ranks.is_aborted:
            # There was nothing to abort yet.
            self.abort()

    def disconnect(self) -> None:
        for connected in (self._transport, self.lacking.renewal):
            if connected is not None:
                connected.close()

    def abort(self) -> None:
        """Break the connections, with an error in the thread that uses them."""
        for connected in (self._transport, self.lacking.renewal):
            if connected is not None:
                connected.abort()

    def drop(self) -> None:
        try:
            self._store.release(self.slots)
        except StorageError as error:
            logger.warning("what is unfinished could not be removed: %s", error)

    def keep_computed(self) -> list[str]:
        with Attempt() as keeping:
            # The slots of copies are reserved later.
            self.commit(self.slots)
        phase = f"keep what was computed of iteration {self.checkpoint.iteration}"
        failed = self.ranks.decide(phase, lambda: keeping.error_text, **to_all(str))
        for owner, rank in self.computed.items():
            if rank in failed:
                node = self.inventory.node_of(rank)
                self.inventory.remove(self.checkpoint, Piece(owner), node)
        return [*failed.values()]

    def make_copies(self) -> list[str]:
        slots: list[Slot] = []

        def accept(id_: CkptID, nbytes: int) -> Place:
            slots.append(self.reserve(self.identity(id_.rank), nbytes, may_stage=True))
            return slots[-1].place

        with Attempt() as copying:
            carry_out(
                self.ranks,
                self._plan,
                lambda id_: self.open(self.identity(id_.rank)),
                accept,
                self.ranks.timeout_s,
                self._transport,
                self._limited_s,
            )
            self.commit(slots)
        phase = f"restore the copies of iteration {self.checkpoint.iteration}"
        failed = self.ranks.decide(phase, lambda: copying.error_text, **to_all(str))
        nbytes = self.inventory.shards(self.checkpoint)
        for owner, receivers in self.lacking.copies.items():
            for receiver in (rank for rank in receivers if rank not in failed):
                node = self.inventory.node_of(receiver)
                self.inventory.add(self.checkpoint, owner, node, nbytes[owner])
        return [*failed.values()]
