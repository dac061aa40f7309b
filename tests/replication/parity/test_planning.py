"""Whatever up to m members lose comes back exactly; one more is told as lost."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localckpt.errors import NoReplicasAvailableError
from localckpt.memory.digests import BLOCK_NBYTES
from localckpt.replication.parity.gf import Bytes
from localckpt.replication.parity.planning import Left, Want, plan_rebuild
from localckpt.replication.parity.stripes import Kind, ParityLayout
from tests.replication.parity.groups import Kept, carry_out, group

_SHAPES = [(g, m) for g in range(3, 9) for m in (1, 2) if g >= m + 2]


def _sizes(g: int) -> tuple[int, ...]:
    """Different ones, none a multiple of anything; the longest has several blocks a chunk."""
    return (2 * (g - 1) * BLOCK_NBYTES - 12_345, *(7001 * k * k for k in range(2, g)), 0)[:g]


def _left(g: int, lost: Collection[int]) -> Left:
    there = {member: member for member in range(g) if member not in lost}
    return Left(there, there)


def _rebuild(
    layout: ParityLayout, kept: Mapping[Kept, Bytes], left: Left, wants: list[Want]
) -> tuple[dict[Kept, Bytes], dict[int, int]]:
    held: dict[int, dict[Kept, Bytes]] = {rank: {} for rank in range(layout.members + 2)}
    for (kind, member), content in kept.items():
        at = left.images if kind is Kind.IMAGE else left.parities
        if member in at:
            # What must not be read is there, but is not what was saved.
            spoiled = content.copy()
            for block in left.bad_blocks.get((kind, member), ()):
                spoiled[block * BLOCK_NBYTES : (block + 1) * BLOCK_NBYTES] ^= 0x5A
            held[at[member]][kind, member] = spoiled
    places = [(Kind.IMAGE, want.member) for want in wants]
    sinks = {place: np.zeros_like(kept[place]) for place in places}
    return sinks, carry_out(plan_rebuild(layout, left, wants), held, sinks)


@pytest.mark.parametrize(("g", "m"), _SHAPES)
def test_any_m_lost_members_come_back_and_any_more_do_not(g: int, m: int) -> None:
    layout = ParityLayout(_sizes(g), m)
    kept = group(layout)
    for lost in (set(c) for k in range(1, m + 1) for c in combinations(range(g), k)):
        wants = [Want(member, member) for member in lost]

        sinks, _ = _rebuild(layout, kept, _left(g, lost), wants)

        assert all(np.array_equal(sinks[at], kept[at]) for at in sinks), f"lost {lost}"
    full = ParityLayout((layout.image_nbytes[0],) * g, m)
    for lost in (set(c) for c in combinations(range(g), m + 1)):
        for member in lost:
            with pytest.raises(NoReplicasAvailableError) as raised:
                plan_rebuild(full, _left(g, lost), [Want(member, member)])

            assert f"of the image of member {member} (" in str(raised.value)
            assert "cannot be read: " in str(raised.value)


@pytest.mark.parametrize("g", [4, 6])
def test_two_lost_members_may_both_come_to_one_rank_or_to_one_that_holds_another(g: int) -> None:
    layout = ParityLayout(_sizes(g), 2)
    kept = group(layout)
    for rank in (0, g):
        sinks, _ = _rebuild(layout, kept, _left(g, {1, 2}), [Want(rank, 1), Want(rank, 2)])

        assert all(np.array_equal(sinks[at], kept[at]) for at in sinks)


def test_survivors_share_the_work_and_the_target_gets_one_image() -> None:
    g, nbytes = 6, 40 * BLOCK_NBYTES
    layout = ParityLayout((nbytes,) * g, 1)
    chains = plan_rebuild(layout, _left(g, {2}), [Want(2, 2)])

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
    chains = plan_rebuild(layout, _left(3, {}), [Want(1, 0)])

    assert [[hop.rank for hop in chain.hops] for chain in chains] == [[0, 1], [0, 1]]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_bad_blocks_of_many_members_are_each_an_erasure_of_that_block_alone(
    data: st.DataObject,
) -> None:
    g, m = data.draw(st.sampled_from([(3, 1), (4, 2), (5, 2)]))
    blocks = data.draw(st.integers(1, 2))
    layout = ParityLayout(((g - m) * blocks * BLOCK_NBYTES - 77, *[1_100_000] * (g - 1)), m)
    kept = _group_of(layout)
    lost = data.draw(st.sets(st.integers(0, g - 1), max_size=m - 1))
    bad: dict[Kept, set[int]] = {}
    for stripe in range(g):
        for unit in range(layout.chunk_nbytes // BLOCK_NBYTES):
            strips = [layout.chunk(stripe, k) for k in layout.contributors(stripe)]
            strips = [s for s in (*strips, *layout.rows(stripe)) if s.member not in lost]
            for strip in data.draw(st.permutations(strips))[: m - len(lost)]:
                block = strip.start // BLOCK_NBYTES + unit
                bad.setdefault((strip.kind, strip.member), set()).add(block)
    there = {member: member for member in range(g) if member not in lost}
    left = Left(there, there, {at: frozenset(found) for at, found in bad.items()})
    wants = [Want(member, member) for member in range(g)]

    sinks, _ = _rebuild(layout, kept, left, wants)

    assert all(np.array_equal(sinks[at], kept[at]) for at in sinks)


_groups: dict[ParityLayout, dict[Kept, Bytes]] = {}


def _group_of(layout: ParityLayout) -> dict[Kept, Bytes]:
    return _groups.setdefault(layout, group(layout)) if layout not in _groups else _groups[layout]


def test_one_bad_block_too_many_is_named() -> None:
    layout = ParityLayout((8 * BLOCK_NBYTES,) * 3, 1)
    # A member's chunks lie in the stripes that it holds no parity of, here two.
    stripe, position = 2, 2 * BLOCK_NBYTES
    assert layout.chunk(stripe, 0).start + position == 6 * BLOCK_NBYTES
    (other,) = (member for member in layout.contributors(stripe) if member != 0)
    there = {member: member for member in range(3)}
    block = (layout.chunk(stripe, other).start + position) // BLOCK_NBYTES
    bad = {(Kind.IMAGE, 0): frozenset({6}), (Kind.IMAGE, other): frozenset({block})}

    with pytest.raises(NoReplicasAvailableError) as raised:
        plan_rebuild(layout, Left(there, there, bad), [Want(0, 0)])

    assert "block 6 of the image of member 0" in str(raised.value)
    assert f"image of member 0, image of member {other})" in str(raised.value)
