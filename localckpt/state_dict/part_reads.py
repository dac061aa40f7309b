"""Reads of rectangles of saved tensors into tensors, from any verified bytes that hold them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy
import torch

from localckpt.memory.copying import Copier
from localckpt.memory.host_memory import memory_at, round_up
from localckpt.memory.tensor_bytes import (
    copy_values,
    integer_view,
    is_host_run,
    is_lazy,
    narrowed,
)
from localckpt.state_dict.boxes import Rectangle
from localckpt.state_dict.source import ByteRange, Destination, VerifiedBytes

COPIED_NBYTES = 64 << 20
"""Bytes of parts that are copied out of memory of their own, read at once."""

# Larger items are complex numbers.
_LARGEST_INTEGER = 8
_ALIGNMENT = 64


class Part(NamedTuple):
    """Bytes that hold a rectangle of a saved tensor, and the tensor that it fills.

    ``to`` is where these bytes belong as they are, if that is so. Else they are items of a shape
    and a dtype, in which it begins at ``starts``; ``strides`` are ``None`` if they are contiguous.
    """

    start: int
    stop: int
    to: Destination | None
    out: torch.Tensor
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    starts: tuple[int, ...]

    @classmethod
    def contiguous(
        cls,
        start: int,
        dtype: torch.dtype,
        shape: Sequence[int],
        rectangle: Rectangle,
        out: torch.Tensor,
    ) -> Part:
        """Make the part of a rectangle of a contiguous tensor that begins at byte ``start``."""
        # Only whole rows are read, those of the first dimension that has several.
        first = next((dim for dim, size in enumerate(shape[:-1]) if size != 1), len(shape[:-1]))
        shape, offsets, sizes = (tuple(side[first:]) for side in (shape, *rectangle))
        row_nbytes = math.prod(shape[1:]) * dtype.itemsize
        nbytes = math.prod(sizes[:1]) * row_nbytes
        start += (offsets[0] if offsets else 0) * row_nbytes
        to = None
        if sizes[1:] == shape[1:] and out.dtype is dtype and is_host_run(out):
            to = memory_at(out.data_ptr(), nbytes)
        shape, starts = (*sizes[:1], *shape[1:]), (0, *offsets[1:])[: len(shape)]
        return cls(start, start + nbytes, to, out, dtype, shape, None, starts)

    def in_windows(self, nbytes: int) -> Iterator[Part]:
        """Divide a part of contiguous rows by rows, where windows of so many bytes begin."""
        rows = self.shape[0] if self.shape else 1
        row_nbytes = (self.stop - self.start) // max(1, rows)
        if self.strides is not None or rows < 2 or not row_nbytes or callable(self.to):
            yield self
            return
        dim, row = self.out.dim() - len(self.starts), 0
        while row < rows:
            start = self.start + row * row_nbytes
            left = (start // nbytes + 1) * nbytes - start
            count = min(rows - row, max(1, left // row_nbytes))
            stop = start + count * row_nbytes
            to = None if self.to is None else self.to[start - self.start : stop - self.start]
            out = self.out.narrow(dim, row, count)
            shape = (count, *self.shape[1:])
            yield self._replace(start=start, stop=stop, to=to, out=out, shape=shape)
            row += count

    def copy(self, data: torch.Tensor) -> None:
        """Copy the rectangle out of the bytes that hold it."""
        itemsize = self.dtype.itemsize
        if data.storage_offset() % itemsize:
            data = data.clone()
        items = integer_view(data, itemsize)
        if self.strides is None:
            items = items.view(self.shape)
        else:
            items = items.as_strided(self.shape, self.strides, items.storage_offset())
        out = self.out
        sizes = out.shape[out.dim() - len(self.starts) :]
        values = narrowed(items, self.starts, sizes).view(self.dtype).view(out.shape)
        convert_values(out, values)


def convert_values(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy values to a tensor of the same shape, whatever the dtypes and the devices."""
    # Tensors that were made in inference mode are written to in that mode only. Leaving that mode
    # turns gradients on, so it comes first.
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        if target.dtype is not source.dtype:
            target.copy_(source)
        elif _has_rows(target) and _has_rows(source) and target.itemsize <= _LARGEST_INTEGER:
            # torch would share the work among its threads, which wait for each other; where the
            # order of the items changes it is faster even so.
            one, other = integer_view(target.detach()), integer_view(source.detach())
            numpy.copyto(one.numpy(), other.numpy())
        else:
            copy_values(target, source)


