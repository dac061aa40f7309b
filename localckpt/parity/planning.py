"""From what is left of a parity group, how to compute what is lost.

For each stripe there are as many equations as rows of parity that can be read, and as many unknowns
as chunks that cannot. Pure functions of plain data: every rank plans the same from the same.
Nothing is read or moved here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from localckpt.ids import SHARD_KIND, Group, Piece
from localckpt.parity.chains import Chain, Hop, Term
from localckpt.parity.gf import inverse, multiply, power
from localckpt.parity.image import ParityOf
from localckpt.parity.stripes import PARITY_KIND, Kind, ParityLayout, Strip
from localckpt.replication.redundancy import Lost, PieceProblem


@dataclass(frozen=True, slots=True)
class Left:
    """Remains of a group: the rank that can read each member's image, and its parity."""

    images: Mapping[int, int]
    parities: Mapping[int, int]

    def rank_with(self, strip: Strip) -> int | None:
        at = self.images if strip.kind is Kind.IMAGE else self.parities
        return at.get(strip.member)


def plan_rebuild(layout: ParityLayout, left: Left, wanted: Mapping[int, int]) -> list[Chain]:
    """The chains that bring the images of members to the ranks that want them.

    A chain goes over the ranks whose bytes are needed, so each sends and receives about what is
    wanted once, however many they are. Ranks take turns at being first, who receives nothing.
    """
    chains: list[Chain] = []
    for member, rank in wanted.items():
        for stripe in range(layout.members):
            if member not in layout.contributors(stripe):
                continue
            place = layout.chunk(stripe, member)
            symbols = _Symbols.of(layout, stripe)
            lost = symbols.lost(left)
            parts = symbols.express(place, lost) if place.nbytes else {}
            if parts:
                chains.append(Chain(_hops(parts, left, rank, number=len(chains)), place))
    return chains


@dataclass(frozen=True, slots=True)
class _Symbols:
    """Symbols of one stripe, and the rows that follow from its chunks."""

    chunks: tuple[Strip, ...]
    rows: tuple[Strip, ...]
    # For each row, the factor of each chunk.
    factors: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, layout: ParityLayout, stripe: int) -> _Symbols:
        members = layout.contributors(stripe)
        rows = layout.rows(stripe)
        return cls(
            tuple(layout.chunk(stripe, member) for member in members),
            rows,
            tuple(
                tuple(power(row * layout.exponent(stripe, member)) for member in members)
                for row in range(len(rows))
            ),
        )

    def lost(self, left: Left) -> frozenset[Strip]:
        return frozenset(
            strip
            for strip in (*self.chunks, *self.rows)
            if strip.nbytes and left.rank_with(strip) is None
        )

    def express(self, wanted: Strip, lost: frozenset[Strip]) -> dict[Strip, int]:
        """A chunk as a sum of what can be read, with factors; strips of zeros are no part of it."""
        if wanted not in lost:
            return {wanted: 1}
        unknown = [number for number, chunk in enumerate(self.chunks) if chunk in lost]
        known_rows = [number for number, row in enumerate(self.rows) if row not in lost]
        assert len(unknown) <= len(known_rows), "the code says what can be computed"
        sums = dict.fromkeys((*self.chunks, *self.rows), 0)
        for row, weight in self._solve(self.chunks.index(wanted), unknown, known_rows):
            sums[self.rows[row]] ^= weight
            for other, chunk in enumerate(self.chunks):
                if other not in unknown:
                    sums[chunk] ^= multiply(weight, self.factors[row][other])
        return {strip: factor for strip, factor in sums.items() if factor and strip.nbytes}

    def _solve(
        self, number: int, unknown: Sequence[int], known_rows: Sequence[int]
    ) -> list[tuple[int, int]]:
        """``(row, weight)`` such that the weighted rows hold one unknown chunk once, others not."""
        if len(unknown) == 1:
            row = known_rows[0]
            return [(row, inverse(self.factors[row][number]))]
        first, second = known_rows
        (other,) = (chunk for chunk in unknown if chunk != number)
        # Cramer's rule; subtracting is adding.
        theirs = self.factors[second][other], self.factors[first][other]
        determinant = multiply(self.factors[first][number], theirs[0])
        determinant ^= multiply(self.factors[second][number], theirs[1])
        scale = inverse(determinant)
        return [(first, multiply(scale, theirs[0])), (second, multiply(scale, theirs[1]))]


