"""Regions: sets of elements of a global tensor that are one list of runs in each dimension.

A box of an image's table has a region; what two boxes have in common is a region, too. Pure
functions, without torch.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from localckpt.state_dict.boxes import Run

__all__ = [
    "Bounds",
    "Cut",
    "Region",
    "bounds_of",
    "common",
    "cuts_of",
    "flat_rectangles",
    "local_starts",
    "narrowed_rows",
    "volume",
    "whole",
    "without",
]

Runs = tuple[Run, ...]
Region = tuple[Runs, ...]
"""For each dimension the indices, as runs in ascending order. Without a dimension: one element."""


class Bounds(NamedTuple):
    """Smallest rectangle around a region.

    Attributes:
        offsets: First index in each dimension.
        sizes: Number of indices in each dimension.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Cut(NamedTuple):
    """Rectangle of a tensor, in the indices of the tensor and in those of the global tensor.

    Attributes:
        local: First index in each dimension of the tensor.
        first: First index in each dimension of the global tensor.
        sizes: Number of indices in each dimension.
    """

    local: tuple[int, ...]
    first: tuple[int, ...]
    sizes: tuple[int, ...]


def whole(shape: Sequence[int]) -> Region:
    """Return the region of a whole tensor."""
    return tuple(((0, size),) for size in shape)


def volume(region: Region) -> int:
    """Return the number of elements of a region."""
    return math.prod(sum(count for _, count in runs) for runs in region)


def bounds_of(region: Region) -> Bounds:
    """Return the smallest rectangle around a region; an empty one if the region is empty."""
    offsets, sizes = [], []
    for runs in region:
        start, end = runs[0][0], sum(runs[-1])
        offsets.append(start)
        sizes.append(end - start)
    return Bounds(tuple(offsets), tuple(sizes))


def common(one: Region, other: Region) -> Region | None:
    """Return the elements that two regions have in common; ``None`` if there are none."""
    shared = []
    for a, b in zip(one, other, strict=True):
        if not (runs := _common_runs(a, b)):
            return None
        shared.append(runs)
    return tuple(shared)


def without(region: Region, other: Region) -> list[Region]:
    """Return the elements of a region that are not in another one, as disjoint regions."""
    if (shared := common(region, other)) is None:
        return [region] if volume(region) else []
    rest = []
    for dim, (runs, taken) in enumerate(zip(region, shared, strict=True)):
        # Below this dimension what is shared, above it everything: so no two regions overlap.
        if left := _runs_without(runs, taken):
            rest.append((*shared[:dim], left, *region[dim + 1 :]))
    return [part for part in rest if volume(part)]


def cuts_of(
    region: Region, part: Region, starts: Sequence[int], sizes: Sequence[int]
) -> Iterator[Cut]:
    """Cut out of a tensor what a part of its region has in common with a rectangle of the tensor.

    Args:
        region: Region of the tensor, whose indices follow each other in the tensor.
        part: Elements that are wanted; all of them are in the region.
        starts, sizes: The rectangle, in the tensor's own indices.
    """
    sides = []
    for runs, wanted, start, size in zip(region, part, starts, sizes, strict=True):
        side, local = [], 0
        for first, count in runs:
            low, high = max(start, local), min(start + size, local + count)
            if low < high:
                shift = first - local
                for begin, length in _common_runs(((low + shift, high - low),), wanted):
                    side.append((begin - shift, begin, length))
            local += count
        if not side:
            return
        sides.append(side)
    for chosen in product(*sides):
        yield (
            Cut(*(tuple(numbers) for numbers in zip(*chosen, strict=True)))
            if chosen
            else Cut((), (), ())
        )


def local_starts(region: Region, first: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """Return where a rectangle of the global tensor begins in the tensor of a region.

    Raises:
        ValueError: The rectangle is not within one run of the region in each dimension.
    """
    starts = []
    for runs, begin, size in zip(region, first, sizes, strict=True):
        at = bisect_right(runs, begin, key=lambda run: run[0]) - 1
        if at < 0 or size < 0 or begin + size > sum(runs[at]):
            raise ValueError(f"{begin}:{begin + size} is in no run of {runs!r:.80}")
        starts.append(sum(count for _, count in runs[:at]) + begin - runs[at][0])
    return tuple(starts)


def narrowed_rows(region: Region, dim: int, start: int, count: int) -> Region:
    """Return the elements of some consecutive rows of the tensor of a region.

    Args:
        region: Region of the tensor, whose indices follow each other in the tensor.
        dim: Dimension of the rows.
        start, count: The rows, in the tensor's own indices.
    """
    runs, local = [], 0
    for first, length in region[dim]:
        low, high = max(start, local), min(start + count, local + length)
        if low < high:
            runs.append((first + low - local, high - low))
        local += length
    return (*region[:dim], tuple(runs) or ((region[dim][0][0], 0),), *region[dim + 1 :])


def flat_rectangles(
    shape: Sequence[int], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Divide consecutive elements of a tensor, whose last index runs fastest, into rectangles.

    Args:
        shape: Shape of the tensor.
        start, stop: Numbers of the first element and of the one after the last.

    Yields:
        First indices and sizes of each rectangle, in ascending order.
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last and (start % row or stop % row):
        for starts, sizes in flat_rectangles(shape[1:], start - first * row, stop - first * row):
            yield (first, *starts), (1, *sizes)
        return
    if start % row:
        yield from flat_rectangles(shape, start, (first + 1) * row)
        first += 1
    end = stop // row
    if first < end:
        yield (first, *(0 for _ in shape[1:])), (end - first, *shape[1:])
    if end * row < stop:
        yield from flat_rectangles(shape, end * row, stop)


def _common_runs(one: Runs, other: Runs) -> Runs:
    if len(one) == len(other) == 1:
        # Nearly all tensors have one run in each dimension.
        ((a, a_count),), ((b, b_count),) = one, other
        low, high = max(a, b), min(a + a_count, b + b_count)
        return ((low, high - low),) if low < high else ()
    shared, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        (a, a_count), (b, b_count) = one[i], other[j]
        low, high = max(a, b), min(a + a_count, b + b_count)
        if low < high:
            shared.append((low, high - low))
        if a + a_count < b + b_count:
            i += 1
        else:
            j += 1
    return tuple(shared)


def _runs_without(runs: Runs, taken: Runs) -> Runs:
    left = []
    for start, count in runs:
        end = start + count
        for first, length in taken:
            if first + length <= start or first >= end:
                continue
            if start < first:
                left.append((start, first - start))
            start = max(start, first + length)
        if start < end:
            left.append((start, end - start))
    return tuple(left)
