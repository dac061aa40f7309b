"""Regions behave as the sets of elements that they describe."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localckpt.state_dict.boxes import (
    Region,
    bounds_of,
    common,
    cuts_of,
    flat_rectangles,
    local_starts,
    volume,
    whole,
    without,
)

Element = tuple[int, ...]


def _elements(region: Region) -> set[Element]:
    sides = [[i for start, count in runs for i in range(start, start + count)] for runs in region]
    return set(itertools.product(*sides))


def _rectangle(starts: Any, sizes: Any) -> list[Element]:
    return list(itertools.product(*(range(a, a + n) for a, n in zip(starts, sizes, strict=True))))


@st.composite
def _regions(draw: Any, count: int = 2) -> tuple[tuple[int, ...], list[Region]]:
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))

    def runs(size: int) -> tuple[tuple[int, int], ...]:
        indices = sorted(draw(st.sets(st.integers(0, size - 1))))
        found: list[tuple[int, int]] = []
        for index in indices:
            if found and sum(found[-1]) == index:
                found[-1] = (found[-1][0], found[-1][1] + 1)
            else:
                found.append((index, 1))
        return tuple(found) or ((0, 0),)

    return shape, [tuple(runs(size) for size in shape) for _ in range(count)]


@settings(max_examples=300, deadline=None)
@given(_regions())
def test_regions_are_sets(drawn: tuple[tuple[int, ...], list[Region]]) -> None:
    _, (one, other) = drawn
    both, rest = common(one, other), without(one, other)

    assert (_elements(both) if both is not None else set()) == _elements(one) & _elements(other)
    parts = [_elements(part) for part in rest]
    assert set().union(*parts) == _elements(one) - _elements(other)
    assert sum(map(len, parts)) == len(set().union(*parts))
    assert volume(one) == len(_elements(one))
    if volume(one):
        assert _elements(one) <= set(_rectangle(*bounds_of(one)))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_consecutive_elements_are_few_rectangles_in_order(shape: list[int], data: Any) -> None:
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))

    found = list(flat_rectangles(shape, start, stop))

    elements = [element for rectangle in found for element in _rectangle(*rectangle)]
    assert elements == list(itertools.product(*map(range, shape)))[start:stop]
    assert len(found) <= max(1, 2 * len(shape) - 1)


@settings(max_examples=300, deadline=None)
@given(_regions(), st.data())
def test_cuts_tell_where_each_element_is_on_both_sides(
    drawn: tuple[tuple[int, ...], list[Region]], data: Any
) -> None:
    _, (region, other) = drawn
    part = common(region, other)
    if part is None:
        return
    sides = [[i for s, n in runs for i in range(s, s + n)] for runs in region]
    starts = [data.draw(st.integers(0, len(side) - 1)) for side in sides]
    sizes = [
        data.draw(st.integers(1, len(side) - start))
        for side, start in zip(sides, starts, strict=True)
    ]

    cuts = list(cuts_of(region, part, starts, sizes))

    found = []
    for cut in cuts:
        there, here = _rectangle(cut.first, cut.sizes), _rectangle(cut.local, cut.sizes)
        for element, local in zip(there, here, strict=True):
            assert element == tuple(side[i] for side, i in zip(sides, local, strict=True))
        found += there
        assert local_starts(region, cut.first, cut.sizes) == cut.local
    wanted = {
        tuple(side[i] for side, i in zip(sides, local, strict=True))
        for local in _rectangle(starts, sizes)
    }
    assert sorted(found) == sorted(wanted & _elements(part))


def test_a_rectangle_outside_of_a_region_is_refused() -> None:
    region = (((0, 2), (4, 2)),)

    for first, size in ((1, 2), (2, 1), (5, 2), (-1, 1), (4, -1)):
        with pytest.raises(ValueError, match="is in no run"):
            local_starts(region, (first,), (size,))
    assert local_starts(region, (4,), (2,)) == (2,)
    assert whole((2, 3)) == (((0, 2),), ((0, 3),))
