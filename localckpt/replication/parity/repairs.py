"""Plans of who reads what to compute lost shards, and what the ranks found: pure functions.

All ranks plan the same from the same. What cannot be read after all is found out by the ranks that
read it, and they plan again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localckpt.errors import MismatchError
from localckpt.ids import SHARD_KIND, Group, Piece
from localckpt.replication.parity.code import PARITY_KIND
from localckpt.replication.parity.encode_group import ranks_behind
from localckpt.replication.parity.members import ParityOf
from localckpt.replication.parity.planning import Left
from localckpt.replication.parity.stripes import Kind
from localckpt.replication.redundancy import Lost, PieceProblem

__all__ = [
    "NOTHING_FOUND",
    "Findings",
    "Repair",
    "Seen",
    "longest_wait",
    "piece_of",
    "plan_repairs",
    "require_group",
    "take_together",
]


@dataclass(frozen=True, slots=True)
class Repair:
    """Shards that are computed in one group.

    Attributes:
        group: The group. Its members are ranks that saved the checkpoint.
        images: For each member whose image is somewhere, the rank of this job that reads it.
        parities: The same for each member's parity.
        wanted: For each member whose image is computed, the rank of this job that computes it.
    """

    group: Group
    images: Mapping[int, int]
    parities: Mapping[int, int]
    wanted: Mapping[int, int]

    @property
    def ranks(self) -> list[int]:
        """Ranks that take part."""
        return sorted({*self.images.values(), *self.parities.values(), *self.wanted.values()})

    def reads(self, rank: int) -> list[tuple[Kind, int]]:
        """Reads of a rank: the kind, and whose."""
        return [
            *((Kind.IMAGE, owner) for owner, reader in self.images.items() if reader == rank),
            *((Kind.PARITY, owner) for owner, reader in self.parities.items() if reader == rank),
        ]


def plan_repairs(lost: Lost) -> list[Repair]:
    """Plan what each group computes, and who reads what for it."""
    inventory = lost.inventory
    holders, kept = inventory.holders(lost.checkpoint), inventory.groups(lost.checkpoint)
    there = {rank: list(nodes) for rank, nodes in lost.damaged.items() if nodes} | holders
    wanted: dict[Group, dict[int, int]] = {}
    for member, group in lost.wanted.items():
        wanted.setdefault(group, {})[member] = lost.computed_by[member]
    return [
        Repair(
            group,
            {r: inventory.reader(there[r], r) for r in group.ranks if r in there},
            {r: inventory.reader(kept[group][r], r) for r in group.ranks if r in kept[group]},
            computing,
        )
        for group, computing in sorted(wanted.items(), key=lambda item: item[0].ranks)
    ]


def piece_of(kind: Kind, owner: int) -> Piece:
    """The piece that a kind of symbol is read from."""
    return Piece(owner, PARITY_KIND if kind is Kind.PARITY else SHARD_KIND)


def longest_wait(repairs: Iterable[Repair]) -> int:
    """Number of repairs that may wait for one another, where each rank makes its own in order."""
    of_rank: dict[int, int] = {}
    for repair in repairs:
        last = 1 + max(of_rank.get(rank, 0) for rank in repair.ranks)
        of_rank.update(dict.fromkeys(repair.ranks, last))
    return max(of_rank.values(), default=0)


@dataclass(frozen=True, slots=True)
class Seen:
    """Report of a rank that read an image or a parity.

    Attributes:
        kind, owner: What it read.
        problem: Why it is of no use at all, if so.
        bad_blocks: Blocks of the image or of the parity that are no good.
        of: What a parity is of, as its header says.
        envelopes: The sizes of the envelopes with it, in bytes; empty if they are no good.
        nbytes: The size of an image.
    """

    kind: Kind
    owner: int
    problem: str | None = None
    bad_blocks: tuple[int, ...] = ()
    of: ParityOf | None = None
    envelopes: tuple[int, ...] = ()
    nbytes: int = 0

    def to_json(self) -> list[Any]:
        of = self.of and self.of.to_json()
        found = [self.problem, self.bad_blocks, of, self.envelopes, self.nbytes]
        return [self.kind, self.owner, *found]

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> Seen:
        kind, owner, problem, bad_blocks, of, envelopes, nbytes = fields
        parity_of = of and ParityOf.from_json(of)
        blocks = tuple(bad_blocks)
        return cls(Kind(kind), owner, problem, blocks, parity_of, tuple(envelopes), nbytes)


@dataclass(frozen=True, slots=True)
class Findings:
    """Reports of all ranks on what a repair is to read.

    Attributes:
        problems: What is of no use, or of use in part only.
        of: What the parities are of; ``None`` if there is none.
        left: For :func:`plan_rebuild`.
        envelopes: For each member that is wanted, the member whose parity has its envelope, where
            in the envelopes there it begins, and its size.
    """

    problems: tuple[PieceProblem, ...]
    of: ParityOf | None
    left: Left
    envelopes: Mapping[int, tuple[int, int, int]]

    @property
    def to_verify(self) -> list[int]:
        """Ranks whose images may have fewer bad blocks than were found without envelopes."""
        return [p.piece.rank for p in self.problems if p.piece.is_shard and not p.is_gone]


NOTHING_FOUND = Findings((), None, Left({}, {}), {})
"""Before anybody has looked."""


def take_together(repair: Repair, seen: Sequence[tuple[int, Seen]]) -> Findings:
    """Put together what ranks found.

    Args:
        repair: What was to be read.
        seen: With the ranks that found it.
    """
    place = {rank: number for number, rank in enumerate(repair.group.ranks)}
    in_order = sorted(seen, key=lambda s: (s[1].kind, place[s[1].owner]))
    of = next((s.of for _, s in in_order if s.of is not None and s.problem is None), None)
    gone: list[PieceProblem] = []
    damaged: list[PieceProblem] = []
    at: dict[Kind, dict[int, int]] = {Kind.IMAGE: {}, Kind.PARITY: {}}
    bad_blocks: dict[tuple[Kind, int], frozenset[int]] = {}
    envelopes_of: dict[int, tuple[int, ...]] = {}
    for reader, found in in_order:
        problem = found.problem
        if problem is None and found.kind is Kind.PARITY and found.of != of:
            problem = f"it is the parity of {found.of}, and others are of {of}"
        if problem is None and found.kind is Kind.IMAGE and of is not None:
            nbytes = of.image_nbytes[place[found.owner]]
            if found.nbytes != nbytes:
                problem = f"it has {found.nbytes} bytes, and its group's parity is of {nbytes}"
        piece = piece_of(found.kind, found.owner)
        if problem is not None:
            gone.append(PieceProblem(piece, reader, problem, is_gone=True))
            continue
        at[found.kind][place[found.owner]] = reader
        if found.kind is Kind.PARITY:
            envelopes_of[found.owner] = found.envelopes
        if found.bad_blocks or (found.kind is Kind.PARITY and not found.envelopes):
            bad_blocks[found.kind, place[found.owner]] = frozenset(found.bad_blocks)
            blocks = f"{len(found.bad_blocks)} of its blocks are no good"
            damaged.append(PieceProblem(piece, reader, blocks, is_gone=False))
    return Findings(
        (*gone, *damaged),
        of,
        Left(at[Kind.IMAGE], at[Kind.PARITY], bad_blocks),
        {
            rank: envelope
            for rank in repair.wanted
            if (envelope := _envelope(repair.group, rank, envelopes_of))
        },
    )


def _envelope(
    group: Group, rank: int, envelopes_of: Mapping[int, Sequence[int]]
) -> tuple[int, int, int] | None:
    for keeper, sizes in envelopes_of.items():
        behind = ranks_behind(group, keeper)
        if rank in behind and len(sizes) == len(behind):
            place = behind.index(rank)
            return keeper, sum(sizes[:place]), sizes[place]
    return None


def require_group(of: ParityOf, group: Group) -> None:
    """Refuse a parity that is of another group than its node reported.

    Raises:
        MismatchError: It is.
    """
    if of.group != group:
        raise MismatchError(f"it is the parity of {of.group}, not of {group}")
