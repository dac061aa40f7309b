"""Which shards are to be computed from parity, and who reads what for it: pure functions.

All ranks plan the same from the same. What cannot be read after all is found out by the ranks that
read it, and they plan again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localckpt.errors import MismatchError, NoReplicasAvailableError
from localckpt.ids import Checkpoint, ParityGroup
from localckpt.managers.holdings import Holdings
from localckpt.managers.parity_coverage import group_for, groups_of
from localckpt.replication.parity.planning import Left
from localckpt.replication.parity.stripes import Kind
from localckpt.state_dict.parity_of import ParityOf

__all__ = [
    "NOTHING_FOUND",
    "Findings",
    "Repair",
    "Seen",
    "plan_repairs",
    "reader_on",
    "require_group",
    "take_together",
    "turns",
]


@dataclass(frozen=True, slots=True)
class Repair:
    """What is computed in one group.

    Attributes:
        group: The group.
        images: For each member whose image is somewhere, the rank that reads it.
        parities: The same for each member's parity.
        wanted: Members whose images are computed, each for itself.
    """

    group: ParityGroup
    images: Mapping[int, int]
    parities: Mapping[int, int]
    wanted: tuple[int, ...]

    @property
    def ranks(self) -> list[int]:
        """All that take part."""
        return sorted({*self.images.values(), *self.parities.values(), *self.wanted})

    def reads(self, rank: int) -> list[tuple[Kind, int]]:
        """What a rank reads: the kind, and whose."""
        return [
            *((Kind.IMAGE, owner) for owner, reader in self.images.items() if reader == rank),
            *((Kind.PARITY, owner) for owner, reader in self.parities.items() if reader == rank),
        ]


def plan_repairs(
    checkpoint: Checkpoint,
    holdings: Holdings,
    damaged: Mapping[int, Collection[str]],
    hopeless: Collection[int],
) -> list[Repair]:
    """What is to be computed so that every shard of a checkpoint can be had.

    Args:
        checkpoint: Which.
        holdings: What each node holds.
        damaged: Nodes with a copy of a rank's shard that is not good, but may be in part.
        hopeless: Ranks whose shards have been tried in vain.

    Raises:
        NoReplicasAvailableError: Some shard is neither held nor can it be computed.
    """
    holders, kept = holdings.holders(checkpoint), holdings.parities(checkpoint)
    of_rank = groups_of(kept)
    there = {rank: list(nodes) for rank, nodes in damaged.items() if nodes} | holders
    wanted: dict[ParityGroup, list[int]] = {}
    for rank in range(checkpoint.world_size):
        if rank in holders:
            continue
        group = group_for(rank, there, of_rank.get(rank, ()), kept)
        if group is None or rank in hopeless:
            raise NoReplicasAvailableError(
                f"no node holds the shard of rank {rank} of iteration {checkpoint.iteration}, and "
                f"it cannot be computed from what is left"
            )
        wanted.setdefault(group, []).append(rank)
    return [
        Repair(
            group,
            {r: reader_on(there[r], r, holdings) for r in group.ranks if r in there},
            {r: reader_on(kept[group][r], r, holdings) for r in group.ranks if r in kept[group]},
            tuple(ranks),
        )
        for group, ranks in sorted(wanted.items(), key=lambda item: item[0].ranks)
    ]


def reader_on(nodes: Sequence[str], owner: int, holdings: Holdings) -> int:
    """The rank that reads what some nodes hold of a rank: it itself, if it can."""
    if holdings.node_of(owner) in nodes:
        return owner
    ranks = holdings.ranks_on[nodes[0]]
    return ranks[owner % len(ranks)]


def turns(repairs: Iterable[Repair]) -> int:
    """How many repairs may have to wait for one another, where each rank makes its own in order."""
    of_rank: dict[int, int] = {}
    for repair in repairs:
        turn = 1 + max(of_rank.get(rank, 0) for rank in repair.ranks)
        of_rank.update(dict.fromkeys(repair.ranks, turn))
    return max(of_rank.values(), default=0)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a rank found when it read an image or a parity.

    Attributes:
        kind, owner: What it read.
        problem: Why it is of no use at all, if so.
        bad_blocks: Blocks of the image or of the parity that are no good.
        of: What a parity is of, as its header says.
        heads: The sizes of the heads with it, in bytes; empty if they are no good.
        nbytes: The size of an image.
    """

    kind: Kind
    owner: int
    problem: str | None = None
    bad_blocks: tuple[int, ...] = ()
    of: ParityOf | None = None
    heads: tuple[int, ...] = ()
    nbytes: int = 0

    def to_json(self) -> list[Any]:
        of = self.of and self.of.to_json()
        found = [self.problem, self.bad_blocks, of, self.heads, self.nbytes]
        return [self.kind, self.owner, *found]

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> Seen:
        kind, owner, problem, bad_blocks, of, heads, nbytes = fields
        parity_of = of and ParityOf.from_json(of)
        blocks = tuple(bad_blocks)
        return cls(Kind(kind), owner, problem, blocks, parity_of, tuple(heads), nbytes)


