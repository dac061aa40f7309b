"""Recovery of the shards of a checkpoint that no node holds, from pieces of other kinds."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from contextlib import closing

from localckpt.availability.explanation import BadCopy
from localckpt.availability.inventory import Inventory
from localckpt.availability.recoverable import groups_to_compute
from localckpt.errors import CorruptShardError, StorageError
from localckpt.ids import SHARD_KIND, Checkpoint, Group, Piece, ShardIdentity
from localckpt.managers.context import Context
from localckpt.replication.redundancy import Lost
from localckpt.replication.schemes import SCHEMES
from localckpt.state_dict.source import ImageBytes, ShardSource
from localckpt.storage.catalog import Problem
from localckpt.storage.store import Slot

logger = logging.getLogger(__name__)


class Recovery:
    """Recovery of the shards of one checkpoint; equal on all ranks but for slots and problems.

    ``groups`` are those that shards are computed from; ``slots`` are of the ones computed here,
    ``arrived`` of those that peers have sent.
    """

    def __init__(
        self, context: Context, inventory: Inventory, checkpoint: Checkpoint, bad: list[BadCopy]
    ) -> None:
        self._context = context
        self.inventory = inventory
        self.checkpoint = checkpoint
        self._bad = bad
        self.groups: dict[int, Group] = {}
        self.unrecoverable: set[int] = set()
        self.nbytes: dict[int, int] = {}
        self.computed_by: Mapping[int, int] = {}
        self.slots: dict[int, Slot] = {}
        self.arrived: dict[int, Slot] = {}

    def plan(self) -> Mapping[int, Group]:
        """Find groups from which the shards that no node holds can be computed."""
        self.groups = groups_to_compute(self.checkpoint, self.inventory, self.unrecoverable)
        return self.groups

    def run(self, computed_by: Mapping[int, int]) -> bool:
        """Compute the shards of the plan; return whether that was done, on all ranks."""
        self.computed_by = computed_by
        for kind in sorted({group.kind for group in self.groups.values()}):
            wanted = {shard: group for shard, group in self.groups.items() if group.kind == kind}
            recovered = SCHEMES[kind].recover(
                Lost(
                    self.checkpoint,
                    self._context.session_id,
                    self.inventory,
                    wanted,
                    computed_by={shard: computed_by[shard] for shard in wanted},
                ),
                self._context.store,
                self._context.ranks,
                self._context.strategy.step_s(self._context.ranks.timeout_s),
            )
            for problem in recovered.problems:
                self.take_out(problem.piece, problem.reader, problem.why)
            if not recovered.is_done:
                return False
            self.slots |= recovered.slots
            self.nbytes |= recovered.nbytes
        return True

    def is_here(self, shard: int) -> bool:
        return shard in self.slots or shard in self.arrived

    def open(self, identity: ShardIdentity) -> ShardSource:
        """Open a shard that was computed or has arrived here, or else this node's."""
        slot = self.slots.get(identity.rank) or self.arrived.get(identity.rank)
        if slot is None:
            return self._context.store.open(identity)
        return slot.open()

    def drop(self, also: Collection[ShardIdentity] = ()) -> None:
        """Release the slots of shards that were computed or have arrived, and of given ones."""
        mine = {*map(self._identity, (*self.groups, *self.arrived)), *also}
        # From the store: an interrupt may have come before one was noted.
        store = self._context.store
        store.release([slot for slot in store.slots if slot.identity in mine])
        self.slots, self.arrived, self.nbytes = {}, {}, {}

    def take_out(self, piece: Piece, reader: int, why: str) -> None:
        """Leave out a bad piece; one rank of its node verifies it, for quarantine."""
        identity = self._identity(piece.rank, piece.kind)
        if piece.is_shard and piece.rank in self.groups:
            logger.error("%s was computed in vain: %s", identity, why)
            self.unrecoverable.add(piece.rank)
            return
        node = self.inventory.node_of(reader)
        if piece.is_shard:
            if piece.rank not in self.inventory.shards_on(self.checkpoint, node):
                # Another rank of the node has found it bad, too.
                return
            self._bad.append(BadCopy(identity, reader, why))
        self.inventory.remove(self.checkpoint, piece, node)
        if self.inventory.reader([node], piece.rank) == self._context.ranks.rank:
            self.verify_again(identity, why)

    def verify_again(self, identity: ShardIdentity, why: str) -> None:
        """Verify a piece of this node that was of no use, and quarantine it if it is bad."""
        # A rank with bad memory must not talk the others out of their good copies, and what the
        # node refused once it may give the next time.
        store = self._context.store
        if not store.keeps_images:
            return
        try:
            with closing(store.open(identity)) as source:
                ImageBytes(source, identity).verify()
        except CorruptShardError as error:
            store.quarantine(identity, Problem.of(error))
        except StorageError as error:
            logger.warning("%s could not be looked at after it was bad: %s", identity, error)
        else:
            logger.warning("%s is good here, but not when it was read: %s", identity, why)

    def _identity(self, rank: int, kind: str = SHARD_KIND) -> ShardIdentity:
        return self.checkpoint.shard(rank, self._context.session_id).of_kind(kind)
