"""Choice of the ranks that read the shards of a checkpoint that another number of ranks saved."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from localckpt.availability.inventory import Inventory
from localckpt.availability.reshard import Take
from localckpt.errors import NoReplicasAvailableError
from localckpt.ids import Checkpoint
from localckpt.state_dict.part_stream import PRIVATE
from localckpt.state_dict.regions import volume
from localckpt.state_dict.runs import run_in

__all__ = ["LONG_RUN_NBYTES", "assign_readers", "reader_of"]

LONG_RUN_NBYTES = 8 << 20
"""Size of the runs of rows that a rank reads by itself, where its node holds the shard. That costs
less than to have them sent, though the pieces at their ends are read by another rank, too."""


def assign_readers(
    checkpoint: Checkpoint, inventory: Inventory, computed: Mapping[int, int] | None = None
) -> dict[int, int]:
    """Choose for each shard a rank of this job, on a node that holds the shard.

    Where tensors are divided among the ranks in their order, as by FSDP, the rank that has the
    middle of a shard now wants the most of it: it reads the shard, if its node holds that. Of the
    others each goes to the rank that has the fewest bytes to read so far; of equals to the one
    that is nearest to that rank.

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
    middles = [
        (2 * shard + 1) * len(load) // (2 * checkpoint.world_size)
        for shard in range(checkpoint.world_size)
    ]
    missing = [s for s in range(checkpoint.world_size) if s not in holders and s not in readers]
    if missing:
        raise NoReplicasAvailableError(
            f"no node holds the shard of rank {missing[0]} of iteration {checkpoint.iteration}"
        )
    left = []
    for shard in range(checkpoint.world_size):
        if shard in readers:
            continue
        middle = middles[shard]
        if inventory.node_of(middle) in holders[shard]:
            readers[shard] = middle
            load[middle] += nbytes[shard]
        else:
            left.append(shard)
    for shard in left:
        middle = middles[shard]
        ranks = (rank for node in holders[shard] for rank in inventory.ranks_on[node])
        reader = min(ranks, key=lambda rank: (load[rank], abs(rank - middle), rank))
        readers[shard] = reader
        load[reader] += nbytes[shard]
    return dict(sorted(readers.items()))


def reader_of(
    take: Take,
    itemsize: int,
    readers: Mapping[int, int],
    nodes: Sequence[str],
    held: Mapping[int, Collection[str]],
) -> int:
    """Choose the rank that reads what a rank takes.

    Args:
        take: Elements that the rank takes.
        itemsize: Bytes of an element.
        readers: For each shard the rank that reads it.
        nodes: Node of each rank.
        held: For each shard that nodes hold, these nodes.
    """
    reader = readers[take.shard]
    # Of a tensor that no table of boxes has, only who reads the values knows.
    if take.saved.equal_on == PRIVATE:
        return reader
    if nodes[take.receiver] not in held.get(take.shard, ()):
        return reader
    if volume(take.region) * itemsize < LONG_RUN_NBYTES:
        return reader
    return reader if run_in(take.saved.region, take.region) is None else take.receiver
