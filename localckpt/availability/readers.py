"""Choice of the rank that reads each shard of a checkpoint that another number of ranks saved."""

from __future__ import annotations

from collections.abc import Mapping

from localckpt.availability.inventory import Inventory
from localckpt.errors import NoReplicasAvailableError
from localckpt.ids import Checkpoint

__all__ = ["assign_readers"]


def assign_readers(
    checkpoint: Checkpoint, inventory: Inventory, computed: Mapping[int, int] | None = None
) -> dict[int, int]:
    """Choose for each shard a rank of this job, on a node that holds the shard.

    A rank reads the shard of its own number if its node holds that. Of the others each goes to the
    node, and there to the rank, that has the fewest bytes to read so far; of equals to the first.

    Args:
        checkpoint: The checkpoint.
        inventory: Pieces on all nodes.
        computed: Shards that were computed, with the rank that has each.

    Raises:
        NoReplicasAvailableError: No node holds some shard.
    """
    holders, nbytes = inventory.holders(checkpoint), inventory.shards(checkpoint)
    readers = dict(computed or {})
    load = dict.fromkeys((r for ranks in inventory.ranks_on.values() for r in ranks), 0)
    missing = [s for s in range(checkpoint.world_size) if s not in holders and s not in readers]
    if missing:
        raise NoReplicasAvailableError(
            f"no node holds the shard of rank {missing[0]} of iteration {checkpoint.iteration}"
        )
    left = []
    for shard in range(checkpoint.world_size):
        if shard in readers:
            continue
        if shard in load and inventory.node_of(shard) in holders[shard]:
            readers[shard] = shard
            load[shard] += nbytes[shard]
        else:
            left.append(shard)
    for shard in left:
        nodes = [inventory.ranks_on[node] for node in holders[shard]]
        ranks = min(nodes, key=lambda ranks: (min(load[r] for r in ranks), ranks[0]))
        reader = min(ranks, key=lambda rank: (load[rank], rank))
        readers[shard] = reader
        load[reader] += nbytes[shard]
    return dict(sorted(readers.items()))
