"""Search for the parts of one sharding of a tensor that overlap those of another one.

Chunks that overlap do so along each dimension. The pairs that do along one of them, that with the
fewest such pairs, are found by sorting, and compared along all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy

_Ints = numpy.ndarray[Any, numpy.dtype[numpy.int64]]


class Chunk(Protocol):
    """Rectangular part of a tensor."""

    @property
    def offsets(self) -> Sequence[int]:
        """First index in each dimension."""

    @property
    def sizes(self) -> Sequence[int]:
        """Number of indices in each dimension."""


# A loop compares so many pairs, and one more for each chunk, before there would be arrays of them.
_PAIRS_OF_A_LOOP = 200
# Bounds the memory.
_PAIRS_AT_ONCE = 1 << 20


def overlapping_pairs(wanted: Sequence[Chunk], saved: Sequence[Chunk]) -> list[tuple[int, int]]:
    """Indices of each wanted and saved chunk that have an element in common, in order.

    The chunks may lie in any way: unsorted, of unequal sizes, over each other or with gaps. One of
    a size of 0 overlaps nothing; in a tensor of 0 dimensions every chunk is its one element. The
    time grows with the number of chunks, and of pairs that overlap along one dimension.
    """
    if len(wanted) * len(saved) <= _PAIRS_OF_A_LOOP + len(wanted) + len(saved):
        return [
            (w, s)
            for w, wanted_chunk in enumerate(wanted)
            for s, saved_chunk in enumerate(saved)
            if _overlap(wanted_chunk, saved_chunk)
        ]
    w_spans, w_index = _spans(wanted)
    s_spans, s_index = _spans(saved)
    found: list[int] = []
    for w, s in _candidates(w_spans, s_spans):
        hit = numpy.ones(len(w), dtype=bool)
        for (w_start, w_end), (s_start, s_end) in zip(w_spans, s_spans, strict=True):
            hit &= (w_start[w] < s_end[s]) & (s_start[s] < w_end[w])
        found += (w_index[w[hit]] * len(saved) + s_index[s[hit]]).tolist()
    return [divmod(pair, len(saved)) for pair in sorted(found)]


def _overlap(one: Chunk, other: Chunk) -> bool:
    for a, a_size, b, b_size in zip(
        one.offsets, one.sizes, other.offsets, other.sizes, strict=True
    ):
        if not (a_size and b_size and a < b + b_size and b < a + a_size):
            return False
    return True


def _spans(chunks: Sequence[Chunk]) -> tuple[list[tuple[_Ints, _Ints]], _Ints]:
    """Return starts and ends, by dimension, of the chunks that are not empty, and their indices.

    The last dimension is one more, of one index, for tensors that have none.
    """
    starts = numpy.array([(*c.offsets, 0) for c in chunks], dtype=numpy.int64)
    sizes = numpy.array([(*c.sizes, 1) for c in chunks], dtype=numpy.int64)
    index = numpy.flatnonzero((sizes > 0).all(1))
    starts, sizes = starts[index], sizes[index]
    return list(zip(starts.T, (starts + sizes).T, strict=True)), index


def _candidates(
    wanted: list[tuple[_Ints, _Ints]], saved: list[tuple[_Ints, _Ints]]
) -> Iterator[tuple[_Ints, _Ints]]:
    """Yield pairs that overlap along one dimension, each once."""
    joins = [
        # The saved chunk begins within the wanted one, or that begins later, within the saved one.
        (_within(s[0], *w, "left"), _within(w[0], *s, "right"))
        for w, s in zip(wanted, saved, strict=True)
    ]
    begin_in_wanted, begin_in_saved = min(
        joins, key=lambda join: sum(int((high - low).sum()) for _, low, high in join)
    )
    yield from _expanded(*begin_in_wanted)
    for s, w in _expanded(*begin_in_saved):
        yield w, s


def _within(points: _Ints, starts: _Ints, ends: _Ints, side: Any) -> tuple[_Ints, _Ints, _Ints]:
    """Find the points in spans: returns their order, and first and end in it for each span."""
    order = numpy.argsort(points, kind="stable")
    low = numpy.searchsorted(points[order], starts, side=side)
    return order, low, numpy.searchsorted(points[order], ends, side="left")


def _expanded(order: _Ints, low: _Ints, high: _Ints) -> Iterator[tuple[_Ints, _Ints]]:
    """Yield, for spans and the points in them, one pair of indices each, some at a time."""
    counts = high - low
    ends = numpy.cumsum(counts)
    begin = 0
    while begin < len(counts):
        before = ends[begin] - counts[begin]
        end = max(begin + 1, int(numpy.searchsorted(ends, before + _PAIRS_AT_ONCE, side="right")))
        of = counts[begin:end]
        spans = numpy.repeat(numpy.arange(begin, end), of)
        number = numpy.arange(len(spans)) - numpy.repeat(ends[begin:end] - of - before, of)
        yield spans, order[low[spans] + number]
        begin = end
