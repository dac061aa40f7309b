"""Shards are counted as available by whatever code the pieces of a kind have, in any mixture."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localckpt.availability.coverage import complete_checkpoints
from localckpt.availability.explanation import explain
from localckpt.availability.inventory import Inventory, Nodes
from localckpt.availability.recoverable import groups_to_compute, least_losses, minimal
from localckpt.errors import NoReplicasAvailableError
from localckpt.ids import Checkpoint, Generation, Group, ShardRecord
from localckpt.replication.schemes import SCHEMES

_CHECKPOINT = Checkpoint(Generation(1, 2), 3, 4)


class _Sums:
    """A code of which each member keeps the sum of all images: any one of them can be lost."""

    def fits(self, group: Group) -> bool:
        return group.tolerated == 1

    def rebuilds(
        self, group: Group, rank: int, images: Collection[int], pieces: Collection[int]
    ) -> bool:
        others = [other for other in group.ranks if other != rank]
        return all(other in images for other in others) and any(r in pieces for r in group.ranks)

    def losses(
        self,
        group: Group,
        rank: int,
        holders: Mapping[int, Collection[str]],
        pieces: Mapping[int, Collection[str]],
    ) -> Iterable[Nodes]:
        own = frozenset(holders.get(rank, ()))
        for other in group.ranks:
            if other != rank:
                yield own.union(holders.get(other, ()))
        yield own.union(*(pieces.get(r, ()) for r in group.ranks))


_CODES = {**SCHEMES, "sum": _Sums()}


@st.composite
def _found(draw: st.DrawFn) -> dict[str, list[ShardRecord]]:
    """Shards of four ranks on four nodes, and pieces of two kinds."""
    found: dict[str, list[ShardRecord]] = {node: [] for node in "abcd"}
    for rank in range(4):
        for node in draw(st.sets(st.sampled_from("abcd"), max_size=2)):
            found[node].append(ShardRecord(_CHECKPOINT.shard(rank, "run"), 5))
    for group in (
        Group((0, 1, 2), 1, "sum"),
        Group((3, 1, 0, 2), draw(st.integers(1, 2)), "parity"),
    ):
        for rank in draw(st.sets(st.sampled_from(group.ranks))):
            piece = _CHECKPOINT.shard(rank, "run").of_kind(group.kind)
            found[draw(st.sampled_from("abcd"))].append(ShardRecord(piece, 7, group))
    return found


@given(_found())
def test_the_smallest_losses_are_told_of_pieces_of_several_kinds(
    found: dict[str, list[ShardRecord]],
) -> None:
    inventory = Inventory.found(found, codes=_CODES)

    def is_lost(lost: Collection[str]) -> bool:
        left = {node: there for node, there in found.items() if node not in lost}
        return not complete_checkpoints(Inventory.found(left, codes=_CODES))

    explanation = explain(inventory)

    assert (explanation.newest is None) == is_lost(())
    if explanation.newest is not None:
        sets = [frozenset(s) for count in range(5) for s in combinations("abcd", count)]
        breaking = minimal(filter(is_lost, sets))
        assert set(map(frozenset, explanation.breaking)) == set(breaking)
        assert min(least_losses(_CHECKPOINT, inventory).values()) == min(map(len, breaking))


def test_a_shard_is_computed_from_whichever_group_can() -> None:
    group = Group((0, 1, 2), 1, "sum")
    records = [ShardRecord(_CHECKPOINT.shard(rank, "run"), 5) for rank in (1, 2, 3)]
    records.append(ShardRecord(_CHECKPOINT.shard(2, "run").of_kind("sum"), 7, group))
    inventory = Inventory.found({"a": records}, codes=_CODES)

    assert groups_to_compute(_CHECKPOINT, inventory, ()) == {0: group}
    assert explain(inventory).checkpoints[0].computed == {0: "sum"}
    assert "sum" in str(explain(inventory))
    with pytest.raises(NoReplicasAvailableError, match="the shard of rank 0"):
        groups_to_compute(_CHECKPOINT, inventory, {0})
    without_codes = Inventory.found({"a": records})
    with pytest.raises(NoReplicasAvailableError, match="the shard of rank 0"):
        groups_to_compute(_CHECKPOINT, without_codes, ())
