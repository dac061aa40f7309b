"""The code of parity: which members of a group can be lost, and how they are computed.

A stripe of a group has a symbol for each member, a chunk of its image or one of its parities, and
any of them can be computed from the others as long as no more are missing than there are parities.
Images are taken to be in every stripe that they can be in; those that are shorter than others may
in truth survive more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from itertools import combinations
from typing import TYPE_CHECKING

from localckpt.availability.inventory import Nodes
from localckpt.errors import MismatchError
from localckpt.ids import Group
from localckpt.parity.stripes import ParityLayout

if TYPE_CHECKING:
    from localckpt.ranks.ranks import Ranks
    from localckpt.replication.redundancy import Lost, Recovered
    from localckpt.storage.store import Store


class ParityCode:
    """See :class:`localckpt.replication.redundancy.RecoveryScheme`."""

    def fits(self, group: Group) -> bool:
        try:
            _layout(len(group.ranks), group.tolerated)
        except MismatchError:
            return False
        return True

    def rebuilds(
        self, group: Group, rank: int, images: Collection[int], pieces: Collection[int]
    ) -> bool:
        layout, member = _layout(len(group.ranks), group.tolerated), group.ranks.index(rank)
        gone = [place for place, of in enumerate(group.ranks) if of not in images]
        gone_pieces = [place for place, of in enumerate(group.ranks) if of not in pieces]
        for stripe in range(layout.members):
            chunks = layout.contributors(stripe)
            lost = sum(place in chunks for place in gone)
            lost += sum(row.member in gone_pieces for row in layout.rows(stripe))
            if member in chunks and lost > group.tolerated:
                return False
        return True

    def losses(
        self,
        group: Group,
        rank: int,
        holders: Mapping[int, Collection[str]],
        pieces: Mapping[int, Collection[str]],
    ) -> Iterator[Nodes]:
        """Sets of nodes with which one stripe has lost a chunk and as many symbols as parities."""
        layout, member = _layout(len(group.ranks), group.tolerated), group.ranks.index(rank)
        own = frozenset(holders.get(rank, ()))
        seen: set[tuple[Nodes, ...]] = set()
        for stripe in range(layout.members):
            chunks = layout.contributors(stripe)
            if member not in chunks:
                continue
            others = [holders.get(group.ranks[c], ()) for c in chunks if c != member]
            others += [pieces.get(group.ranks[row.member], ()) for row in layout.rows(stripe)]
            symbols = tuple(sorted(map(frozenset, others), key=sorted))
            if symbols not in seen:
                seen.add(symbols)
                for lost in combinations(symbols, group.tolerated):
                    yield own.union(*lost)

    def recover(self, lost: Lost, store: Store, ranks: Ranks, timeout_s: float) -> Recovered:
        # Commands that only look at stores need no torch.
        from localckpt.parity.rebuilding import Rebuilding

        return Rebuilding(lost, store, ranks, timeout_s).run()


@lru_cache(maxsize=64)
def _layout(members: int, parity: int) -> ParityLayout:
    """Any with these numbers: which member is in which stripe does not depend on the sizes."""
    return ParityLayout((1,) * members, parity)
