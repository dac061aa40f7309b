"""Parts of a shard's tensors, read once for all that want them, and only where they are wanted."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from localckpt.memory.tensor_bytes import integer_view, narrowed
from localckpt.state_dict.image_parts import ImageParts
from localckpt.state_dict.regions import Cut, Region, cuts_of, flat_rectangles
from localckpt.state_dict.runs import PartReceiver, RowRuns, Run, Runs
from localckpt.state_dict.source import PIECE_NBYTES
from localckpt.state_dict.tensor_table import TableEntry

__all__ = ["PRIVATE", "SavedTensor", "picked", "stream_parts"]

PRIVATE = "private"
"""Text for :attr:`SavedTensor.equal_on` of a tensor that the table of boxes does not have."""


@dataclass(frozen=True)
class SavedTensor:
    """Tensor of a shard, as a part of a global tensor.

    Attributes:
        number: Number of the tensor in the image.
        key: Key of the global tensor.
        shape: Shape of the global tensor.
        region: Elements of it that the tensor has.
        equal_on: Text for the ranks whose tensors of this part are said to be equal.
        entry: Entry in the table of tensors.
        start: Offset of its first item in the image.
    """

    number: int
    key: str
    shape: tuple[int, ...]
    region: Region
    equal_on: str
    entry: TableEntry
    start: int

    @cached_property
    def itemsize(self) -> int:
        """Bytes of an item."""
        return self.entry.torch_dtype().itemsize

    @cached_property
    def local(self) -> tuple[int, ...]:
        """Shape of the tensor, with as many dimensions as the global one."""
        shape = self.entry.shape
        return (1,) * (len(self.region) - len(shape)) + shape

    @cached_property
    def stop(self) -> int:
        """Offset behind its last item in the image, if its items are one run of bytes."""
        return self.start + math.prod(self.local) * self.itemsize

    @cached_property
    def order(self) -> tuple[int, ...] | None:
        """Dimensions in the order of memory; ``None`` if its items are not one run of bytes."""
        dims = tuple(range(len(self.local)))
        if self.start % self.itemsize:
            return None
        if self.entry.view is None:
            return dims
        extra = len(self.local) - len(self.entry.shape)
        strides = (math.inf,) * extra + self.entry.view[1]
        order = tuple(sorted(dims, key=lambda dim: -strides[dim]))
        step = 1
        for dim in reversed(order):
            if self.local[dim] > 1:
                if strides[dim] != step:
                    return None
                step *= self.local[dim]
        return order


class _Part(NamedTuple):
    """Part of a tensor that a receiver wants."""

    receiver: PartReceiver
    region: Region


def stream_parts(
    image: ImageParts,
    wanted: Iterable[tuple[SavedTensor, Iterable[tuple[PartReceiver, Region]]]],
    stored: Callable[[TableEntry], torch.Tensor],
) -> None:
    """Read parts of tensors, and only the pieces of the image that hold them.

    Args:
        image: The image of the shard.
        wanted: Tensors, with those who want elements of the global tensor that the tensor has.
        stored: Reads a tensor whose items are no run of bytes, as a view of its slot.

    Raises:
        CorruptShardError: A block is damaged; no byte of it was handed on.
        StorageError: The medium failed.
    """
    runs: list[Run] = []
    others: list[tuple[SavedTensor, list[_Part]]] = []
    row_runs = RowRuns()
    for tensor, parts in wanted:
        if not math.prod(tensor.local):
            continue
        those = [_Part(*part) for part in parts]
        if tensor.order is None:
            _deliver_irregular(tensor, those, stored)
            continue
        left = those
        if tensor.order == tuple(range(len(tensor.local))):
            left = []
            row_nbytes = math.prod(tensor.local[1:]) * tensor.itemsize
            for part in those:
                if (rows := row_runs.find(tensor.region, part.region)) is None:
                    left.append(part)
                    continue
                start = tensor.start + rows[0] * row_nbytes
                runs.append(Run(start, start + rows[1] * row_nbytes, part.receiver))
        if left:
            others.append((tensor, left))
    _stream(image, Runs(runs, [(t.start, t.stop) for t, _ in others]), others)


def _stream(
    image: ImageParts, runs: Runs, others: Sequence[tuple[SavedTensor, list[_Part]]]
) -> None:
    by_piece: dict[int, list[tuple[SavedTensor, list[_Part]]]] = {}
    for tensor, parts in others:
        for start in _pieces(tensor, parts):
            by_piece.setdefault(start, []).append((tensor, parts))
    of_thread = threading.local()

    def places(start: int, stop: int) -> list[memoryview]:
        if not hasattr(of_thread, "buffer"):
            of_thread.buffer = memoryview(bytearray(PIECE_NBYTES))
        of_thread.scratch = of_thread.buffer[: stop - start]
        places, of_thread.dones = runs.places(start, stop, of_thread.scratch)
        return places

    def filled(start: int, _: list[memoryview]) -> None:
        for done in of_thread.dones:
            done()
        runs.copy(start, of_thread.scratch)
        if start in by_piece:
            data = torch.frombuffer(of_thread.scratch, dtype=torch.uint8)
            for tensor, parts in by_piece[start]:
                _deliver_from(tensor, parts, start, data)

    image.stream(places, filled, sorted(runs.pieces.union(by_piece)))


def _pieces(tensor: SavedTensor, parts: Sequence[_Part]) -> list[int]:
    """Starts of the pieces of the image that hold parts of a tensor."""
    starts = range(tensor.start // PIECE_NBYTES * PIECE_NBYTES, tensor.stop, PIECE_NBYTES)
    if len(starts) == 1:
        return list(starts)
    wanted = []
    for start in starts:
        begin, end = max(start, tensor.start), min(start + PIECE_NBYTES, tensor.stop)
        cuts = (c for part in parts for c in _cuts_between(tensor, part, begin, end))
        if next(cuts, None) is not None:
            wanted.append(start)
    return wanted


def _deliver_irregular(
    tensor: SavedTensor, parts: Sequence[_Part], stored: Callable[[TableEntry], torch.Tensor]
) -> None:
    """Deliver parts of a tensor that is not one run of bytes, as of overlapping views."""
    items = integer_view(stored(tensor.entry)).reshape(tensor.local)
    rows = max(1, PIECE_NBYTES // max(1, items[:1].numel() * tensor.itemsize))
    rows = rows if items.dim() else 1
    for receiver, part in parts:
        for begin in range(0, items.shape[0] if items.dim() else 1, rows):
            starts = (begin, *(0 for _ in tensor.local[1:])) if items.dim() else ()
            sizes = (min(rows, items.shape[0] - begin), *tensor.local[1:]) if items.dim() else ()
            for cut in cuts_of(tensor.region, part, starts, sizes):
                receiver.take_cut(cut.first, cut.sizes, narrowed(items, cut.local, cut.sizes))


def picked(items: torch.Tensor, region: Region, part: Region) -> torch.Tensor:
    """Pick elements of the tensor of a region, in the order of their indices.

    Args:
        items: The tensor, with as many dimensions as the region.
        region: Elements of the global tensor that the tensor has.
        part: Elements of them.
    """
    for dim, (runs, wanted) in enumerate(zip(region, part, strict=True)):
        cuts = cuts_of((runs,), (wanted,), (0,), (items.shape[dim],))
        items = torch.cat([items.narrow(dim, cut.local[0], cut.sizes[0]) for cut in cuts], dim)
    return items


def _permuted(values: Sequence[Any], order: Sequence[int]) -> tuple[Any, ...]:
    return tuple(values[dim] for dim in order)


def _cuts_between(tensor: SavedTensor, part: _Part, begin: int, end: int) -> Iterable[Cut]:
    """Cuts of a part among the items of a tensor that lie in some bytes; dimensions in order."""
    order = tensor.order or ()
    shape = _permuted(tensor.local, order)
    region, wanted = _permuted(tensor.region, order), _permuted(part.region, order)
    first = (begin - tensor.start) // tensor.itemsize
    last = (end - tensor.start) // tensor.itemsize
    for starts, sizes in flat_rectangles(shape, first, last):
        yield from cuts_of(region, wanted, starts, sizes)


def _deliver_from(
    tensor: SavedTensor, parts: Sequence[_Part], start: int, data: torch.Tensor
) -> None:
    """Deliver the parts of a tensor that are in a piece of the image."""
    order = tensor.order
    assert order is not None, "its items are one run"
    itemsize, shape = tensor.itemsize, _permuted(tensor.local, order)
    begin, end = max(start, tensor.start), min(start + len(data), tensor.stop)
    region = _permuted(tensor.region, order)
    wanted = [(receiver, _permuted(part, order)) for receiver, part in parts]
    back = tuple(order.index(dim) for dim in range(len(order)))
    at = begin - start
    first, last = (begin - tensor.start) // itemsize, (end - tensor.start) // itemsize
    for starts, sizes in flat_rectangles(shape, first, last):
        nbytes = math.prod(sizes) * itemsize
        items = integer_view(data[at : at + nbytes], itemsize).view(sizes)
        at += nbytes
        for receiver, part in wanted:
            for cut in cuts_of(region, part, starts, sizes):
                inside = [a - b for a, b in zip(cut.local, starts, strict=True)]
                values = narrowed(items, inside, cut.sizes).permute(back)
                natural = Cut(*(_permuted(numbers, back) for numbers in cut))
                receiver.take_cut(natural.first, natural.sizes, values)
