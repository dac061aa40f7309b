"""Search for the parts of one sharding of a tensor that overlap those of another one.

Space is cut in two, along any dimension, until few chunks are left to compare, so the search takes
little longer than there are chunks and pairs, whichever dimensions the shardings divide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Chunk", "overlapping_pairs"]


class Chunk(Protocol):
    """Rectangular part of a tensor."""

    @property
    def offsets(self) -> Sequence[int]:
        """First index in each dimension."""

    @property
    def sizes(self) -> Sequence[int]:
        """Number of indices in each dimension."""


# A loop compares so many pairs, and one more for each chunk, before there would be tensors of them.
_PAIRS_OF_A_LOOP = 200
# Up to so many for each chunk in a cell, comparisons cost less than a cut.
_COMPARISONS_PER_CHUNK = 64
# A cut spares at least a tenth of the comparisons, so there are never more than without any cut.
_WORTH_A_CUT = 0.9
# Cuts tried along each dimension, at quantiles of where the chunks start.
_CUTS_TRIED = 7
# Chunks of either side by which a cut is chosen.
_SAMPLE = 1024
# Also bounds the memory. From 32,768 elements on torch uses its threads, which wait for each other
# for milliseconds, at every operation, when another process keeps a core busy.
_PAIRS_AT_ONCE = (32 << 10) - 1

# A part of space: the wanted and the saved chunks that reach into it, and where it starts. Chunks
# are rows of starts in each dimension, ends in each dimension, and the index.
_Cell = tuple[Tensor, Tensor, Tensor]


def overlapping_pairs(wanted: Sequence[Chunk], saved: Sequence[Chunk]) -> list[tuple[int, int]]:
    """Indices of each wanted and saved chunk that have an element in common, in order.

    The chunks may lie in any way: unsorted, of unequal sizes, over each other or with gaps. One of
    a size of 0 overlaps nothing; in a tensor of 0 dimensions every chunk is its one element. For
    tilings the time grows little faster than the number of chunks and pairs.
    """
    if len(wanted) * len(saved) > _PAIRS_OF_A_LOOP + len(wanted) + len(saved):
        return _search(_rows(wanted), _rows(saved), len(saved))
    return [
        (w, s)
        for w, wanted_chunk in enumerate(wanted)
        for s, saved_chunk in enumerate(saved)
        if _overlap(wanted_chunk, saved_chunk)
    ]


def _overlap(one: Chunk, other: Chunk) -> bool:
    for a, a_size, b, b_size in zip(
        one.offsets, one.sizes, other.offsets, other.sizes, strict=True
    ):
        if not (a_size and b_size and a < b + b_size and b < a + a_size):
            return False
    return True


def _rows(chunks: Sequence[Chunk]) -> Tensor:
    """See :data:`_Cell`; without empty chunks, and on the CPU whatever the default device is."""
    start = torch.tensor([c.offsets for c in chunks], dtype=torch.int64, device="cpu")
    sizes = torch.tensor([c.sizes for c in chunks], dtype=torch.int64, device="cpu")
    index = torch.arange(len(chunks), device="cpu")
    return _where((sizes > 0).all(1), torch.cat((start, start + sizes, index[:, None]), 1))


def _where(chosen: Tensor, rows: Tensor) -> Tensor:
    # Indexing would use torch's threads from 3,000 elements on.
    return rows.index_select(0, chosen.nonzero().squeeze(1))


def _search(wanted: Tensor, saved: Tensor, saved_count: int) -> list[tuple[int, int]]:
    """Cut space until the pairs in a cell are few or no cut makes them fewer; compare these."""
    dims = wanted.shape[1] // 2
    lowest = torch.full((dims,), torch.iinfo(torch.int64).min, dtype=torch.int64, device="cpu")
    cells = [(wanted, saved, lowest)]
    found: list[int] = []
    while cells:
        cell = cells.pop()
        if parts := _cut(cell) or _halve(cell):
            cells += parts
        else:
            w, s = _compare(cell)
            found += (w * saved_count + s).tolist()
    return [divmod(pair, saved_count) for pair in sorted(found)]


def _cut(cell: _Cell) -> list[_Cell]:
    """The cells on both sides of a cut; none if it is not worth it.

    A chunk that the cut goes through is in both.
    """
    wanted, saved, floor = cell
    dims = len(floor)
    pairs = len(wanted) * len(saved)
    if not dims or pairs <= _COMPARISONS_PER_CHUNK * (len(wanted) + len(saved)):
        return []
    samples = [rows[:: 1 + len(rows) // _SAMPLE] for rows in (wanted, saved)]
    starts = torch.cat(samples)[:, :dims].sort(dim=0).values
    step = len(starts) // (_CUTS_TRIED + 1)
    cuts = starts[step::step]
    starting = [(rows[:, None, :dims] < cuts).sum(0) for rows in samples]
    ending = [(rows[:, None, dims:-1] > cuts).sum(0) for rows in samples]
    best = int((starting[0] * starting[1] + ending[0] * ending[1]).argmin())
    dim, at = best % dims, cuts.flatten()[best]
    low = [_where(rows[:, dim] < at, rows) for rows in (wanted, saved)]
    high = [_where(rows[:, dims + dim] > at, rows) for rows in (wanted, saved)]
    raised = floor.clone()
    raised[dim] = at
    parts = [(low[0], low[1], floor), (high[0], high[1], raised)]
    return parts if sum(len(w) * len(s) for w, s, _ in parts) <= _WORTH_A_CUT * pairs else []


def _halve(cell: _Cell) -> list[_Cell]:
    """Two cells with half of the wanted or of the saved each; none if the cell is small enough."""
    wanted, saved, floor = cell
    if len(wanted) * len(saved) <= _PAIRS_AT_ONCE:
        return []
    if len(wanted) > len(saved):
        return [(half, saved, floor) for half in wanted.tensor_split(2)]
    return [(wanted, half, floor) for half in saved.tensor_split(2)]


def _compare(cell: _Cell) -> tuple[Tensor, Tensor]:
    """Indices of the wanted and of the saved chunk of the pairs whose intersection starts here.

    So a pair that is in several cells is found in one. Below the floor it can only start where both
    chunks do; beyond the end of a cell it cannot, as there are no chunks that start there.
    """
    wanted, saved, floor = cell
    dims = len(floor)
    hit = torch.ones(len(wanted), len(saved), dtype=torch.bool, device="cpu")
    for dim in range(dims):
        a, a_end = wanted[:, dim, None], wanted[:, dims + dim, None]
        b, b_end = saved[:, dim], saved[:, dims + dim]
        hit &= (a < b_end) & (b < a_end) & ((a >= floor[dim]) | (b >= floor[dim]))
    w, s = hit.nonzero().unbind(1)
    return wanted[:, -1].index_select(0, w), saved[:, -1].index_select(0, s)
