"""Shards that can be computed from pieces of other kinds, and sets of nodes whose loss loses data.

Pure functions of an inventory. The :class:`Code` of each kind of piece decides about one group at a
time; this module combines several groups, and groups with copies of shards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import TypeAlias

from localckpt.availability.inventory import Code, Codes, Inventory, Nodes
from localckpt.errors import NoReplicasAvailableError
from localckpt.ids import Checkpoint, Group


def group_for(
    rank: int,
    images: Collection[int],
    groups: Mapping[Group, Mapping[int, Collection[str]]],
    codes: Codes,
) -> Group | None:
    """Choose a group from which a rank's shard can be computed, deterministically."""
    for group in sorted(groups, key=lambda group: (group.kind, group.ranks, group.tolerated)):
        if codes[group.kind].rebuilds(group, rank, images, groups[group]):
            return group
    return None


def computable(checkpoint: Checkpoint, inventory: Inventory) -> dict[int, Group]:
    """Return, in order, the ranks whose shards can be computed alone, and from which group."""
    images = inventory.shards(checkpoint).keys()
    return {
        rank: group
        for rank, groups in sorted(inventory.groups_of(checkpoint).items())
        if rank not in images
        and (group := group_for(rank, images, groups, inventory.codes)) is not None
    }


def groups_to_compute(
    checkpoint: Checkpoint,
    inventory: Inventory,
    unrecoverable: Collection[int],
) -> dict[int, Group]:
    """Choose a group to compute each shard that no node holds, and that did not fail before.

    Raises NoReplicasAvailableError.
    """
    held, wanted = inventory.shards(checkpoint), computable(checkpoint, inventory)
    for rank in range(checkpoint.world_size):
        if rank not in held and (rank not in wanted or rank in unrecoverable):
            raise NoReplicasAvailableError(
                f"no node holds the shard of rank {rank} of iteration {checkpoint.iteration}, and "
                f"it cannot be computed from what is left"
            )
    return wanted


def breaking_sets(checkpoint: Checkpoint, inventory: Inventory) -> list[Nodes]:
    """Return the smallest sets of nodes whose loss loses a shard of a complete checkpoint."""
    holders, groups = inventory.holders(checkpoint), inventory.groups_of(checkpoint)
    return minimal(
        lost
        for rank in range(checkpoint.world_size)
        for lost in _breaking(rank, holders, groups.get(rank, {}), inventory.codes)
    )


def least_losses(checkpoint: Checkpoint, inventory: Inventory) -> dict[int, int]:
    """Return, for each rank, the smallest number of lost nodes that loses its shard."""
    holders, of_rank = inventory.holders(checkpoint), inventory.groups_of(checkpoint)
    of_group: dict[Group, tuple[int, ...]] = {}
    least: dict[int, int] = {}
    for rank in range(checkpoint.world_size):
        groups = of_rank.get(rank, {})
        if len(groups) != 1:
            least[rank] = min(map(len, _breaking(rank, holders, groups, inventory.codes)))
            continue
        ((group, pieces),) = groups.items()
        if group not in of_group:
            shape = _shape(group, holders, pieces)
            of_group[group] = _least_losses(inventory.codes[group.kind], group.tolerated, shape)
        least[rank] = of_group[group][group.ranks.index(rank)]
    return least


def minimal(sets: Iterable[Nodes]) -> list[Nodes]:
    """Drop each set that contains another one; return the rest, the smallest first."""
    smallest: list[Nodes] = []
    by_size: dict[int, set[Nodes]] = {}
    for one in set(sets):
        by_size.setdefault(len(one), set()).add(one)
    for size in sorted(by_size):
        smaller = list(smallest)
        smallest += [one for one in by_size[size] if not any(s <= one for s in smaller)]
    return smallest


def _breaking(
    rank: int,
    holders: Mapping[int, Collection[str]],
    groups: Mapping[Group, Mapping[int, Collection[str]]],
    codes: Codes,
) -> list[Nodes]:
    """Return the smallest sets of nodes whose loss loses a shard; one empty set if it is lost."""
    own = frozenset(holders.get(rank, ()))
    of_groups = [
        minimal(codes[group.kind].losses(group, rank, holders, pieces))
        for group, pieces in groups.items()
    ]
    # To lose the shard, its copies must be lost, and in every group a set that loses the shard.
    return minimal(own.union(*sets) for sets in product(*of_groups))


_Shape: TypeAlias = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""For each member the nodes with its shard and with its piece, numbered as they first occur."""


def _shape(
    group: Group,
    holders: Mapping[int, Sequence[str]],
    pieces: Mapping[int, Collection[str]],
) -> _Shape:
    numbers: dict[str, int] = {}

    def numbered(nodes: Iterable[str]) -> tuple[int, ...]:
        return tuple(numbers.setdefault(node, len(numbers)) for node in nodes)

    return tuple(
        (numbered(holders.get(rank, ())), numbered(pieces.get(rank, ()))) for rank in group.ranks
    )


@lru_cache(maxsize=256)
def _least_losses(code: Code, tolerated: int, shape: _Shape) -> tuple[int, ...]:
    """Compute :func:`least_losses` for each member; cached, since most groups share one shape."""
    group = Group(tuple(range(len(shape))), tolerated)
    images = {rank: list(map(str, nodes)) for rank, (nodes, _) in enumerate(shape)}
    pieces = {rank: list(map(str, nodes)) for rank, (_, nodes) in enumerate(shape)}
    return tuple(min(map(len, code.losses(group, rank, images, pieces))) for rank in images)
