"""Every byte of every image is in one stripe, and no member holds parity of its own bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localckpt.errors import MismatchError
from localckpt.memory.digests import BLOCK_NBYTES
from localckpt.parity import gf
from localckpt.parity.stripes import Kind, ParityLayout
from tests.parity.groups import group

_SIZES = st.one_of(st.integers(0, 3), st.integers(0, 40 * BLOCK_NBYTES), st.integers(0, 10**12))


@st.composite
def layouts(draw: st.DrawFn) -> ParityLayout:
    parity = draw(st.integers(1, 2))
    sizes = draw(st.lists(_SIZES, min_size=parity + 2, max_size=9))
    return ParityLayout(tuple(sizes), parity)


@given(layouts())
def test_chunks_cover_every_image_once(layout: ParityLayout) -> None:
    for member, nbytes in enumerate(layout.image_nbytes):
        chunks = sorted(
            (chunk.start, chunk.nbytes)
            for stripe in range(layout.members)
            if member in layout.contributors(stripe)
            for chunk in [layout.chunk(stripe, member)]
        )

        assert len(chunks) == layout.chunks
        assert sum(length for _, length in chunks) == nbytes
        assert all(
            length == min(layout.chunk_nbytes, max(0, nbytes - start)) for start, length in chunks
        )
        assert [start for start, _ in chunks] == [
            number * layout.chunk_nbytes for number in range(layout.chunks)
        ]


@given(layouts())
def test_chunks_are_whole_blocks_and_no_longer_than_needed(layout: ParityLayout) -> None:
    needed = max(layout.image_nbytes) / layout.chunks

    assert layout.chunk_nbytes % BLOCK_NBYTES == 0
    assert needed <= layout.chunk_nbytes < needed + BLOCK_NBYTES + 1


@given(layouts())
def test_losing_a_member_takes_one_symbol_of_each_stripe(layout: ParityLayout) -> None:
    for stripe in range(layout.members):
        holders = [row.member for row in layout.rows(stripe)]

        assert sorted([*holders, *layout.contributors(stripe)]) == list(range(layout.members))
        assert len({layout.exponent(stripe, m) for m in layout.contributors(stripe)}) == (
            layout.chunks
        )


@given(layouts())
def test_every_member_keeps_the_same_number_of_rows(layout: ParityLayout) -> None:
    rows = [(row.member, row.start) for s in range(layout.members) for row in layout.rows(s)]

    assert sorted(rows) == [
        (member, number * layout.chunk_nbytes)
        for member in range(layout.members)
        for number in range(layout.parity)
    ]


@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 2),
    st.lists(st.sampled_from([0, 1, 1000, BLOCK_NBYTES, BLOCK_NBYTES + 1]), min_size=4, max_size=6),
)
def test_rows_are_the_sums_that_define_them(parity: int, sizes: list[int]) -> None:
    layout = ParityLayout(tuple(sizes), parity)
    kept = group(layout)

    for stripe in range(layout.members):
        p, q = (np.zeros(layout.chunk_nbytes, np.uint8) for _ in range(2))
        for member in layout.contributors(stripe):
            chunk = layout.chunk(stripe, member)
            content = kept[Kind.IMAGE, member][chunk.start :][: chunk.nbytes]
            p[: chunk.nbytes] ^= content
            gf.scale_xor_into(q, content, gf.power(layout.exponent(stripe, member)), gf.Scratch())
        for row, wanted in zip(layout.rows(stripe), (p, q), strict=False):
            found = kept[Kind.PARITY, row.member][row.start :][: layout.chunk_nbytes]

            assert np.array_equal(found, wanted)


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
