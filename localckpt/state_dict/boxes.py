"""Boxes: for each tensor of an image the part of a global tensor that it is.

The table of boxes, without private tensors, is JSON in the skeleton. What two boxes have in common
is a region: one list of runs in each dimension. This module does not import torch.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any, NamedTuple, NoReturn

import numpy
import xxhash

from localckpt.errors import CorruptShardError
from localckpt.ids import MOST_DIGITS

NO_BOXES = b"[[],[]]"
"""Table of an image whose tensors are all private to its rank."""

Run = tuple[int, int]
"""First index, and number of indices, along one dimension of a global tensor."""

# Every number in a table is below this.
_LIMIT = 10**MOST_DIGITS


# Without slots, since its pickle is read field by field.
@dataclass(frozen=True)
class RankSet:
    """Set of ranks in runs of (first, number, distance): small where they are evenly spaced."""

    runs: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, ranks: Iterable[int]) -> RankSet:
        """Describe distinct ranks."""
        ordered = sorted(ranks)
        runs, at = [], 0
        while at < len(ordered):
            end = at + 1
            step = ordered[end] - ordered[at] if end < len(ordered) else 1
            while end < len(ordered) and ordered[end] - ordered[end - 1] == step:
                end += 1
            runs.append((ordered[at], end - at, step))
            at = end
        return cls(tuple(runs))

    def __len__(self) -> int:
        return sum(count for _, count, _ in self.runs)

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._ranges())

    def __contains__(self, rank: object) -> bool:
        return any(rank in ranks for ranks in self._ranges())

    @property
    def text(self) -> str:
        """Short text, a digest, the same for equal sets."""
        return xxhash.xxh3_64_hexdigest(repr(self.runs).encode())

    def _ranges(self) -> list[range]:
        return [range(first, first + count * step, step) for first, count, step in self.runs]


class Box(NamedTuple):
    """Part of a global tensor that one tensor of an image is.

    Attributes:
        key: Name of the global tensor in the whole job.
        runs: For each dimension of the global tensor the indices that the tensor has of it, as
            runs in ascending order: one, except where a sharding is strided.
        ranks: The ranks whose tensors of this box have equal bytes; ``None`` if all have that name
            it so (Megatron-Core, whose keys are unique in a job).
    """

    key: str
    shape: tuple[int, ...]
    runs: tuple[tuple[Run, ...], ...]
    ranks: RankSet | None

    @property
    def place(self) -> str:
        """Text of the place in the global tensor, as in ``[0:3, 4:8] of [10, 8]``."""
        return f"{text_of(self.runs)} of {list(self.shape)}"

    @property
    def is_shared(self) -> bool:
        """True if other ranks should have the tensor equal, or it is not known which."""
        return self.ranks is None or len(self.ranks) > 1

    @property
    def kind(self) -> str:
        """Text that the ranks which should have the tensor equal have in common.

        Megatron-Core names no ranks. Its tensors are of a kind if the first name in their keys, and
        the dimensions that are whole, are the same: so are replicas of data parallelism, and what
        tensor parallelism leaves whole.
        """
        if self.ranks is not None:
            return repr(self.ranks.runs)
        wholes = "".join("w" if is_whole else "p" for is_whole in self.wholes)
        return f"{self.key.partition('.')[0]} {wholes}"

    @property
    def wholes(self) -> list[bool]:
        """For each dimension whether the tensor has all of it."""
        return [runs == ((0, size),) for runs, size in zip(self.runs, self.shape, strict=True)]

    def fits(self, local: tuple[int, ...]) -> bool:
        """Return whether this can be the box of a tensor of a shape, as a reader will ask."""
        try:
            return _parse_place(local, self.shape, _starts(self)) == self.runs
        except (CorruptShardError, TypeError, ValueError):
            return False


def render_boxes(boxes: Mapping[int, Box]) -> bytes:
    """Build the text of a table of boxes, by the numbers of their tensors."""
    groups: dict[RankSet, int] = {}
    rows = [
        [
            number,
            box.key,
            box.shape,
            _starts(box),
            None if box.ranks is None else groups.setdefault(box.ranks, len(groups)),
        ]
        for number, box in boxes.items()
    ]
    sets = [ranks.runs for ranks in groups]
    return json.dumps([sets, rows], separators=(",", ":")).encode()


def parse_boxes(
    text: bytes, shapes: Sequence[tuple[int, ...]], rank: int, world_size: int
) -> dict[int, Box]:
    """Parse and check the text of a table, for tensors of some shapes: boxes by number."""
    try:
        sets, rows = json.loads(text)
        groups = [_parse_ranks(fields, rank, world_size) for fields in sets]
        boxes: dict[int, Box] = {}
        # By their texts, which tell 1 from 1.0 and from true: most tensors have one of few places.
        places: dict[str, tuple[tuple[int, ...], tuple[tuple[Run, ...], ...]]] = {}
        for number, key, shape, starts, group in rows:
            if type(number) is not int or not 0 <= number < len(shapes) or number in boxes:
                _refuse(f"a box of tensor {number!r} of {len(shapes)}")
            if type(key) is not str:
                _refuse(f"a key {key!r}")
            if group is not None and (type(group) is not int or not 0 <= group < len(groups)):
                _refuse(f"a set of ranks {group!r} of {len(groups)}")
            text_of_place = repr((shapes[number], shape, starts))
            if (place := places.get(text_of_place)) is None:
                runs = _parse_place(shapes[number], shape, starts)
                place = places[text_of_place] = tuple(shape), runs
            boxes[number] = Box(key, *place, None if group is None else groups[group])
    except CorruptShardError:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        raise CorruptShardError(f"the table of boxes cannot be read: {error}") from error
    return boxes


def _parse_ranks(fields: Any, rank: int, world_size: int) -> RankSet:
    end = -1
    for first, count, step in fields:
        _require_numbers(first, count, step)
        last = first + (count - 1) * step
        if not (count and step and end < first and last < world_size):
            _refuse(f"a set of ranks {fields!r:.80} of {world_size}")
        end = last
    ranks = RankSet(tuple((first, count, step) for first, count, step in fields))
    if rank not in ranks:
        _refuse(f"a set of ranks without rank {rank}, whose image it is")
    return ranks


def _starts(box: Box) -> list[Any]:
    # A run that is alone has the size of the tensor, which the table of tensors has.
    return [runs[0][0] if len(runs) == 1 else runs for runs in box.runs]


def _parse_place(local: tuple[int, ...], shape: Any, starts: Any) -> tuple[tuple[Run, ...], ...]:
    """Return the runs of a box, all of which lie in the global tensor."""
    _require_numbers(*shape)
    # A global tensor may have more dimensions in front, in each of which the tensor is one index.
    sizes = (1,) * (len(shape) - len(local)) + local
    place = []
    for size, count, start in zip(sizes, shape, starts, strict=True):
        runs = ((start, size),) if type(start) is int else tuple((s, n) for s, n in start)
        _require_numbers(*(number for run in runs for number in run))
        end = 0
        for first, length in runs:
            if first < end or first + length > count or (len(runs) > 1 and not length):
                _refuse(f"a box at {starts!r:.80} of a tensor of {shape!r:.80}")
            end = first + length
        if not runs or sum(length for _, length in runs) != size:
            _refuse(f"a box of {list(sizes)} at {starts!r:.80}")
        place.append(runs)
    return tuple(place)


def _require_numbers(*numbers: Any) -> None:
    # type(), because isinstance(True, int) holds.
    if any(type(n) is not int or not 0 <= n < _LIMIT for n in numbers):
        _refuse(f"the numbers {numbers!r:.80}")


def _refuse(what: str) -> NoReturn:
    raise CorruptShardError(f"the table of boxes has {what}, which cannot be")


Runs = tuple[Run, ...]
Region = tuple[Runs, ...]
"""For each dimension the indices, as runs in ascending order. Without a dimension: one element."""


_Ints = numpy.ndarray[Any, numpy.dtype[numpy.int64]]


class Rectangle(NamedTuple):
    """Rectangular part of a tensor: first index, and number of indices, in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def whole(shape: Sequence[int]) -> Region:
    return tuple(((0, size),) for size in shape)


