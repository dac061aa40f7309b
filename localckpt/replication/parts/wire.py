"""Format in which parts of tensors go from rank to rank: a head, numbers behind it, and bytes."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from localckpt.errors import CorruptShardError
from localckpt.state_dict.runs import PartReceiver
from localckpt.state_dict.source import PIECE_NBYTES

__all__ = ["CUT", "END", "HEAD_NBYTES", "RUN", "Head", "cut_head", "run_head", "small_cuts", "take"]

RUN, CUT, END = range(3)

_HEAD = struct.Struct("<IIIIQQ")
HEAD_NBYTES = _HEAD.size


class Head(NamedTuple):
    """Head of a part.

    Attributes:
        item: Number of what the receiver takes.
        part: Number of the part of it.
        kind: :data:`RUN` for bytes of a part whose items stand row by row, :data:`CUT` for a
            rectangle of a part, :data:`END` if nothing follows.
        dims: Number of dimensions of a rectangle. Its first indices and its sizes, of 8 bytes each,
            follow the head.
        offset: Offset of a run in the part, in bytes.
        nbytes: Number of bytes that follow.
    """

    item: int
    part: int
    kind: int
    dims: int = 0
    offset: int = 0
    nbytes: int = 0

    @classmethod
    def unpack(cls, packed: memoryview, at: int = 0) -> Head:
        """Undo :meth:`pack`."""
        return cls(*_HEAD.unpack_from(packed, at))

    def pack(self) -> bytes:
        """Return the head as :data:`HEAD_NBYTES` bytes."""
        return _HEAD.pack(*self)

    @property
    def numbers_nbytes(self) -> int:
        """Size of the numbers that follow the head."""
        return 16 * self.dims


def run_head(item: int, part: int, offset: int, nbytes: int) -> bytes:
    """Build the head of a run."""
    return Head(item, part, RUN, 0, offset, nbytes).pack()


def cut_head(
    item: int, part: int, first: Sequence[int], sizes: Sequence[int], nbytes: int
) -> bytes:
    """Build the head of a rectangle, with its numbers."""
    head = Head(item, part, CUT, len(sizes), 0, nbytes).pack()
    return head + struct.pack(f"<{2 * len(sizes)}Q", *first, *sizes)


def small_cuts(
    first: Sequence[int], sizes: Sequence[int], values: torch.Tensor
) -> Iterator[tuple[Sequence[int], Sequence[int], torch.Tensor]]:
    """Divide a rectangle into those of at most as many bytes as a piece of an image has."""
    if values.numel() * values.itemsize <= PIECE_NBYTES:
        yield first, sizes, values
        return
    # One row of a tensor with gaps between its items may be larger than that.
    dim = max(range(values.dim()), key=sizes.__getitem__)
    half = sizes[dim] // 2
    for begin, size in ((0, half), (half, sizes[dim] - half)):
        starts = (*first[:dim], first[dim] + begin, *first[dim + 1 :])
        lengths = (*sizes[:dim], size, *sizes[dim + 1 :])
        yield from small_cuts(starts, lengths, values.narrow(dim, begin, size))


def take(receiver: PartReceiver, head: Head, numbers: memoryview, data: memoryview) -> None:
    """Have a receiver take a part that came.

    Raises:
        CorruptShardError: The part contradicts itself.
    """
    if head.kind == RUN:
        receiver.take_run(head.offset, data)
        return
    starts_and_sizes = struct.unpack(f"<{2 * head.dims}Q", numbers)
    first, sizes = starts_and_sizes[: head.dims], starts_and_sizes[head.dims :]
    items = math.prod(sizes)
    if items and len(data) % items:
        raise CorruptShardError("a part came in another size")
    values = torch.empty(0, dtype=torch.uint8)
    if len(data):
        values = torch.frombuffer(data, dtype=torch.uint8)
    receiver.take_cut(first, sizes, values)
