"""Search of all nodes for checkpoints, and the choice that a restart makes among them.

One rank of each node reports the node's pieces. Only the root reads the reports, and judges.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from localckpt.availability.coverage import describe_choice, judge_newest, unrelated
from localckpt.availability.durability import Found
from localckpt.availability.explanation import Explanation, explain, why_given_up
from localckpt.availability.inventory import Inventory, node_report, packed, ranks_by_node, unpacked
from localckpt.errors import NoReplicasAvailableError, StorageError
from localckpt.ids import Checkpoint, ShardIdentity
from localckpt.managers.context import Context
from localckpt.ranks.deadline import Deadline
from localckpt.ranks.failure import Attempt
from localckpt.replication.schemes import SCHEMES
from localckpt.storage.catalog import Problem
from localckpt.storage.store import Store, Stored

logger = logging.getLogger(__name__)


class Finder:
    """Search for what a restart can load; ``found`` is ``None`` once a save has outdated it."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.found: Found | None = None
        self._inventory = Inventory({})

    def look(self) -> Found:
        """Look at all nodes, each of which one rank reports."""
        context = self._context
        inventory = self._inventory = self._empty_inventory()
        mine = None
        with context.events.timed("find"):
            with Attempt() as looking:
                # On every rank, since each may have to read files of its node.
                stored = context.read(context.store.list_stored)
                if inventory.is_leader(context.ranks.rank):
                    mine = context.read(partial(_report, context.store, stored))
            found: Found = context.ranks.decide(
                "find the latest checkpoint", looking.of(mine), self._judge, read=Found.from_json
            )
        self.found = found
        context.checkpoints.take_in(found)
        context.resuming.trusts = found.trusts
        if found.quarantined and not context.options.read_only:
            self._quarantine(found)
        return found

    def _empty_inventory(self) -> Inventory:
        return Inventory(ranks_by_node(self._context.epoch.nodes), SCHEMES)

    def _judge(self, reports: Sequence[Any]) -> list[Any]:
        self._inventory.merge_all(reports)
        protection = self._context.strategy.protection
        max_attempts = self._context.resuming.max_attempts
        return Found.among(self._inventory, protection, max_attempts).to_json()

    def _quarantine(self, found: Found) -> None:
        """Quarantine what this node holds of the checkpoints that are given up."""
        context = self._context
        for checkpoint, why in found.quarantined.items():
            logger.warning("iteration %d is quarantined: %s", checkpoint.iteration, why)
            if not self._inventory.is_leader(context.ranks.rank):
                continue
            try:
                # The mark first: nodes that are away now may come back with their pieces.
                context.store.claim.note_trust(checkpoint, mark="quarantined", why=why)
                _quarantine_all(context.store, checkpoint, why)
            except StorageError as error:
                # Other nodes have the mark, and an error would be raised on this rank alone.
                logger.error("that is not done on this node: %s", error)

    def look_again(self, deadline: Deadline) -> Found | None:
        """Look again; return ``None`` if no job has saved or pruned since the last look."""
        before = self.found
        if (found := self.look()) == before:
            return None

        def require_time(is_late: list[bool]) -> None:
            if any(is_late):
                raise NoReplicasAvailableError(
                    f"for {deadline.timeout_s:g} s a job has saved on the nodes and pruned every "
                    f"checkpoint before it was read: have the job keep more of them, or let "
                    f"the load take longer. Nothing was changed on the nodes"
                )

        self._context.ranks.decide("look again", lambda: deadline.left_s == 0, require_time)
        return found

    def newest(self) -> Checkpoint | None:
        found, checkpoints, epoch = self.look(), self._context.checkpoints, self._context.epoch
        if self._context.options.read_only:
            deadline = Deadline.after(self._context.ranks.timeout_s)
            # Folders are read one after another, and a job may save and prune in between.
            while not found.complete and found.incomplete:
                if (changed := self.look_again(deadline)) is None:
                    break
                found = changed
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
        """Inventory of all nodes at the last look, which the root has; all ranks call it."""
        with self._context.events.timed("find"):
            reports = self._context.ranks.decide(
                "learn what the nodes hold",
                lambda: None,
                lambda _: packed(self._inventory.reports()),
                read=unpacked,
            )
        self._inventory = self._empty_inventory()
        self._inventory.merge_all(reports)
        return self._inventory

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
        inventory = self._empty_inventory()
        mine: list[Any] = [None, []]
        with Attempt() as looking:
            found = store.list_stored()
            if inventory.is_leader(ranks.rank):
                bad = [(s.name, s.problem) for s in found if s.problem is not None]
                quarantined = ("damaged", "given up")
                damaged = [[n, p.kind, p.text, p.claim] for n, p in bad if p.kind in quarantined]
                mine = [_report(store, found), damaged]
        gathered = ranks.decide(
            "explain what the nodes hold", looking.of(mine), packed, read=unpacked
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