def private_box(key: str, shape: Sequence[int]) -> Box:
    """Return the box of a tensor that no table has: it is whole, and its rank's alone."""
    return Box(key, tuple(shape), whole(shape), None)


def volume(region: Region) -> int:
    return math.prod(sum(count for _, count in runs) for runs in region)


def text_of(region: Region) -> str:
    """Return the text of a region, as in ``[0:3, 4:8]``."""
    sides = ("+".join(f"{start}:{start + count}" for start, count in runs) for runs in region)
    return f"[{', '.join(sides)}]"


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


def overlapping_pairs(wanted: Sequence[Region], saved: Sequence[Region]) -> list[tuple[int, int]]:
    """Indices of each wanted and saved region whose bounds have an element in common, in order.

    The regions may lie in any way: unsorted, of unequal sizes, over each other or with gaps. An
    empty one overlaps nothing; in a tensor of 0 dimensions every one is its one element. A wanted
    one is compared with those that are near it along one dimension.
    """
    if not (wanted and saved):
        return []
    w_index, w_starts, w_ends = _spans(wanted)
    s_index, s_starts, s_ends = _spans(saved)
    along = max(range(s_starts.shape[1]), key=lambda dim: len(numpy.unique(s_starts[:, dim])))
    order = numpy.argsort(s_starts[:, along], kind="stable")
    s_index, s_starts, s_ends = s_index[order], s_starts[order], s_ends[order]
    # Those before the first that reaches so far, and from the first that begins beyond, are far.
    reached = numpy.maximum.accumulate(s_ends[:, along])
    low = numpy.searchsorted(reached, w_starts[:, along], side="right")
    high = numpy.searchsorted(s_starts[:, along], w_ends[:, along], side="left")
    # Both conditions in one comparison: it begins before the end, and ends after the start.
    bounds = numpy.concatenate([s_starts, -s_ends], axis=1)
    limits = numpy.concatenate([w_ends, -w_starts], axis=1)
    windows = zip(w_index.tolist(), limits, low.tolist(), high.tolist(), strict=True)
    return [
        (w, s)
        for w, limit, first, last in windows
        for s in sorted(s_index[first:last][(bounds[first:last] < limit).all(1)].tolist())
    ]


