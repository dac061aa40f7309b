"""Reads of the items of a load: runs of bytes in data files, and the tensors that they fill.

Values that torch writes as contiguous bytes go straight into their tensors, piece by piece. All
other items are read whole, and parsed by torch.
"""

from __future__ import annotations

import ctypes
import io
import math
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, pairwise
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from localckpt.errors import CorruptShardError, MismatchError
from localckpt.global_tier.metadata import StorageInfo
from localckpt.global_tier.read_files import READ_NBYTES, FileReads, Run
from localckpt.global_tier.write_items import Frame, frame_of, load_object
from localckpt.memory.host_memory import address_of
from localckpt.memory.tensor_bytes import copy_values, is_host_run

__all__ = ["ItemRead", "LoadContext", "add_runs"]

# Rows that are not taken whole are read in pieces that do not end where blocks do.
_ROWS_NBYTES = 4 * READ_NBYTES


@dataclass(frozen=True, slots=True)
class LoadContext:
    """Objects that all items of one load share.

    Attributes:
        planner: Planner of the load, which knows the tensors.
        metadata: Metadata of the checkpoint.
        transforms: torch's stream transforms, as compression.
        safe_globals: Classes that tensors of other classes than torch's may name.
        lock: Held during each call of the planner: planners are not made for several threads.
    """

    planner: LoadPlanner
    metadata: Metadata
    transforms: Any
    safe_globals: tuple[Any, ...]
    lock: threading.Lock = field(default_factory=threading.Lock)


class ItemRead:
    """Read of one item.

    Args:
        context: Objects that all items of the load share.
        request: The item.
        info: Place of the item in its file.

    Attributes:
        info: Place of the item in its file.
        is_foreign: True once the item turned out to have another frame than the expected one.
        device: Device of the tensor that gets the values.
    """

    def __init__(self, context: LoadContext, request: ReadItem, info: StorageInfo) -> None:
        self.info = info
        self.is_foreign = False
        self.device = torch.device("cpu")
        self._context = context
        self._request = request

    def whole(self) -> Run:
        """Return the run of the whole item, which torch then parses."""
        return Run(self.info.offset, self.info.offset + self.info.length, self._load)

    def runs(self) -> list[Run]:
        """Return the runs of the values that are wanted, which may be read in any order."""
        if self._request.type == LoadItemType.BYTE_IO or self.info.transform_descriptors:
            return [self.whole()]
        if 0 in self._request.lengths:
            return []
        part = _saved_part(self._context.metadata, self._request, self.info.length)
        if part is None:
            return [self.whole()]
        dtype, shape, frame = part
        target = self._target()
        begin = self.info.offset + len(frame.head)

        awaited = {"frame", "values"}

        def arrived(what: str) -> None:
            with self._context.lock:
                awaited.discard(what)
                if not awaited and not self.is_foreign:
                    self._context.planner.commit_tensor(self._request, target)

        def check(head: memoryview) -> None:
            self.is_foreign = head != frame.head
            arrived("frame")

        values = _Values(dtype, shape, begin, self._request, target, partial(arrived, "values"))
        return [Run(self.info.offset, begin, check), *values.runs()]

    def _target(self) -> torch.Tensor:
        with self._context.lock:
            target = self._context.planner.resolve_tensor(self._request).detach()
        if target.shape != self._request.lengths:
            # torch narrows a tensor to a part that is larger than the tensor to all of it.
            index = self._request.dest_index
            raise MismatchError(
                f"{index.fqn} is to get {list(self._request.lengths)} elements of its part at "
                f"{list(index.offset or ())}, and the tensor has {list(target.shape)} for them. "
                f"Other tensors may be filled already"
            )
        self.device = target.device
        return target

    def _load(self, data: memoryview) -> None:
        stream: IO[bytes] = io.BytesIO(data)
        if self.info.transform_descriptors:
            transformed = self._context.transforms.transform_load_stream(
                self._request, self.info.transform_descriptors, stream
            )
            stream = io.BytesIO(transformed.read(-1))
        if self._request.type == LoadItemType.BYTE_IO:
            with self._context.lock:
                self._context.planner.load_bytes(self._request, cast(io.BytesIO, stream))
            return
        name = self._request.dest_index.fqn
        saved = load_object(name, cast(io.BytesIO, stream), self._context.safe_globals)
        parts = zip(self._request.storage_offsets, self._request.lengths, strict=True)
        for dim, (start, length) in enumerate(parts):
            saved = saved.narrow(dim, start, length)
        target = self._target()
        _copy_part(target, saved)
        with self._context.lock:
            self._context.planner.commit_tensor(self._request, target)


