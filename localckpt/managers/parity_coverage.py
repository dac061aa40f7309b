"""What parity makes up for: which shards can be computed, and which losses of nodes lose them.

Pure functions of who holds what. A stripe of a group has a symbol for each member, a chunk of its
image or one of its parities, and any of them can be computed from the others as long as no more are
missing than there are parities. Images are taken to be in every stripe that they can be in; those
that are shorter than others may in truth survive more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import combinations, product
from typing import TypeAlias

from localckpt.ids import Checkpoint, ParityGroup
from localckpt.managers.holdings import Holdings
from localckpt.replication.parity.stripes import ParityLayout

__all__ = [
    "breaking_sets",
    "can_rebuild",
    "computable",
    "group_for",
    "groups_of",
    "least_losses",
    "minimal",
]

Nodes: TypeAlias = frozenset[str]


def can_rebuild(
    group: ParityGroup, rank: int, images: Collection[int], parities: Collection[int]
) -> bool:
    """Whether a member's image can be computed.

    Args:
        group: The group.
        rank: The member.
        images: Members whose images can be read.
        parities: Members whose parities can be read.
    """
    layout, member = _layout(len(group.ranks), group.parity), group.ranks.index(rank)
    gone = [place for place, of in enumerate(group.ranks) if of not in images]
    gone_parities = [place for place, of in enumerate(group.ranks) if of not in parities]
    for stripe in range(layout.members):
        chunks = layout.contributors(stripe)
        lost = sum(place in chunks for place in gone)
        lost += sum(row.member in gone_parities for row in layout.rows(stripe))
        if member in chunks and lost > group.parity:
            return False
    return True


def group_for(
    rank: int,
    images: Collection[int],
    groups: Iterable[ParityGroup],
    parities: Mapping[ParityGroup, Collection[int]],
) -> ParityGroup | None:
    """A group from which a rank's image can be computed, the same for the same arguments.

    Args:
        rank: Whose image.
        images: Ranks whose images can be read.
        groups: Those that the rank is in; see :func:`groups_of`.
        parities: For each group the ranks whose parity can be read.
    """
    for group in sorted(groups, key=lambda group: (group.ranks, group.parity)):
        if can_rebuild(group, rank, images, parities[group]):
            return group
    return None


def groups_of(groups: Iterable[ParityGroup]) -> dict[int, list[ParityGroup]]:
    """For each rank the groups that it is in."""
    of_rank: dict[int, list[ParityGroup]] = {}
    for group in groups:
        for rank in group.ranks:
            of_rank.setdefault(rank, []).append(group)
    return of_rank


def computable(checkpoint: Checkpoint, holdings: Holdings) -> set[int]:
    """Ranks whose shards of a checkpoint no node holds, and which can be computed."""
    parities = holdings.parities(checkpoint)
    images = holdings.shards(checkpoint).keys()
    return {
        rank
        for rank, groups in groups_of(parities).items()
        if rank not in images and group_for(rank, images, groups, parities) is not None
    }


def breaking_sets(checkpoint: Checkpoint, holdings: Holdings) -> list[Nodes]:
    """The smallest sets of nodes with which some shard of a complete checkpoint is lost."""
    holders, parities = holdings.holders(checkpoint), holdings.parities(checkpoint)
    of_rank = groups_of(parities)
    return minimal(
        lost
        for rank in range(checkpoint.world_size)
        for lost in _breaking(rank, holders, {g: parities[g] for g in of_rank.get(rank, ())})
    )


def least_losses(checkpoint: Checkpoint, holdings: Holdings) -> dict[int, int]:
    """For each rank, how many nodes must be lost at least for its shard to be lost."""
    holders, parities = holdings.holders(checkpoint), holdings.parities(checkpoint)
    of_rank = groups_of(parities)
    of_group: dict[ParityGroup, tuple[int, ...]] = {}
    least: dict[int, int] = {}
    for rank in range(checkpoint.world_size):
        groups = of_rank.get(rank, [])
        if len(groups) != 1:
            sets = _breaking(rank, holders, {group: parities[group] for group in groups})
            least[rank] = min(map(len, sets))
            continue
        (group,) = groups
        if group not in of_group:
            shape = _shape(group, holders, parities[group])
            of_group[group] = _least_losses(group.parity, shape)
        least[rank] = of_group[group][group.ranks.index(rank)]
    return least


def minimal(sets: Iterable[Nodes]) -> list[Nodes]:
    """Sets none of which contains another, the smallest first."""
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
    holders: Mapping[int, Iterable[str]],
    parities: Mapping[ParityGroup, Mapping[int, Iterable[str]]],
) -> list[Nodes]:
    """The smallest sets of nodes with which one rank's shard is lost; an empty one if it is lost.

    Args:
        rank: Whose shard.
        holders: For each rank the nodes that hold its image.
        parities: For each group that the rank is in, the nodes that hold each rank's parity.
    """
    own = frozenset(holders.get(rank, ()))
    of_groups = [minimal(_losses(group, rank, holders, kept)) for group, kept in parities.items()]
    # It is lost with its image and what it could be computed from, in every group.
    return minimal(own.union(*sets) for sets in product(*of_groups))


def _losses(
    group: ParityGroup,
    rank: int,
    holders: Mapping[int, Iterable[str]],
    parities: Mapping[int, Iterable[str]],
) -> Iterator[Nodes]:
    """Sets of nodes with which one stripe has lost a chunk and as many symbols as parities."""
    layout, member = _layout(len(group.ranks), group.parity), group.ranks.index(rank)
    own = frozenset(holders.get(rank, ()))
    seen: set[tuple[Nodes, ...]] = set()
    for stripe in range(layout.members):
        chunks = layout.contributors(stripe)
        if member not in chunks:
            continue
        others = [holders.get(group.ranks[c], ()) for c in chunks if c != member]
        others += [parities.get(group.ranks[row.member], ()) for row in layout.rows(stripe)]
        symbols = tuple(sorted(map(frozenset, others), key=sorted))
        if symbols not in seen:
            seen.add(symbols)
            for lost in combinations(symbols, group.parity):
                yield own.union(*lost)


_Shape: TypeAlias = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""For each member the nodes with its image and with its parity, by numbers in order of mention."""


def _shape(
    group: ParityGroup,
    holders: Mapping[int, Sequence[str]],
    parities: Mapping[int, Sequence[str]],
) -> _Shape:
    numbers: dict[str, int] = {}

    def numbered(nodes: Iterable[str]) -> tuple[int, ...]:
        return tuple(numbers.setdefault(node, len(numbers)) for node in nodes)

    return tuple(
        (numbered(holders.get(rank, ())), numbered(parities.get(rank, ()))) for rank in group.ranks
    )


@lru_cache(maxsize=256)
def _least_losses(parity: int, shape: _Shape) -> tuple[int, ...]:
    """For each member; most groups of a job have one shape."""
    group = ParityGroup(tuple(range(len(shape))), parity)
    holders = {rank: map(str, nodes) for rank, (nodes, _) in enumerate(shape)}
    images = {rank: list(nodes) for rank, nodes in holders.items()}
    kept = {rank: list(map(str, nodes)) for rank, (_, nodes) in enumerate(shape)}
    return tuple(min(map(len, _losses(group, rank, images, kept))) for rank in range(len(shape)))


@lru_cache(maxsize=64)
def _layout(members: int, parity: int) -> ParityLayout:
    """Any with these numbers: which member is in which stripe does not depend on the sizes."""
    return ParityLayout((1,) * members, parity)
