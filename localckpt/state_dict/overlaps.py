"""Search for the rectangles of one sharding of a tensor that overlap those of another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from localckpt.state_dict.boxes import Rectangle

_Ints = numpy.ndarray[Any, numpy.dtype[numpy.int64]]


def overlapping_pairs(
    wanted: Sequence[Rectangle], saved: Sequence[Rectangle]
) -> list[tuple[int, int]]:
    """Indices of each wanted and saved rectangle that have an element in common, in order.

    The rectangles may lie in any way: unsorted, of unequal sizes, over each other or with gaps. One
    of a size of 0 overlaps nothing; in a tensor of 0 dimensions every one is its one element. A
    wanted one is compared with those that are near it along one dimension.
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


def _spans(rectangles: Sequence[Rectangle]) -> tuple[_Ints, _Ints, _Ints]:
    """Return the indices of the rectangles that are not empty, and their starts and ends.

    The last dimension is one more, of one index, for tensors that have none.
    """
    starts = numpy.array([(*one.offsets, 0) for one in rectangles], dtype=numpy.int64)
    sizes = numpy.array([(*one.sizes, 1) for one in rectangles], dtype=numpy.int64)
    index = numpy.flatnonzero((sizes > 0).all(1))
    return index, starts[index], (starts + sizes)[index]
