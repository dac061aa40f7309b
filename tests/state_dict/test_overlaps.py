"""The pairs of chunks that overlap are those of the plain definition, found in little work."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localckpt.state_dict.boxes import Region, overlapping_pairs

Chunks = list[Region]


def chunk(offsets: Sequence[int], sizes: Sequence[int]) -> Region:
    return tuple((run,) for run in zip(offsets, sizes, strict=True))


def tiled(edges: Sequence[Sequence[int]]) -> Chunks:
    """All boxes between neighbouring edges in each dimension."""
    return [
        chunk([start for start, _ in box], [end - start for start, end in box])
        for box in product(*(pairwise(along) for along in edges))
    ]


def tiling(shape: Sequence[int], parts: Sequence[int]) -> Chunks:
    """A tensor in so many nearly equal parts along each dimension."""
    return tiled(
        [
            [size * i // count for i in range(count + 1)]
            for size, count in zip(shape, parts, strict=True)
        ]
    )


def pairs_by_definition(wanted: Chunks, saved: Chunks) -> list[tuple[int, int]]:
    """All pairs whose intersection has a length in every dimension."""

    def overlap(one: Region, other: Region) -> bool:
        return all(
            max(a, b) < min(a + a_size, b + b_size)
            for ((a, a_size),), ((b, b_size),) in zip(one, other, strict=True)
        )

    return [
        (w, s)
        for w, one in enumerate(wanted)
        for s, other in enumerate(saved)
        if overlap(one, other)
    ]


@st.composite
def two_lists_of_boxes(draw: st.DrawFn) -> tuple[Chunks, Chunks]:
    """Boxes of one number of dimensions that lie in any way."""
    dims = draw(st.integers(0, 4))
    extent = draw(st.sampled_from([3, 12, 1000]))
    size = st.integers(0, draw(st.sampled_from([2, 5, extent])))
    box = st.tuples(*[st.tuples(st.integers(0, extent), size)] * dims)

    def boxes() -> Chunks:
        # Left alone, lists are mostly very short.
        fewest = draw(st.sampled_from([0, 15, 40]))
        drawn = draw(st.lists(box, min_size=fewest, max_size=40))
        return [chunk([start for start, _ in b], [size for _, size in b]) for b in drawn]

    return boxes(), boxes()


@st.composite
def two_tilings(draw: st.DrawFn) -> tuple[Chunks, Chunks]:
    """One tensor divided in two ways, unevenly, in any order."""
    shape = draw(st.lists(st.integers(1, 60), min_size=1, max_size=4))

    def edges(size: int) -> list[int]:
        most = min(size, 60 // len(shape) ** 2)
        inner = st.sets(st.integers(1, size), min_size=draw(st.integers(0, most)), max_size=most)
        return sorted({0, size} | draw(inner))

    return (
        draw(st.permutations(tiled([edges(size) for size in shape]))),
        draw(st.permutations(tiled([edges(size) for size in shape]))),
    )


@given(lists=two_lists_of_boxes())
def test_pairs_of_arbitrary_boxes_are_those_of_the_definition(
    lists: tuple[Chunks, Chunks],
) -> None:
    pairs = overlapping_pairs(*lists)

    assert pairs == pairs_by_definition(*lists)


@given(lists=two_tilings())
def test_pairs_of_tilings_are_those_of_the_definition(
    lists: tuple[Chunks, Chunks],
) -> None:
    pairs = overlapping_pairs(*lists)

    assert pairs == pairs_by_definition(*lists)


@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        pytest.param((8000, 50000), (8000, 1), id="rows of a wide matrix"),
        pytest.param((50000, 8000), (1, 8000), id="columns"),
        pytest.param((9000, 9000), (90, 89), id="grid"),
        pytest.param((900, 900, 900), (20, 20, 20), id="blocks"),
    ],
)
def test_thousands_are_found(shape: tuple[int, ...], parts: tuple[int, ...]) -> None:
    wanted, saved = tiling(shape, [max(1, count - 1) for count in parts]), tiling(shape, parts)

    pairs = overlapping_pairs(wanted, saved)

    assert len(wanted) < len(pairs) < 9 * len(saved)