def _saved_part(
    metadata: Metadata, request: ReadItem, nbytes: int
) -> tuple[torch.dtype, torch.Size, Frame] | None:
    """Describe the saved part of a tensor that a request reads from, as torch would write it now.

    Args:
        metadata: Metadata of the checkpoint.
        request: The request.
        nbytes: Size of the part in its file.

    Returns:
        The dtype, shape and frame of the part; ``None`` if torch would write another size.
    """
    index = request.storage_index
    described = metadata.state_dict_metadata[index.fqn]
    if not isinstance(described, TensorStorageMetadata):
        return None
    hint = index.index
    chunks = described.chunks
    if hint is None or not (0 <= hint < len(chunks) and chunks[hint].offsets == index.offset):
        hint = next(i for i, chunk in enumerate(chunks) if chunk.offsets == index.offset)
    dtype, shape = described.properties.dtype, chunks[hint].sizes
    values_nbytes = math.prod(shape) * dtype.itemsize
    if values_nbytes > nbytes:
        # Before a frame is made, which takes a tensor of that shape.
        return None
    frame = frame_of(dtype, shape)
    if nbytes != len(frame.head) + values_nbytes + len(frame.tail):
        return None
    return dtype, shape, frame


def add_runs(reads: FileReads, runs: list[tuple[ItemRead, Run]]) -> None:
    """Add runs of items to the reads of files, and join those within one ``READ_NBYTES``."""
    by_file: dict[str, list[Run]] = {}
    for item, run in runs:
        by_file.setdefault(item.info.relative_path, []).append(run)
    for name, of_file in by_file.items():
        of_file.sort(key=lambda run: run.start)
        groups = groupby(of_file, lambda run: (run.start // READ_NBYTES, run.stop > _end_of(run)))
        reads.add(name, [joined for (_, alone), group in groups for joined in _join(group, alone)])


def _end_of(run: Run) -> int:
    return (run.start // READ_NBYTES + 1) * READ_NBYTES


def _join(group: Iterable[Run], alone: bool) -> list[Run]:
    runs = list(group)
    if alone or len(runs) == 1:
        return runs
    start = runs[0].start

    def use(data: memoryview) -> None:
        for run in runs:
            run.use(data[run.start - start : run.stop - start])

    return [Run(start, max(run.stop for run in runs), use)]


class _Values:
    """Values that one request wants of a saved part of a tensor.

    Args:
        dtype, shape: Dtype and shape of the saved part, which is contiguous in the file.
        begin: Offset of the first value in the file.
        request: The request, which wants at least one value.
        target: Tensor for the values, of the shape that is wanted.
        filled: Called once the target has all values.
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
        """Return the runs to read."""
        whole_rows = torch.Size(length for _, length in self._inner) == self._row_shape
        target = self._target
        if whole_rows and is_host_run(target) and target.dtype is self._dtype:
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
                _copy_part(self._target, values.view(()))
            else:
                rows = values.view(*([1] * self._dim), count, *self._row_shape)
                for dim, (start, length) in enumerate(self._inner, self._dim + 1):
                    rows = rows.narrow(dim, start, length)
                _copy_part(self._target.narrow(self._dim, row, count), rows)
            self._count(len(data))

        return take

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self._missing -= nbytes
            is_filled = not self._missing
        if is_filled:
            self._filled()


def _copy_part(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy values to a tensor of the same shape, whatever the dtypes and the devices.

    Raises:
        CorruptShardError: What was saved has another shape than the metadata says.
    """
    if target.shape != source.shape:
        raise CorruptShardError(
            f"a part of shape {tuple(source.shape)} was saved where one of shape "
            f"{tuple(target.shape)} is wanted"
        )
    # Tensors that were made in inference mode are written to in that mode only.
    with torch.inference_mode(target.is_inference()):
        if target.dtype is source.dtype:
            copy_values(target, source)
        else:
            target.copy_(source)
