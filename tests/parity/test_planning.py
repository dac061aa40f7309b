"""Whatever up to m members lose comes back exactly."""

from __future__ import annotations

from collections.abc import Collection
from itertools import combinations

import numpy as np
import pytest

from localckpt.memory.digests import BLOCK_NBYTES
from localckpt.parity.planning import Left, plan_rebuild
from localckpt.parity.stripes import Kind, ParityLayout
from tests.parity.groups import carry_out, group

_SHAPES = [(g, m) for g in range(3, 9) for m in (1, 2) if g >= m + 2]


def _sizes(g: int) -> tuple[int, ...]:
    """Different ones, none a multiple of anything; the longest has several blocks a chunk."""
    return (2 * (g - 1) * BLOCK_NBYTES - 12_345, *(7001 * k * k for k in range(2, g)), 0)[:g]


def _left(g: int, lost: Collection[int]) -> Left:
    there = {member: member for member in range(g) if member not in lost}
    return Left(there, there)


@pytest.mark.parametrize(("g", "m"), _SHAPES)
def test_any_m_lost_members_come_back(g: int, m: int) -> None:
    layout = ParityLayout(_sizes(g), m)
    kept = group(layout)
    for lost in (set(c) for k in range(1, m + 1) for c in combinations(range(g), k)):
        left = _left(g, lost)
        held = {n: {(kind, n): kept[kind, n] for kind in Kind} for n in left.images}
        sinks = {(Kind.IMAGE, n): np.zeros_like(kept[Kind.IMAGE, n]) for n in lost}

        carry_out(plan_rebuild(layout, left, {n: n for n in lost}), held, sinks)

        assert all(np.array_equal(sinks[at], kept[at]) for at in sinks), f"lost {lost}"


def test_survivors_share_the_work_and_the_target_gets_one_image() -> None:
    g, nbytes = 6, 40 * BLOCK_NBYTES
    layout = ParityLayout((nbytes,) * g, 1)
    chains = plan_rebuild(layout, _left(g, {2}), {2: 2})

    sent = {
        rank: sum(c.nbytes for c in chains for hop in c.hops[:-1] if hop.rank == rank)
        for rank in range(g)
    }
    received = sum(c.nbytes for c in chains if c.hops[-1].rank == 2)

    assert sent == {rank: 0 if rank == 2 else nbytes for rank in range(g)}
    assert received == nbytes
    assert len({chain.hops[0].rank for chain in chains}) == g - 1, "all take turns at being first"


def test_an_image_that_is_there_is_copied_not_computed() -> None:
    layout = ParityLayout((3 * BLOCK_NBYTES, 5, 5), 1)
    chains = plan_rebuild(layout, _left(3, {}), {0: 1})

    assert [[hop.rank for hop in chain.hops] for chain in chains] == [[0, 1], [0, 1]]
