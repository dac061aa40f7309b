"""Makes the copies and other pieces that a loaded checkpoint lacks, behind training.

Until the next save is complete the loaded checkpoint is all there is, and a node that came back
empty holds nothing of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from operator import itemgetter

from localckpt.availability.inventory import Inventory
from localckpt.errors import CheckpointingException, StorageError
from localckpt.failure_texts import described, short
from localckpt.ids import Checkpoint, CkptID, Piece
from localckpt.managers.context import Context
from localckpt.managers.recovery import Recovery
from localckpt.ranks.failure import Attempt
from localckpt.ranks.ranks import Ranks, shaped
from localckpt.replication.exchange import missing_copies_of_others, plan_shards
from localckpt.replication.redundancy import Keeper, Lacking
from localckpt.replication.retrieval import carry_out, connect_for, new_name
from localckpt.replication.transport import Transport
from localckpt.storage.directory import DirectoryStore
from localckpt.storage.store import Slot
from localckpt.threads import Task

logger = logging.getLogger(__name__)

# Keeping what was computed, opening, reserving, sending, telling the outcome; then telling sizes,
# computing pieces, completing them, telling the outcome: each has the deadline once, and
# connecting is over before.
_STEPS = 10


class Reprotection:
    """The renewed protection of one manager's loaded checkpoints."""

    def __init__(self, context: Context, store: DirectoryStore, ranks: Ranks) -> None:
        self._context = context
        self._store = store
        self._ranks = ranks
        self._under_way: Task[None] | None = None
        self._work: _Work | None = None

    def begin(self, recovery: Recovery) -> None:
        """Begin to make the pieces that a loaded checkpoint lacks; all ranks call it."""
        checkpoint, inventory = recovery.checkpoint, recovery.inventory
        computed = {owner: recovery.computed_by[owner] for owner in recovery.nbytes}
        for owner, rank in computed.items():
            inventory.add(checkpoint, owner, inventory.node_of(rank), recovery.nbytes[owner])
        lacking = self._lacking(checkpoint, inventory)
        if not (lacking.copies or lacking.renewal or computed):
            return
        logger.info(
            "iteration %d: %d shards have fewer copies than asked for, %d were computed%s: making "
            "them again",
            *(checkpoint.iteration, len(lacking.copies), len(computed)),
            f", {lacking.renewal}" if lacking.renewal else "",
        )
        work = _Work(self._context, self._store, self._ranks, recovery, computed, lacking)
        try:
            self._connect(work)
        except CheckpointingException as error:
            work.drop()
            for owner, rank in computed.items():
                inventory.remove(checkpoint, Piece(owner), inventory.node_of(rank))
            logger.warning(
                "%d shards stay with fewer copies: %s", len(lacking.copies), described(error)
            )
            self._context.events.emit("reprotected", step=checkpoint.iteration, error=error)
            return
        # No daemon: the interpreter must not end while it is inside of gloo.
        self._work = work
        self._under_way = Task(lambda: self._make_all(work))
        self._under_way.start("localckpt-reprotection", daemon=False)

    def _lacking(self, checkpoint: Checkpoint, inventory: Inventory) -> Lacking:
        if checkpoint.world_size == self._ranks.world_size:
            return self._context.strategy.lacking(checkpoint, inventory)
        # The job's groups are not those of the ranks that saved it; whole copies protect any.
        tolerated = max(
            (group.tolerated for group in self._context.strategy.protection.values()), default=0
        )
        return Lacking(missing_copies_of_others(checkpoint, inventory, 1 + tolerated))

    def finish(self) -> None:
        """Wait until nothing is under way."""
        if self._under_way is None:
            return
        deadline_s = _STEPS * self._ranks.timeout_s
        if not self._under_way.wait(deadline_s):
            raise CheckpointingException(
                f"making copies of the loaded checkpoint has not ended after {deadline_s:g} s: is "
                f"the disk of this node stuck?"
            )
        self._under_way = self._work = None

    def cancel(self) -> None:
        """Abort what is under way; :meth:`finish` then does not wait for other ranks."""
        if self._under_way is not None and not self._under_way.done():
            self._ranks.abort()
            if (work := self._work) is not None:
                work.abort()

    def _connect(self, work: _Work) -> None:
        """Connect the ranks that take part, before :meth:`cancel` may have to disconnect them."""
        ranks = self._ranks
        name = ranks.decide(
            *("name the connections for copies", new_name, itemgetter(0)), read=shaped(str)
        )
        with Attempt() as connecting:
            work.connect(name, self._context.strategy.rate_limit)
        try:
            ranks.agree("connect the ranks that make copies", connecting)
        except BaseException:
            work.disconnect()
            raise

    def _make_all(self, work: _Work) -> None:
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
        self._context.checkpoints.refresh(work.checkpoint, work.inventory)
        if problems:
            # Ranks that failed together say the same.
            why = "; ".join(dict.fromkeys(problems))
            logger.warning(
                "shards of iteration %d have fewer copies than asked for until the next save: %s",
                iteration,
                why,
            )
            details = {"error": short(why)}
            emit("reprotected", began=began, step=iteration, outcome="failed", details=details)
            return
        emit("reprotected", began=began, step=iteration, nbytes=work.nbytes)
        logger.info(
            "all shards of iteration %d have their copies again: %d bytes came here in %.3f s",
            *(iteration, work.nbytes, time.monotonic() - began),
        )


