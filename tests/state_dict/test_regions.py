"""Regions behave as the sets of elements that they describe."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localckpt.state_dict.boxes import (
    Region,
    common,
    local_starts,
    overlapping_pairs,
    rectangles_of,
    volume,
    whole,
    without,
)
from tests.state_dict.states import elements_of, runs_of


def _rectangle(starts: Any, sizes: Any) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(a, a + n) for a, n in zip(starts, sizes, strict=True))))


@st.composite
def _regions(draw: Any, count: int = 2) -> tuple[tuple[int, ...], list[Region]]:
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))

    def runs(size: int) -> tuple[tuple[int, int], ...]:
        return runs_of(sorted(draw(st.sets(st.integers(0, size - 1)))))

    return shape, [tuple(runs(size) for size in shape) for _ in range(count)]


@given(_regions())
def test_regions_are_sets(drawn: tuple[tuple[int, ...], list[Region]]) -> None:
    _, (one, other) = drawn
    both, rest = common(one, other), without(one, other)
    mine, others = elements_of(one), elements_of(other)

    assert (elements_of(both) if both is not None else set()) == mine & others
    parts = [elements_of(part) for part in rest]
    assert set().union(*parts) == mine - others
    assert sum(map(len, parts)) == len(set().union(*parts))
    assert volume(one) == len(mine)


@given(_regions(1), st.integers(1, 40))
def test_a_region_is_its_rectangles_and_can_be_divided(
    drawn: tuple[tuple[int, ...], list[Region]], most: int
) -> None:
    _, (region,) = drawn

    found = [_rectangle(first, sizes) for first, sizes in rectangles_of(region)]
    parts = [_rectangle(first, sizes) for first, sizes in rectangles_of(region, most)]

    for pieces in (found, parts):
        assert set().union(*pieces) == elements_of(region)
        assert sum(map(len, pieces)) == volume(region)
    assert all(len(part) <= most for part in parts)
    for first, sizes in rectangles_of(region):
        if math.prod(sizes):
            starts = local_starts(region, first, sizes)
            sides = [[i for s, n in runs for i in range(s, s + n)] for runs in region]
            ends = zip(sides, starts, sizes, strict=True)
            assert [side[at : at + n] for side, at, n in ends] == [
                list(range(a, a + n)) for a, n in zip(first, sizes, strict=True)
            ]


def test_a_rectangle_outside_of_a_region_is_refused() -> None:
    region = (((0, 2), (4, 2)),)

    for first, size in ((1, 2), (2, 1), (5, 2), (-1, 1), (4, -1)):
        with pytest.raises(ValueError, match="is in no run"):
            local_starts(region, (first,), (size,))
    assert local_starts(region, (4,), (2,)) == (2,)
    assert whole((2, 3)) == (((0, 2),), ((0, 3),))


Chunks = list[Region]


def chunk(offsets: Sequence[int], sizes: Sequence[int]) -> Region:
    return tuple((run,) for run in zip(offsets, sizes, strict=True))


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


@given(lists=two_lists_of_boxes())
def test_pairs_of_arbitrary_boxes_are_those_of_the_definition(lists: tuple[Chunks, Chunks]) -> None:
    pairs = overlapping_pairs(*lists)

    assert pairs == pairs_by_definition(*lists)