@dataclass(frozen=True, slots=True)
class Findings:
    """What all ranks found of what a repair is to read.

    Attributes:
        gone: What is of no use: kind, owner, the rank that read it, and why.
        damaged: Of what is of use in part, the same.
        of: What the parities are of; ``None`` if there is none.
        left: For :func:`plan_rebuild`.
        heads: For each member that is wanted, the member whose parity has its head, where in the
            heads there it begins, and its size.
    """

    gone: tuple[tuple[Kind, int, int, str], ...]
    damaged: tuple[tuple[Kind, int, int, str], ...]
    of: ParityOf | None
    left: Left
    heads: Mapping[int, tuple[int, int, int]]

    @property
    def doubtful(self) -> list[int]:
        """Ranks whose images may have fewer bad blocks than was found without their heads."""
        return [owner for kind, owner, _, _ in self.damaged if kind is Kind.IMAGE]


NOTHING_FOUND = Findings((), (), None, Left({}, {}), {})
"""Before anybody has looked."""


def take_together(repair: Repair, seen: Sequence[tuple[int, Seen]]) -> Findings:
    """Put together what ranks found.

    Args:
        repair: What was to be read.
        seen: With the ranks that found it.
    """
    place = {rank: number for number, rank in enumerate(repair.group.ranks)}
    told = sorted(seen, key=lambda s: (s[1].kind, place[s[1].owner]))
    of = next((s.of for _, s in told if s.of is not None and s.problem is None), None)
    gone, damaged = [], []
    at: dict[Kind, dict[int, int]] = {Kind.IMAGE: {}, Kind.PARITY: {}}
    bad_blocks: dict[tuple[Kind, int], frozenset[int]] = {}
    heads_of: dict[int, tuple[int, ...]] = {}
    for reader, found in told:
        problem = found.problem
        if problem is None and found.kind is Kind.PARITY and found.of != of:
            problem = f"it is the parity of {found.of}, and others are of {of}"
        if problem is None and found.kind is Kind.IMAGE and of is not None:
            nbytes = of.image_nbytes[place[found.owner]]
            if found.nbytes != nbytes:
                problem = f"it has {found.nbytes} bytes, and its group's parity is of {nbytes}"
        if problem is not None:
            gone.append((found.kind, found.owner, reader, problem))
            continue
        at[found.kind][place[found.owner]] = reader
        if found.kind is Kind.PARITY:
            heads_of[found.owner] = found.heads
        if found.bad_blocks or (found.kind is Kind.PARITY and not found.heads):
            bad_blocks[found.kind, place[found.owner]] = frozenset(found.bad_blocks)
            blocks = f"{len(found.bad_blocks)} of its blocks are no good"
            damaged.append((found.kind, found.owner, reader, blocks))
    return Findings(
        tuple(gone),
        tuple(damaged),
        of,
        Left(at[Kind.IMAGE], at[Kind.PARITY], bad_blocks),
        {rank: head for rank in repair.wanted if (head := _head(repair.group, rank, heads_of))},
    )


def _head(
    group: ParityGroup, rank: int, heads_of: Mapping[int, Sequence[int]]
) -> tuple[int, int, int] | None:
    for keeper, sizes in heads_of.items():
        behind = group.behind(keeper)
        if rank in behind and len(sizes) == len(behind):
            place = behind.index(rank)
            return keeper, sum(sizes[:place]), sizes[place]
    return None


def require_group(of: ParityOf, group: ParityGroup) -> None:
    """Refuse a parity that is of another group than its node told.

    Raises:
        MismatchError: It is.
    """
    if of.group != group:
        raise MismatchError(f"it is the parity of {of.group}, not of {group}")
