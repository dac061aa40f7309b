"""Search of all nodes for checkpoints, and the choice that a restart makes among them.

One rank of each node reports the node's pieces. Only the root reads the reports, and judges.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from localckpt.availability.coverage import describe_choice, judge_newest
from localckpt.availability.durability import Found
from localckpt.availability.explanation import Explanation, explain, why_given_up
from localckpt.availability.inventory import Inventory, node_report, packed, ranks_by_node, unpacked
from localckpt.availability.ordering import unrelated
from localckpt.errors import NoReplicasAvailableError, StorageError
from localckpt.ids import Checkpoint, ShardIdentity
from localckpt.managers.context import Context
from localckpt.ranks.deadline import Deadline
from localckpt.ranks.failure import Attempt
from localckpt.ranks.ranks import Ranks
from localckpt.replication.schemes import SCHEMES
from localckpt.replication.strategies import ReplicationStrategy
from localckpt.resuming import Resuming
from localckpt.storage.catalog import Problem
from localckpt.storage.store import Store, Stored

logger = logging.getLogger(__name__)


class Look:
    """One look at all nodes; all ranks make it together.

    Attributes:
        found: Checkpoints that were found; the same on all ranks.
    """

    def __init__(
        self,
        ranks: Ranks,
        store: Store,
        nodes: Sequence[str],
        strategy: ReplicationStrategy,
        resuming: Resuming,
    ) -> None:
        self._ranks = ranks
        self._resuming = resuming
        self._inventory = Inventory(ranks_by_node(nodes), SCHEMES)
        mine = None
        with Attempt() as looking:
            # On every rank, since each may have to read files of its node.
            found = store.list_stored()
            if self._inventory.is_leader(ranks.rank):
                mine = _report(store, found)
        judge = partial(self._judge, strategy)
        self.found: Found = ranks.agree(
            *("find the latest checkpoint", looking, mine, judge), read=Found.from_json
        )

    def _judge(self, strategy: ReplicationStrategy, reports: Sequence[Any]) -> list[Any]:
        self._inventory.merge_all(reports)
        return Found.among(
            self._inventory,
            strategy.protection,
            self._resuming.max_attempts,
        ).to_json()

    def is_leader(self, rank: int) -> bool:
        """True if a rank acts for its node."""
        return self._inventory.is_leader(rank)

    def inventory(self) -> Inventory:
        """Inventory of all nodes, which the root sends to every rank; all ranks call it."""
        reports = self._ranks.agree(
            "learn what the nodes hold",
            Attempt(),
            None,
            lambda _: packed(self._inventory.reports()),
            read=unpacked,
        )
        self._inventory = Inventory(self._inventory.ranks_on, SCHEMES)
        self._inventory.merge_all(reports)
        return self._inventory


class Finder:
    """Search for what a restart can load, for one manager; all ranks make the same calls.

    Attributes:
        last: The last look; ``None`` once a save has made it out of date.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self.last: Look | None = None

    def look(self) -> Look:
        """Look at all nodes; raises as :class:`Look`."""
        context = self._context
        with context.events.timed("find"):
            look = Look(
                context.ranks,
                context.store,
                context.epoch.nodes,
                context.strategy,
                context.resuming,
            )
        self.last = look
        context.checkpoints.take_in(look.found)
        context.resuming.trusts = look.found.trusts
        if look.found.quarantined and not context.options.read_only:
            self._quarantine(look)
        return look

    def _quarantine(self, look: Look) -> None:
        """Quarantine what this node holds of the checkpoints that are given up."""
        context = self._context
        for checkpoint, why in look.found.quarantined.items():
            logger.warning("iteration %d is quarantined: %s", checkpoint.iteration, why)
            if not look.is_leader(context.ranks.rank):
                continue
            try:
                # The mark first: nodes that are away now may come back with their pieces.
                context.store.claim.note_trust(checkpoint, mark="quarantined", why=why)
                _quarantine_all(context.store, checkpoint, why)
            except StorageError as error:
                # Other nodes have the mark, and an error would be raised on this rank alone.
                logger.error("that is not done on this node: %s", error)

    def has_changed(self, deadline: Deadline) -> bool:
        """Look again, and return whether a job has saved or pruned since the last look."""
        before = self._found
        if self.look().found == before:
            return False

        def require_time(is_late: list[bool]) -> None:
            if any(is_late):
                raise NoReplicasAvailableError(
                    f"for {deadline.timeout_s:g} s a job has saved on the nodes and pruned every "
                    f"checkpoint before it was read: have the job keep more of them, or let "
                    f"the load take longer. Nothing was changed on the nodes"
                )

        self._context.ranks.agree("look again", Attempt(), deadline.left_s == 0, require_time)
        return True

    @property
    def _found(self) -> Found:
        assert self.last is not None, "a look comes first"
        return self.last.found

    def newest(self) -> Checkpoint | None:
        """The newest complete checkpoint, or ``None``."""
        found, checkpoints, epoch = (
            self.look().found,
            self._context.checkpoints,
            self._context.epoch,
        )
        if self._context.options.read_only:
            deadline = Deadline.after(self._context.ranks.timeout_s)
            # Folders are read one after another, and a job may save and prune in between.
            while not found.complete and found.incomplete and self.has_changed(deadline):
                found = self._found
        checkpoints.job_has_looked = True
        world_size, is_elastic = self._context.ranks.world_size, self._context.options.elastic
        judge_newest(checkpoints.complete, world_size, is_elastic=is_elastic)
        if checkpoints.complete:
            newest = checkpoints.complete[0]
            if (trust := checkpoints.trusts[newest]).mark == "bad":
                logger.warning(
                    "iteration %d is marked bad (%s), and the nodes have none that is not",
                    *(newest.iteration, trust.why),
                )
            if others := unrelated(newest, checkpoints.complete[1:], checkpoints.lineages):
                logger.warning("%s", describe_choice(newest, others))
            return newest
        quarantined = found.trusts.marked("quarantined")
        if (quarantined or checkpoints.exhausted) and not checkpoints.under_way:
            raise NoReplicasAvailableError(why_given_up(checkpoints.exhausted, quarantined))
        if found.incomplete:
            logger.warning("no checkpoint is complete: %s", found.incomplete)
        if epoch.newest_iteration >= 0 and not checkpoints.under_way:
            epoch.start_over()
        return None

    def inventory(self) -> Inventory:
        """Inventory of all nodes at the last look; all ranks call it, as :meth:`Look.inventory`."""
        assert self.last is not None, "a look comes first"
        with self._context.events.timed("find"):
            return self.last.inventory()

    def iterations(self) -> list[int]:
        """Iterations that can be loaded, in the order in which a restart tries them."""
        world_size, is_elastic = self._context.ranks.world_size, self._context.options.elastic
        complete = [
            checkpoint
            for checkpoint in self._context.checkpoints.complete
            if is_elastic or checkpoint.world_size == world_size
        ]
        return list(dict.fromkeys(checkpoint.iteration for checkpoint in complete))

    def explain(self) -> Explanation:
        """Explain the pieces on all nodes, and the choice of a restart; the same on all ranks."""
        context = self._context
        ranks, store, resuming = context.ranks, context.store, context.resuming
        inventory = Inventory(ranks_by_node(context.epoch.nodes), SCHEMES)
        mine: list[Any] = [None, []]
        with Attempt() as looking:
            found = store.list_stored()
            if inventory.is_leader(ranks.rank):
                bad = [(s.name, s.problem) for s in found if s.problem is not None]
                quarantined = ("damaged", "given up")
                damaged = [[n, p.kind, p.text, p.claim] for n, p in bad if p.kind in quarantined]
                mine = [_report(store, found), damaged]
        gathered = ranks.agree(
            *("explain what the nodes hold", looking, mine, packed), read=unpacked
        )
        inventory.merge_all([report for report, _ in gathered])
        files = {
            node: [
                Stored(name, problem=Problem(kind, text, claim))
                for name, kind, text, claim in gathered[inventory.leader(node)][1]
            ]
            for node in inventory.ranks_on
        }
        # Any number of ranks can load a checkpoint with elastic=True.
        world_size = None if context.options.elastic else ranks.world_size
        return explain(
            *(inventory, world_size, files),
            max_attempts=resuming.max_attempts,
        )


def _quarantine_all(store: Store, checkpoint: Checkpoint, why: str) -> None:
    """Quarantine all pieces of a checkpoint in a store, every copy of them."""
    before: list[ShardIdentity] = []
    while True:
        records = [stored.record for stored in store.list_stored() if stored.record is not None]
        here = [r.identity for r in records if r.identity.checkpoint == checkpoint]
        # A piece that cannot be renamed stays, and is logged.
        if not here or here == before:
            return
        for identity in here:
            store.quarantine(identity, Problem("given up", why))
        before = here


def _report(store: Store, found: Sequence[Stored]) -> list[list[Any]]:
    records = [stored.record for stored in found if stored.record is not None]
    return node_report(records, store.claim.noted_lineages(), store.claim.noted_trusts())
