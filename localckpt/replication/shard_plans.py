"""Plans of the transfers of a checkpoint's shards: pure functions of an inventory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from localckpt.availability.inventory import Inventory
from localckpt.availability.recoverable import least_losses
from localckpt.ids import Checkpoint, CkptID
from localckpt.replication.exchange import ExchangePlan, plan_among_nodes

__all__ = ["missing_copies", "missing_copies_of_others", "plan_shards", "shards_away"]


def plan_shards(
    checkpoint: Checkpoint,
    session_id: str,
    inventory: Inventory,
    wanted: Mapping[int, Iterable[int]],
) -> ExchangePlan[CkptID]:
    """Decide who sends which shard of a checkpoint to whom.

    Args:
        checkpoint, session_id: The checkpoint.
        inventory: What each node holds.
        wanted: For each rank the ranks whose shards it wants.

    Raises:
        NoReplicasAvailableError: Some are wanted that no node holds.
    """

    def named(owner: int) -> CkptID:
        return CkptID(checkpoint.iteration, owner, session_id)

    return plan_among_nodes(
        {named(owner): nodes for owner, nodes in inventory.holders(checkpoint).items()},
        inventory.ranks_on,
        {rank: [named(owner) for owner in owners] for rank, owners in wanted.items()},
    )


def missing_copies(
    checkpoint: Checkpoint, inventory: Inventory, keepers: Mapping[int, Sequence[int]]
) -> dict[int, list[int]]:
    """Decide who is to get which shard, so that each is again on as many nodes as it is to be.

    Args:
        checkpoint: The checkpoint that was loaded.
        inventory: What each node holds.
        keepers: For each rank those that keep a copy of its shard.

    Returns:
        For each owner of a shard that has too few copies, the ranks that lack it.
    """
    held_on = inventory.holders(checkpoint)
    missing = {}
    for owner, others in keepers.items():
        have = held_on.get(owner, [])
        # The owner first: its own node is where the next restart looks first.
        wanting = [owner, *others]
        lacking = [rank for rank in wanting if inventory.node_of(rank) not in have]
        if wanted := lacking[: max(0, len(wanting) - len(have))]:
            missing[owner] = wanted
    return missing


def missing_copies_of_others(
    checkpoint: Checkpoint, inventory: Inventory, copies: int
) -> dict[int, list[int]]:
    """Decide who is to get which shard of a checkpoint that another number of ranks saved.

    Args:
        checkpoint: The checkpoint that was loaded.
        inventory: What each node holds.
        copies: Number of nodes that each shard is to outlive all but one of.

    Returns:
        For each owner of a shard that has too few copies, the ranks that are to get one, each on a
        node of its own that has none; nodes and their ranks take turns.
    """
    held_on, bears = inventory.holders(checkpoint), least_losses(checkpoint, inventory)
    taken = dict.fromkeys(inventory.ranks_on, 0)
    missing = {}
    for owner, nodes in held_on.items():
        others = sorted(taken.keys() - set(nodes), key=lambda node: (taken[node], node))
        chosen = []
        for node in others[: max(0, copies - bears[owner])]:
            ranks = inventory.ranks_on[node]
            chosen.append(ranks[taken[node] % len(ranks)])
            taken[node] += 1
        if chosen:
            missing[owner] = chosen
    return missing


def shards_away(checkpoint: Checkpoint, inventory: Inventory) -> dict[int, list[int]]:
    """Find the ranks whose own node lacks their shard, though another node has it."""
    return {
        owner: [owner]
        for owner, nodes in inventory.holders(checkpoint).items()
        if inventory.node_of(owner) not in nodes
    }