class _Work(Keeper):
    """Making of the pieces that one checkpoint lacks.

    All attributes but slots are equal on all ranks.
    """

    def __init__(
        self,
        context: Context,
        store: DirectoryStore,
        ranks: Ranks,
        recovery: Recovery,
        computed: Mapping[int, int],
        lacking: Lacking,
    ) -> None:
        checkpoint, inventory = recovery.checkpoint, recovery.inventory
        super().__init__(ranks, checkpoint, inventory, store, context.session_id)
        self.lacking = lacking
        self.computed = computed
        self.slots += recovery.slots.values()
        self._transport: Transport | None = None
        wanted: dict[int, list[int]] = {}
        for owner, receivers in lacking.copies.items():
            for rank in receivers:
                wanted.setdefault(rank, []).append(owner)
        self._plan = plan_shards(self.checkpoint, self._session_id, self.inventory, wanted)

    def connect(self, name: str, rate_limit: float | None) -> None:
        """Connect this rank to the ranks that it works with; see :meth:`Renewal.connect`."""
        rank, timeout_s = self.ranks.rank, self.ranks.timeout_s
        self._transport = connect_for(self._plan, name, rank, timeout_s, rate_limit=rate_limit)
        if self.lacking.renewal is not None:
            self.lacking.renewal.connect(name, rank, timeout_s, rate_limit)

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
        """Write the computed shards; return the errors of all ranks."""
        with Attempt() as keeping:
            # The slots of copies are reserved later.
            self.commit(self.slots)
        phase = f"keep what was computed of iteration {self.checkpoint.iteration}"
        failed = self.ranks.merge(phase, Attempt(), keeping.error_text, read=shaped(str))
        for owner, rank in self.computed.items():
            if rank in failed:
                node = self.inventory.node_of(rank)
                self.inventory.remove(self.checkpoint, Piece(owner), node)
        return [*failed.values()]

    def make_copies(self) -> list[str]:
        """Send shards to the nodes that lack them; return the errors of all ranks."""
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
        failed = self.ranks.merge(phase, Attempt(), copying.error_text, read=shaped(str))
        nbytes = self.inventory.shards(self.checkpoint)
        for owner, receivers in self.lacking.copies.items():
            for receiver in (rank for rank in receivers if rank not in failed):
                node = self.inventory.node_of(receiver)
                self.inventory.add(self.checkpoint, owner, node, nbytes[owner])
        return [*failed.values()]
