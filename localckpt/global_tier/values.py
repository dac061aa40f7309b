"""From the bytes of a saved part of a tensor to the part of another that is wanted."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable
from itertools import pairwise

import torch
from torch.distributed.checkpoint.planner import ReadItem

from localckpt.errors import CorruptShardError
from localckpt.global_tier.read import READ_NBYTES, Run
from localckpt.state_dict.host_memory import address_of
from localckpt.state_dict.tensor_table import copy_values

__all__ = ["Values", "copy_part"]

# Rows that are not taken whole are read in pieces that do not end where blocks do.
_ROWS_NBYTES = 4 * READ_NBYTES


class Values:
    """The values that one request wants of a saved part, in runs that may be read in any order.

    Args:
        dtype, shape: Of what was saved, which lies contiguous in the file.
        begin: Where it begins there.
        request: What is wanted of it; nothing of it is empty.
        target: Where that goes; of the shape that is wanted.
        filled: Called when all of it is there.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        shape: torch.Size,
        begin: int,
        request: ReadItem,
        target: torch.Tensor,
        filled: Callable[[], None],
    ) -> None:
        self._dtype = dtype
        self._target = target
        self._filled = filled
        # Rows are those of the first dimension that has several.
        self._dim = next((dim for dim, size in enumerate(shape) if size > 1), 0)
        self._row_shape = shape[self._dim + 1 :]
        self._row_nbytes = math.prod(self._row_shape) * dtype.itemsize
        wanted = list(zip(request.storage_offsets, request.lengths, strict=True))
        first, self._rows = wanted[self._dim] if shape else (0, 1)
        self._inner = wanted[self._dim + 1 :]
        self._begin = begin + first * self._row_nbytes
        self._end = self._begin + self._rows * self._row_nbytes
        self._missing = self._end - self._begin
        self._lock = threading.Lock()

    def runs(self) -> list[Run]:
        """What is to be read."""
        whole_rows = torch.Size(length for _, length in self._inner) == self._row_shape
        target = self._target
        if whole_rows and target.is_cpu and target.is_contiguous() and target.dtype is self._dtype:
            ends = range(
                self._begin // READ_NBYTES * READ_NBYTES + READ_NBYTES, self._end, READ_NBYTES
            )
            cuts = [self._begin, *ends, self._end]
            return [Run(a, b, self._taking_bytes(a)) for a, b in pairwise(cuts)]
        step = max(1, _ROWS_NBYTES // self._row_nbytes)
        return [
            Run(
                self._begin + row * self._row_nbytes,
                self._begin + min(row + step, self._rows) * self._row_nbytes,
                self._taking_rows(row),
            )
            for row in range(0, self._rows, step)
        ]

    def _taking_bytes(self, start: int) -> Callable[[memoryview], None]:
        def take(data: memoryview) -> None:
            place = self._target.data_ptr() + start - self._begin
            ctypes.memmove(place, address_of(data), len(data))
            self._count(len(data))

        return take

    def _taking_rows(self, row: int) -> Callable[[memoryview], None]:
        def take(data: memoryview) -> None:
            count = len(data) // self._row_nbytes
            values = torch.frombuffer(data, dtype=torch.uint8).view(self._dtype)
            if self._target.dim() == 0:
                copy_part(self._target, values.view(()))
            else:
                rows = values.view(*([1] * self._dim), count, *self._row_shape)
                for dim, (start, length) in enumerate(self._inner, self._dim + 1):
                    rows = rows.narrow(dim, start, length)
                copy_part(self._target.narrow(self._dim, row, count), rows)
            self._count(len(data))

        return take

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self._missing -= nbytes
            is_filled = not self._missing
        if is_filled:
            self._filled()


def copy_part(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy values to a tensor of the same shape, whatever the dtypes and the devices.

    Raises:
        CorruptShardError: What was saved has another shape than the metadata says.
    """
    if target.shape != source.shape:
        raise CorruptShardError(
            f"a part of shape {tuple(source.shape)} was saved where one of shape "
            f"{tuple(target.shape)} is wanted"
        )
    if target.dtype is source.dtype:
        copy_values(target, source)
    else:
        target.copy_(source)
