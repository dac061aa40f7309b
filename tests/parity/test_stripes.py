"""Every byte of every image is in one stripe, and no member holds parity of its own bytes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localckpt.errors import MismatchError
from localckpt.memory.digests import BLOCK_NBYTES
from localckpt.parity import gf
from localckpt.parity.planning import Left, plan_rebuild
from localckpt.parity.stripes import ParityLayout

_SIZES = st.one_of(st.integers(0, 3), st.integers(0, 40 * BLOCK_NBYTES), st.integers(0, 10**12))


@st.composite
def layouts(draw: st.DrawFn) -> ParityLayout:
    parity = draw(st.integers(1, 2))
    sizes = draw(st.lists(_SIZES, min_size=parity + 2, max_size=9))
    return ParityLayout(tuple(sizes), parity)


@given(layouts())
def test_chunks_cover_every_image_once_and_each_member_has_one_symbol_of_each_stripe(
    layout: ParityLayout,
) -> None:
    chunk_nbytes, members = layout.chunk_nbytes, range(layout.members)
    starts = [number * chunk_nbytes for number in range(layout.chunks)]
    for member, nbytes in enumerate(layout.image_nbytes):
        mine = [stripe for stripe in members if member in layout.contributors(stripe)]
        chunks = sorted((layout.chunk(s, member) for s in mine), key=lambda chunk: chunk.start)
        lengths = [min(chunk_nbytes, max(0, nbytes - start)) for start in starts]
        assert [(c.start, c.nbytes) for c in chunks] == [*zip(starts, lengths, strict=True)]
        assert sum(lengths) == nbytes

    for stripe in members:
        holders, others = [row.member for row in layout.rows(stripe)], layout.contributors(stripe)
        assert sorted([*holders, *others]) == [*members]
        assert len({layout.exponent(stripe, member) for member in others}) == layout.chunks
    # Each member keeps as many rows.
    rows = sorted((row.member, row.start) for s in members for row in layout.rows(s))
    assert rows == [(m, starts[number]) for m in members for number in range(layout.parity)]


@pytest.mark.parametrize(
    ("sizes", "parity"),
    [
        *(((5, 5, 5), 0), ((5,) * 6, 3), ((5, 5, 5), True), ((5, 5, 5), 1.0), ((5, 5, 5), -1)),
        *(((5, 5), 1), ((5, 5, 5), 2), ((5,) * 256, 1), ((5, 5, -1), 1), ((5, 5, 1 << 60), 1)),
        *(((5, 5, 1.5), 1), ((5, 5, None), 1), ((5, 5, True), 1), ([5, 5, 5], 1), ("555", 1)),
    ],
)
def test_what_is_no_layout_is_refused(sizes: Any, parity: Any) -> None:
    with pytest.raises(MismatchError):
        ParityLayout(sizes, parity)


_ELEMENTS = st.integers(0, 255)
_BLOCKS = (gf._XTIME_BLOCK_NBYTES, gf._SCALE_BLOCK_NBYTES)


def _times(a: int, b: int) -> int:
    """By long division of polynomials, as it is defined."""
    product = 0
    for bit in range(8):
        product ^= (a << bit) if b >> bit & 1 else 0
    for bit in range(14, 7, -1):
        product ^= (0x11D << (bit - 8)) if product >> bit & 1 else 0
    return product


_TIMES = np.array([[_times(a, b) for a in range(256)] for b in range(256)], np.uint8)


def _random(seed: int, nbytes: int, offset: int) -> gf.Bytes:
    whole = np.random.default_rng(seed).integers(0, 256, nbytes + offset, dtype=np.uint8)
    return whole[offset:]


def test_products_of_all_pairs_are_those_of_the_definition() -> None:
    assert [[gf.multiply(a, b) for a in range(256)] for b in range(256)] == _TIMES.tolist()
    with pytest.raises(ZeroDivisionError):
        gf.inverse(0)


_LENGTHS = st.one_of(
    st.integers(0, 70),
    st.builds(lambda block, more: block + more, st.sampled_from(_BLOCKS), st.integers(-9, 9)),
)


@settings(deadline=None)
@given(_LENGTHS, st.integers(0, 80), st.integers(0, 9), st.integers(0, 9), _ELEMENTS)
def test_kernels_are_what_the_table_of_products_gives(
    nbytes: int, shorter: int, acc_offset: int, data_offset: int, factor: int
) -> None:
    before = _random(1, nbytes, acc_offset)
    data = _random(2, max(0, nbytes - shorter), data_offset)
    padded = np.zeros(nbytes, np.uint8)
    padded[: len(data)] = data
    scratch = gf.Scratch()
    summed, doubled, scaled = before.copy(), _random(1, nbytes, acc_offset), before.copy()

    gf.xor_into(summed, data)
    gf.xtime_xor_into(doubled, data, scratch)
    gf.scale_xor_into(scaled, data, factor, scratch)

    assert np.array_equal(summed, before ^ padded)
    assert np.array_equal(doubled, _TIMES[2][before] ^ padded)
    assert np.array_equal(scaled, before ^ _TIMES[factor][padded])


def _left(g: int, lost: Collection[int]) -> Left:
    there = {member: member for member in range(g) if member not in lost}
    return Left(there, there)


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
