"""Division of the tensors that several ranks have equal: which rows of each belong to which rank.

A pure function of what all of the ranks know, so each rank computes the same division by itself.
The tensors are laid end to end in the order of their keys and cut into parts of nearly equal size,
at the boundaries of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

__all__ = ["Rows", "SharedTensor", "divide"]


class SharedTensor(NamedTuple):
    """Tensor that all ranks of a division have equal.

    Attributes:
        key: Key, by which the tensors are ordered; no two have the same.
        rows: Number of indices in its first dimension; 1 for a tensor without dimensions.
        row_nbytes: Bytes of a row.
    """

    key: str
    rows: int
    row_nbytes: int


Rows = tuple[int, int]
"""First row, and number of rows, of a tensor."""


def divide(tensors: Iterable[SharedTensor], parts: int) -> dict[str, list[Rows]]:
    """Divide tensors among ranks.

    Args:
        tensors: The tensors, in any order.
        parts: Number of ranks, at least 1.

    Returns:
        By key the rows of each rank, in the order of the ranks: together all rows, each once. No
        two ranks have sizes that differ by more than two of the largest rows.
    """
    ordered = sorted(tensors)
    total = sum(tensor.rows * tensor.row_nbytes for tensor in ordered)
    bounds = [total * part // parts for part in range(parts + 1)]
    divided: dict[str, list[Rows]] = {}
    begin = 0
    for key, rows, row_nbytes in ordered:
        cuts = _cuts(bounds, begin, rows, row_nbytes)
        divided[key] = [(a, b - a) for a, b in pairwise(cuts)]
        begin += rows * row_nbytes
    return divided


def _cuts(bounds: Sequence[int], begin: int, rows: int, row_nbytes: int) -> list[int]:
    """Return the row at which each rank begins, and the end: the nearest to each bound."""
    if not row_nbytes:
        # Without bytes it is of no weight: the first rank has it.
        return [0, *(rows for _ in bounds[1:])]
    cuts = [
        min(max((2 * (bound - begin) + row_nbytes) // (2 * row_nbytes), 0), rows)
        for bound in bounds
    ]
    # The last bound is the end of all, and no rows are left behind it.
    return [0, *cuts[1:-1], rows]