def _hops(parts: Mapping[Strip, int], left: Left, target: int, number: int) -> tuple[Hop, ...]:
    terms: dict[int, list[Term]] = {}
    for strip, factor in parts.items():
        rank = left.rank_with(strip)
        assert rank is not None, "only what can be read is part of a sum"
        terms.setdefault(rank, []).append(Term(strip, factor))
    own = terms.pop(target, [])
    ranks = sorted(terms)
    first = number % len(ranks) if ranks else 0
    hops = [Hop(rank, _plain_first(terms[rank])) for rank in (*ranks[first:], *ranks[:first])]
    return (*hops, Hop(target, _plain_first(own)))


def _plain_first(terms: Sequence[Term]) -> tuple[Term, ...]:
    """A factor of 1 costs least as the first term."""
    return tuple(sorted(terms, key=lambda term: term.factor))


@dataclass(frozen=True, slots=True)
class Repair:
    """Shards that are computed in one group of ranks that saved; numbers are ranks of this job."""

    group: Group
    images: Mapping[int, int]
    parities: Mapping[int, int]
    wanted: Mapping[int, int]

    @property
    def ranks(self) -> list[int]:
        return sorted({*self.images.values(), *self.parities.values(), *self.wanted.values()})

    def reads(self, rank: int) -> list[tuple[Kind, int]]:
        return [
            *((Kind.IMAGE, owner) for owner, reader in self.images.items() if reader == rank),
            *((Kind.PARITY, owner) for owner, reader in self.parities.items() if reader == rank),
        ]


def plan_repairs(lost: Lost) -> list[Repair]:
    inventory = lost.inventory
    holders, kept = inventory.holders(lost.checkpoint), inventory.groups(lost.checkpoint)
    wanted: dict[Group, dict[int, int]] = {}
    for member, group in lost.wanted.items():
        wanted.setdefault(group, {})[member] = lost.computed_by[member]
    return [
        Repair(
            group,
            {r: inventory.reader(holders[r], r) for r in group.ranks if r in holders},
            {r: inventory.reader(kept[group][r], r) for r in group.ranks if r in kept[group]},
            computing,
        )
        for group, computing in sorted(wanted.items(), key=lambda item: item[0].ranks)
    ]


def piece_of(kind: int, owner: int) -> Piece:
    return Piece(owner, PARITY_KIND if kind == Kind.PARITY else SHARD_KIND)


def longest_wait(repairs: Iterable[Repair]) -> int:
    """Number of repairs that may wait for one another, where each rank makes its own in order."""
    of_rank: dict[int, int] = {}
    for repair in repairs:
        last = 1 + max(of_rank.get(rank, 0) for rank in repair.ranks)
        of_rank.update(dict.fromkeys(repair.ranks, last))
    return max(of_rank.values(), default=0)


class Seen(NamedTuple):
    """Report of a rank that read an image or a parity, ``of`` what its header says; plain data."""

    kind: int
    owner: int
    problem: str | None = None
    of: str | None = None
    nbytes: int = 0


def take_together(
    repair: Repair, seen: Sequence[tuple[int, Seen]]
) -> tuple[list[PieceProblem], ParityOf | None, Left]:
    """Return what is of no use of what ranks found, what the parities are of, and what is left."""
    place = {rank: number for number, rank in enumerate(repair.group.ranks)}
    in_order = sorted(seen, key=lambda s: (s[1].kind, place[s[1].owner]))
    told = next((s.of for _, s in in_order if s.of is not None and s.problem is None), None)
    of = None if told is None else ParityOf.from_json(told)
    problems: list[PieceProblem] = []
    at: dict[int, dict[int, int]] = {Kind.IMAGE: {}, Kind.PARITY: {}}
    for reader, found in in_order:
        problem = found.problem
        if problem is None and found.kind == Kind.PARITY and found.of != told:
            problem = f"it is the parity of {ParityOf.from_json(found.of)}, and others are of {of}"
        if problem is None and found.kind == Kind.IMAGE and of is not None:
            nbytes = of.image_nbytes[place[found.owner]]
            if found.nbytes != nbytes:
                problem = f"it has {found.nbytes} bytes, and its group's parity is of {nbytes}"
        if problem is None:
            at[found.kind][place[found.owner]] = reader
        else:
            problems.append(PieceProblem(piece_of(found.kind, found.owner), reader, problem))
    return problems, of, Left(at[Kind.IMAGE], at[Kind.PARITY])
