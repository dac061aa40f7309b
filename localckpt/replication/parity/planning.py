"""From what is left of a parity group, how to compute what is lost.

Decided block by block: for each block of a stripe there are as many equations as rows of parity
that can be read, and as many unknowns as chunks that cannot; a block that is corrupt on a rank that
survived is one unknown more in that place alone. Pure functions of plain data: every rank plans the
same from the same. Nothing is read or moved here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from localckpt.errors import NoReplicasAvailableError
from localckpt.memory.digests import BLOCK_NBYTES
from localckpt.replication.parity.chains import Chain, Hop, Term
from localckpt.replication.parity.gf import inverse, multiply, power
from localckpt.replication.parity.stripes import Kind, ParityLayout, Strip

__all__ = ["Left", "Want", "plan_rebuild"]

# Of what cannot be rebuilt, so many places are named.
_NAMED = 10


@dataclass(frozen=True, slots=True)
class Left:
    """Remains of a group, as all ranks know them.

    Attributes:
        images: The rank that can read each member's image; a member that is missing has lost it.
        parities: The same for each member's parity.
        bad_blocks: Blocks of :data:`BLOCK_NBYTES` that cannot be read all the same, by index from
            the start of the image or parity.
    """

    images: Mapping[int, int]
    parities: Mapping[int, int]
    bad_blocks: Mapping[tuple[Kind, int], frozenset[int]] = field(default_factory=dict)

    def rank_with(self, strip: Strip) -> int | None:
        """The rank that can read a strip, but for bad blocks."""
        at = self.images if strip.kind is Kind.IMAGE else self.parities
        return at.get(strip.member)


@dataclass(frozen=True, slots=True)
class Want:
    """A member's image, for a rank.

    Attributes:
        rank: Where it is to be.
        member: Owner of the strip.
    """

    rank: int
    member: int


def plan_rebuild(layout: ParityLayout, left: Left, wants: Sequence[Want]) -> list[Chain]:
    """The chains that bring what is wanted to where it is wanted.

    A chain goes over the ranks whose bytes are needed, each adding its part, so each sends and
    receives about what is wanted once, however many they are. Ranks take turns at being first, who
    has nothing to receive.

    Raises:
        NoReplicasAvailableError: More is lost than parity can make up for. It names the members
            and the blocks.
    """
    chains: list[Chain] = []
    hopeless: list[str] = []
    for want in wants:
        for stripe, place in _places(layout, want.member):
            symbols = _Symbols.of(layout, stripe)
            # The same sum of the same parts is one chain, wherever in the stripe it is needed.
            spans: dict[tuple[tuple[Strip, int], ...], list[tuple[int, int]]] = {}
            for start, stop in _spans(symbols, left, place):
                lost = symbols.lost(left, start)
                parts = symbols.express(place, lost, start)
                if parts is None:
                    hopeless.append(_describe(stripe, place, lost, start, stop))
                else:
                    spans.setdefault(tuple(parts.items()), []).append((start, stop))
            for terms, where in spans.items():
                hops = _hops(terms, left, want.rank, number=len(chains))
                chains.append(Chain(hops, place, tuple(where)))
    if hopeless:
        more = f", and {len(hopeless) - _NAMED} more places" if len(hopeless) > _NAMED else ""
        raise NoReplicasAvailableError(
            f"more is lost than {layout.parity} parities of a group of {layout.members} can make "
            f"up for: {'; '.join(hopeless[:_NAMED])}{more}. What is left is untouched. Bring back "
            f"a node that holds what is missing, or load an older checkpoint."
        )
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

    def lost(self, left: Left, start: int) -> frozenset[Strip]:
        """Strips of which the block at a place of the stripe cannot be read; none that is zeros."""
        return frozenset(
            strip
            for strip in (*self.chunks, *self.rows)
            if start < strip.nbytes
            and (
                left.rank_with(strip) is None
                or _block(strip, start) in left.bad_blocks.get((strip.kind, strip.member), ())
            )
        )

    def express(self, wanted: Strip, lost: frozenset[Strip], start: int) -> dict[Strip, int] | None:
        """A block of a chunk as a sum of what can be read, each with a factor that is not 0.

        Strips that have only zeros there are no part of it, whether they can be read or not.

        Returns:
            ``None`` if there is no such sum.
        """
        if wanted not in lost:
            return {wanted: 1}
        unknown = [number for number, chunk in enumerate(self.chunks) if chunk in lost]
        known_rows = [number for number, row in enumerate(self.rows) if row not in lost]
        if len(unknown) > len(known_rows):
            return None
        sums = dict.fromkeys((*self.chunks, *self.rows), 0)
        for row, weight in self._solve(self.chunks.index(wanted), unknown, known_rows):
            sums[self.rows[row]] ^= weight
            for other, chunk in enumerate(self.chunks):
                if other not in unknown:
                    sums[chunk] ^= multiply(weight, self.factors[row][other])
        return {strip: factor for strip, factor in sums.items() if factor and start < strip.nbytes}

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


def _places(layout: ParityLayout, member: int) -> Iterator[tuple[int, Strip]]:
    """A member's image, stripe by stripe."""
    for stripe in range(layout.members):
        if member in layout.contributors(stripe):
            yield stripe, layout.chunk(stripe, member)


def _spans(symbols: _Symbols, left: Left, place: Strip) -> Iterator[tuple[int, int]]:
    """Parts of what is wanted within which the same can be read, in whole blocks."""
    cuts = {0, place.nbytes}
    for strip in (*symbols.chunks, *symbols.rows):
        cuts.add(-(-strip.nbytes // BLOCK_NBYTES) * BLOCK_NBYTES)
        cuts.update(_edges(strip, left.bad_blocks.get((strip.kind, strip.member), ())))
    yield from pairwise(sorted(cut for cut in cuts if cut <= place.nbytes))


def _edges(strip: Strip, blocks: Iterable[int]) -> Iterator[int]:
    """Borders of the blocks of what a member keeps, in the stripe."""
    for block in blocks:
        start = block * BLOCK_NBYTES - strip.start
        if 0 <= start < strip.nbytes:
            yield start
            yield start + BLOCK_NBYTES


def _hops(
    parts: Sequence[tuple[Strip, int]], left: Left, target: int, number: int
) -> tuple[Hop, ...]:
    terms: dict[int, list[Term]] = {}
    for strip, factor in parts:
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


def _block(strip: Strip, start: int) -> int:
    return (strip.start + start) // BLOCK_NBYTES


def _describe(stripe: int, place: Strip, lost: frozenset[Strip], start: int, stop: int) -> str:
    first, last = _block(place, start), _block(place, stop - 1)
    blocks = f"block {first}" if first == last else f"blocks {first} to {last}"
    missing = ", ".join(
        f"{strip.kind.name.lower()} of member {strip.member}"
        for strip in sorted(lost, key=lambda strip: (strip.kind, strip.member))
    )
    return (
        f"{blocks} of the {place.kind.name.lower()} of member {place.member} (stripe {stripe}, of "
        f"which cannot be read: {missing})"
    )
