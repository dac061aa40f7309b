"""What counts as computable is what linear algebra can solve, for every pattern of what is left."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from itertools import product
from typing import Any

import pytest

from localckpt.availability.coverage import SaveOutcome
from localckpt.availability.durability import durability_found, durability_saved
from localckpt.availability.inventory import Inventory
from localckpt.errors import MismatchError
from localckpt.ids import Checkpoint, Generation, Group, Piece, ShardRecord
from localckpt.parity.code import ParityCode
from localckpt.parity.gf import inverse, multiply, power
from localckpt.parity.planning import Repair, longest_wait
from localckpt.parity.stripes import PARITY_KIND, ParityLayout
from localckpt.replication.schemes import SCHEMES

_CHECKPOINT = Checkpoint(Generation(1, 2), 3, 8)


def _rank_of(rows: list[list[int]]) -> int:
    """The rank of a matrix over GF(2^8)."""
    rows, rank = [list(row) for row in rows], 0
    for column in range(len(rows[0]) if rows else 0):
        pivot = next((r for r in range(rank, len(rows)) if rows[r][column]), None)
        if pivot is None:
            continue
        rows[rank], rows[pivot] = rows[pivot], rows[rank]
        scale = inverse(rows[rank][column])
        rows[rank] = [multiply(scale, value) for value in rows[rank]]
        for other in range(len(rows)):
            if other != rank and (factor := rows[other][column]):
                rows[other] = [
                    a ^ multiply(factor, b) for a, b in zip(rows[other], rows[rank], strict=True)
                ]
        rank += 1
    return rank


@cache
def _solvable(count: int, parity: int, known: frozenset[int], chunk: int) -> bool:
    """Whether a chunk follows from known symbols: chunks are 0 to ``count - 1``, then rows."""
    unit = [[int(i == j) for j in range(count)] for i in range(count)]
    rows = [[power(row * (count - 1 - j)) for j in range(count)] for row in range(parity)]
    given = [(unit + rows)[symbol] for symbol in sorted(known)]
    return _rank_of([*given, unit[chunk]]) == _rank_of(given)


def _brute_force(g: int, m: int, rank: int, images: Collection[int], parities: Any) -> bool:
    layout = ParityLayout((1,) * g, m)
    for stripe in range(g):
        chunks = layout.contributors(stripe)
        if rank not in chunks:
            continue
        known = {place for place, member in enumerate(chunks) if member in images}
        rows = layout.rows(stripe)
        known |= {len(chunks) + r for r, row in enumerate(rows) if row.member in parities}
        if not _solvable(g - m, m, frozenset(known), chunks.index(rank)):
            return False
    return True


@pytest.mark.parametrize(("g", "m"), [(g, m) for g in range(3, 9) for m in (1, 2) if g >= m + 2])
def test_exactly_what_can_be_solved_counts_as_computable(g: int, m: int, long_form: bool) -> None:
    group = Group(tuple(range(g)), m, PARITY_KIND)
    members = list(product((False, True), repeat=g))
    patterns = list(product(members, members))

    # The number has no factor in common with theirs, so all members are seen in all conditions.
    for left in patterns[:: 1 if long_form or g < 5 else 4 ** (g - 4) - 1]:
        images, parities = ({r for r in range(g) if there[r]} for there in left)
        for rank in set(range(g)) - images:
            assert ParityCode().rebuilds(group, rank, images, parities) == _brute_force(
                g, m, rank, images, parities
            )


@pytest.mark.parametrize(
    "parities",
    [
        *(7, [[]], [[0, 1]], [[0, 1, [0, 1, True]]], [[0, 0, [0, 1, 2]]], [[3, 1, [0, 1, 2]]]),
        *([[0, 1, [0, 1, 8]]], [[0, 1, 10**9]], [[0, 1, [0, 0, 0]]], [[0, 1, [0, -1, -2]]]),
        [[0, 1, [0, 1, 2]], [0, 1, [0, 1, 2]]],
    ],
    ids=str,
)
def test_parities_that_cannot_be_are_refused_and_nothing_is_taken_in(parities: Any) -> None:
    inventory = Inventory({"a": [0], "b": [1]}, SCHEMES)

    with pytest.raises(MismatchError, match="what rank 1 tells of its node's shards"):
        inventory.merge("b", [[[1, 1, 5, 8, [0], [9], {PARITY_KIND: parities}]], []])

    assert not inventory.checkpoints


@pytest.mark.parametrize(
    ("readers", "expected"),
    [
        ([], 0),
        ([{0, 1, 2}], 1),
        # One node of four ranks is lost: nobody takes part in more than one repair.
        ([{0, 4, 8}, {1, 5, 9}, {2, 6, 10}, {3, 7, 11}], 1),
        # Rank 4 reads for two groups; and rank 8 waits for it, and has ranks waiting in turn.
        ([{0, 4}, {4, 8}, {1, 5}], 2),
        ([{0, 4}, {4, 8}, {8, 12}, {1, 12}], 4),
    ],
)
def test_repairs_wait_for_each_other_only_where_they_share_ranks(
    readers: list[set[int]], expected: int
) -> None:
    group = Group((0, 1, 2), 1, PARITY_KIND)

    repairs = [Repair(group, {rank: rank for rank in ranks}, {}, {}) for ranks in readers]

    assert longest_wait(repairs) == expected


@pytest.mark.parametrize("m", [1, 2])
def test_every_parity_that_is_there_counts_as_a_copy(m: int) -> None:
    group = Group(tuple(range(8)), m, PARITY_KIND)
    outcomes = [SaveOutcome(3, Generation(1, 2), None, (), (), 1 + m, group) for _ in range(8)]
    found = {
        str(rank): [
            ShardRecord(_CHECKPOINT.shard(rank, "run"), 5),
            ShardRecord(_CHECKPOINT.shard(rank, "run").of_kind(PARITY_KIND), 5, group),
        ]
        for rank in range(8)
    }
    inventory = Inventory.found(found, codes=SCHEMES)
    protection = dict.fromkeys(range(8), group)

    assert durability_saved(3, outcomes).copies == 1 + m
    assert durability_found(_CHECKPOINT, inventory, protection).copies == 1 + m

    one_less = [*outcomes[1:], SaveOutcome(3, Generation(1, 2), None, (), (), 1 + m)]
    assert durability_saved(3, one_less).copies == m
    inventory.remove(_CHECKPOINT, Piece(4, PARITY_KIND), "4")
    assert durability_found(_CHECKPOINT, inventory, protection).copies == m


@pytest.mark.parametrize(
    "others",
    [{"parity": [[0, 1, [0, 1]]]}, {"parity": [[0, 2, [0, 1, 2]]]}, {"other": [[0, 1, [0, 1, 2]]]}],
    ids=str,
)
def test_pieces_of_which_no_scheme_can_make_anything_do_not_count(others: Any) -> None:
    inventory = Inventory({"a": [0], "b": [1]}, SCHEMES)

    inventory.merge("b", [[[1, 1, 5, 8, [0], [9], others]], []])

    (checkpoint,) = inventory.checkpoints
    assert inventory.shards(checkpoint) == {0: 9}
    assert not inventory.groups(checkpoint)
