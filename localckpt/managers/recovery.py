"""Recovery of the shards of a checkpoint that no node holds, from pieces of other kinds."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

from localckpt.availability.inventory import Inventory
from localckpt.availability.recoverable import groups_to_compute
from localckpt.availability.refusals import BadCopy
from localckpt.ids import Checkpoint, Group, Piece, ShardIdentity
from localckpt.managers.parts import Parts
from localckpt.replication.redundancy import Lost, PieceProblem
from localckpt.replication.schemes import SCHEMES
from localckpt.storage.problem import Problem
from localckpt.storage.slot import Slot

__all__ = ["Recovery"]

logger = logging.getLogger(__name__)


class Recovery:
    """Recovery of the shards of one checkpoint; equal on all ranks but for slots and problems.

    Args:
        parts: Parts of the manager.
        inventory: Inventory of all nodes; pieces that turn out bad are taken out.
        checkpoint: The checkpoint.
        bad: List that bad copies of shards are added to.

    Attributes:
        groups: Shards that are computed, each with the group that it is computed from.
        hopeless: Shards that cannot be computed.
        damaged: Nodes with copies that are good in part, by shard, with the problem of each.
        nbytes: Sizes of the shards that were computed.
        computed_by: The rank of the job that computes each.
        slots: Slots of those that were computed on this rank.
        to_replace: Damaged pieces on this node that are to be replaced, with their problems.
    """

    def __init__(
        self, parts: Parts, inventory: Inventory, checkpoint: Checkpoint, bad: list[BadCopy]
    ) -> None:
        self._parts = parts
        self.inventory = inventory
        self.checkpoint = checkpoint
        self._bad = bad
        self.groups: dict[int, Group] = {}
        self.hopeless: set[int] = set()
        self.damaged: dict[int, dict[str, str]] = {}
        self.nbytes: dict[int, int] = {}
        self.computed_by: Mapping[int, int] = {}
        self.slots: dict[int, Slot] = {}
        self.to_replace: dict[ShardIdentity, Problem] = {}
        # Other pieces that are good in part; they are of use until all is loaded.
        self._damaged_pieces: list[tuple[Piece, str]] = []

    def plan(self) -> Mapping[int, Group]:
        """Find groups from which the shards that no node holds can be computed.

        Raises:
            NoReplicasAvailableError: A shard cannot be computed.
        """
        self.groups = groups_to_compute(
            self.checkpoint, self.inventory, self.damaged, self.hopeless
        )
        return self.groups

    def run(self, computed_by: Mapping[int, int]) -> bool:
        """Compute the shards of the plan; return whether that was done, on all ranks.

        Args:
            computed_by: The rank of the job that computes each shard.
        """
        self.computed_by = computed_by
        for kind in sorted({group.kind for group in self.groups.values()}):
            wanted = {shard: group for shard, group in self.groups.items() if group.kind == kind}
            recovered = SCHEMES[kind].recover(
                Lost(
                    self.checkpoint,
                    self._parts.session_id,
                    self.inventory,
                    wanted,
                    self.damaged,
                    computed_by={shard: computed_by[shard] for shard in wanted},
                ),
                self._parts.store,
                self._parts.ranks,
                self._parts.strategy.step_s(self._parts.ranks.timeout_s),
            )
            for shard, why in recovered.hopeless.items():
                logger.error("%s cannot be computed: %s", self._identity(shard), why)
            self.hopeless |= recovered.hopeless.keys()
            self._take_out(recovered.problems)
            if not recovered.is_done:
                return False
            self.slots |= recovered.slots
            self.nbytes |= recovered.nbytes
        return True

    def drop(self, also: Collection[ShardIdentity] = ()) -> None:
        """Release the slots of computed shards, and of other given shards."""
        mine = {self._identity(shard) for shard in self.groups} | set(also)
        # From the store: an interrupt may have come before one was noted.
        store = self._parts.store
        store.release([slot for slot in store.slots if slot.identity in mine])
        self.slots, self.nbytes = {}, {}

    def give_up_damaged_pieces(self) -> None:
        """Take damaged pieces out of the inventory, so that they are made anew."""
        for piece, node in self._damaged_pieces:
            self.inventory.remove(self.checkpoint, piece, node)

    def may_be_mended(self, shard: int) -> bool:
        """Return whether a shard is in a group with pieces from which it may be computed."""
        return shard in self.inventory.groups_of(self.checkpoint)

    def _take_out(self, problems: Sequence[PieceProblem]) -> None:
        """Take damaged pieces out of what is read as good."""
        # What was damaged may have failed altogether since.
        gone = {(problem.piece, problem.reader) for problem in problems if problem.is_gone}
        for piece, reader, why in ((p.piece, p.reader, p.why) for p in problems):
            node = self.inventory.node_of(reader)
            identity = self._identity(piece.rank).of_kind(piece.kind)
            if piece.is_shard:
                if piece.rank in self.inventory.shards_on(self.checkpoint, node):
                    self._bad.append(BadCopy(identity, reader, why))
                self.inventory.remove(self.checkpoint, piece, node)
                if (piece, reader) in gone:
                    self.damaged.get(piece.rank, {}).pop(node, None)
                else:
                    self.damaged.setdefault(piece.rank, {}).setdefault(node, why)
                continue
            if (piece, reader) in gone:
                self.inventory.remove(self.checkpoint, piece, node)
            else:
                self._damaged_pieces.append((piece, node))
            if reader == self._parts.ranks.rank:
                self.to_replace[identity] = Problem("damaged", why)

    def _identity(self, shard: int) -> ShardIdentity:
        return self.checkpoint.shard(shard, self._parts.session_id)