def _spans(regions: Sequence[Region]) -> tuple[_Ints, _Ints, _Ints]:
    """Return the regions that are not empty, and where they start and end; 0 dimensions are one."""
    rows = [[*(runs[0][0] for runs in region), 0] for region in regions]
    beyond = [[*(sum(runs[-1]) for runs in region), 1] for region in regions]
    starts, ends = (numpy.array(side, dtype=numpy.int64) for side in (rows, beyond))
    index = numpy.flatnonzero((starts < ends).all(1))
    return index, starts[index], ends[index]


def rectangles_of(region: Region, most: float = math.inf) -> Iterator[Rectangle]:
    """Yield the rectangles that a region is made of, each of at most so many elements."""
    for chosen in product(*region):
        offsets, sizes = (tuple(run[side] for run in chosen) for side in (0, 1))
        yield from _divided(Rectangle(offsets, sizes), most)


def _divided(rectangle: Rectangle, most: float) -> Iterator[Rectangle]:
    offsets, sizes = rectangle
    if math.prod(sizes) <= most:
        yield rectangle
        return
    # By rows, which are together in memory.
    dim = next(dim for dim, size in enumerate(sizes) if size > 1)
    half = sizes[dim] // 2
    for start, size in ((0, half), (half, sizes[dim] - half)):
        begin = (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :])
        yield from _divided(Rectangle(begin, (*sizes[:dim], size, *sizes[dim + 1 :])), most)


def local_starts(region: Region, first: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """Return where a rectangle of the global tensor begins in the tensor of a region."""
    starts = []
    for runs, begin, size in zip(region, first, sizes, strict=True):
        at = bisect_right(runs, begin, key=lambda run: run[0]) - 1
        if at < 0 or size < 0 or begin + size > sum(runs[at]):
            raise ValueError(f"{begin}:{begin + size} is in no run of {runs!r:.80}")
        starts.append(sum(count for _, count in runs[:at]) + begin - runs[at][0])
    return tuple(starts)


def narrowed_runs(runs: Runs, start: int, count: int) -> Runs:
    """Return some of the indices of runs: those from the number ``start`` on."""
    narrowed, local = [], 0
    for first, length in runs:
        low, high = max(start, local), min(start + count, local + length)
        if low < high:
            narrowed.append((first + low - local, high - low))
        local += length
    return tuple(narrowed) or ((runs[0][0], 0),)


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