def _has_rows(tensor: torch.Tensor) -> bool:
    """Return whether the last dimension of a plain tensor in host memory lies in its order."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.is_cpu
    is_dense = is_plain and tensor.layout is torch.strided and not is_lazy(tensor)
    return is_dense and tensor.dim() > 0 and tensor.stride(-1) == 1


def read_parts(
    source: VerifiedBytes,
    parts: Iterable[Part],
    most_nbytes: int = COPIED_NBYTES,
    most_threads: int | None = None,
) -> None:
    """Fill tensors with rectangles of saved ones, some rows at a time, by blocks that hold them."""
    pieces: list[tuple[Part, bool]] = []
    for sharing in _clusters(parts):
        if len(sharing) == 1 and sharing[0].to is not None:
            pieces.append((sharing[0], False))
        else:
            pieces += ((rows, True) for part in sharing for rows in part.in_windows(most_nbytes))
    pieces.sort(key=lambda piece: piece[0].start)
    memory = _Memory()
    together: list[Part] = []
    copied_nbytes = end = 0
    for piece, is_copied in pieces:
        is_apart = piece.start >= end or piece.start // most_nbytes > (end - 1) // most_nbytes
        if copied_nbytes >= most_nbytes and is_apart:
            read_together(source, together, memory, most_threads=most_threads)
            together, copied_nbytes = [], 0
        if is_copied:
            copied_nbytes += max(0, piece.stop - max(end, piece.start))
        end = max(end, piece.stop)
        together.append(piece)
    read_together(source, together, memory, most_threads=most_threads)


class _Memory:
    """Memory that is faulted in once for reads one after another."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def of(self, nbytes: int) -> torch.Tensor:
        if len(self._memory) < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8)
        return self._memory[:nbytes]


def read_together(
    source: VerifiedBytes, parts: Iterable[Part], memory: _Memory | None = None, **how: Any
) -> None:
    """Read parts at once; ``how`` is as for :meth:`VerifiedBytes.read_ranges`."""
    ranges: list[ByteRange] = []
    shared: list[tuple[int, list[Part]]] = []
    nbytes = 0
    for sharing in _clusters(parts):
        if len(sharing) == 1 and (to := sharing[0].to) is not None:
            ranges.append(ByteRange(sharing[0].start, sharing[0].stop, to))
        else:
            shared.append((nbytes, sharing))
            nbytes += round_up(max(p.stop for p in sharing) - sharing[0].start, _ALIGNMENT)
    held = (memory or _Memory()).of(nbytes)
    copies: list[tuple[Part, torch.Tensor]] = []
    for offset, sharing in shared:
        start, stop = sharing[0].start, max(part.stop for part in sharing)
        data = held[offset : offset + stop - start]
        ranges.append(ByteRange(start, stop, memory_at(data.data_ptr(), stop - start)))
        copies += [(part, data[part.start - start : part.stop - start]) for part in sharing]
    source.read_ranges(ranges, **how)

    def copy(left: Iterator[tuple[Part, torch.Tensor]]) -> None:
        for part, data in left:
            part.copy(data)

    Copier(how.get("most_threads")).share(copies, copy)


def _clusters(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Divide parts into groups of which no two share a byte of the source."""
    cluster: list[Part] = []
    end = 0
    for part in sorted(parts, key=lambda part: part.start):
        if cluster and part.start >= end:
            yield cluster
            cluster = []
        end = max(end, part.stop) if cluster else part.stop
        cluster.append(part)
    if cluster:
        yield cluster
