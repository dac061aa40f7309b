"""Reads of rectangles of saved tensors into tensors, from any verified bytes that hold them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from localckpt.memory.host_memory import memory_at
from localckpt.memory.tensor_bytes import convert_values, integer_view, is_host_run, narrowed
from localckpt.state_dict.boxes import Rectangle
from localckpt.state_dict.source import ByteRange, Destination, VerifiedBytes

COPIED_NBYTES = 64 << 20
"""Bytes of parts that are copied out of memory of their own, read at once."""


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

    @property
    def copied_nbytes(self) -> int:
        """Bytes of memory that the part is copied out of."""
        return 0 if self.to is not None else self.stop - self.start

    def divided(self, most_nbytes: int) -> Iterator[Part]:
        """Divide a part of contiguous rows that is copied, if it is larger, by rows."""
        rows = self.shape[0] if self.shape else 1
        row_nbytes = (self.stop - self.start) // max(1, rows)
        step = max(1, most_nbytes // max(1, row_nbytes))
        if not self.copied_nbytes or self.strides is not None or step >= rows:
            yield self
            return
        dim = self.out.dim() - len(self.starts)
        for row in range(0, rows, step):
            count = min(step, rows - row)
            start = self.start + row * row_nbytes
            yield self._replace(
                start=start,
                stop=start + count * row_nbytes,
                out=self.out.narrow(dim, row, count),
                shape=(count, *self.shape[1:]),
            )

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


def read_parts(
    source: VerifiedBytes,
    parts: Iterable[Part],
    most_nbytes: int = COPIED_NBYTES,
    most_threads: int | None = None,
) -> None:
    """Fill tensors with rectangles of saved ones. Only the blocks that hold them are read.

    Rows go straight to where they belong; other parts are copied out of memory of their own, some
    rows at a time, of not much more than ``most_nbytes``.
    """
    waiting: list[Part] = []
    copied_nbytes = 0
    for part in (rows for whole in parts for rows in whole.divided(most_nbytes)):
        waiting.append(part)
        copied_nbytes += part.copied_nbytes
        if copied_nbytes >= most_nbytes:
            read_together(source, waiting, most_threads=most_threads)
            waiting, copied_nbytes = [], 0
    read_together(source, waiting, most_threads=most_threads)


def read_together(source: VerifiedBytes, parts: Iterable[Part], **how: Any) -> None:
    """Read parts at once; ``how`` is as for :meth:`VerifiedBytes.read_ranges`."""
    ranges: list[ByteRange] = []
    copies: list[tuple[Part, torch.Tensor]] = []
    for sharing in _clusters(parts):
        start, stop = sharing[0].start, max(part.stop for part in sharing)
        if len(sharing) == 1 and (to := sharing[0].to) is not None:
            ranges.append(ByteRange(start, stop, to))
            continue
        data = torch.empty(stop - start, dtype=torch.uint8)
        ranges.append(ByteRange(start, stop, memory_at(data.data_ptr(), stop - start)))
        copies += [(part, data[part.start - start : part.stop - start]) for part in sharing]
    source.read_ranges(ranges, **how)
    for part, data in copies:
        part.copy(data)


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
