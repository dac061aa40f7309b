"""Reads of the items of a load: runs of bytes in data files, and the tensors that they fill.

Values that torch writes as contiguous bytes go straight into their tensors, piece by piece. All
other items are read whole, and parsed by torch. Several runs are read at a time, within a budget,
and each block of them is verified.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from localckpt.errors import CorruptShardError, MismatchError
from localckpt.global_tier.data_files import FileIdentity, Trailer, read_trailer, require_trailer
from localckpt.global_tier.metadata import StorageInfo
from localckpt.global_tier.write_items import Frame, frame_of, load_object
from localckpt.memory.copying import Copier
from localckpt.memory.digests import BLOCK_NBYTES, BlockHasher
from localckpt.memory.host_memory import PAGE_NBYTES, address_of, round_up
from localckpt.memory.tensor_bytes import copy_values, is_host_run
from localckpt.ranks.deadline import interruptible
from localckpt.storage.buffers import PrivateBuffer
from localckpt.storage.failures import storage_errors
from localckpt.storage.open_file import OpenFile, close_read

READ_NBYTES = 4 << 20
"""Runs between two multiples of it are best: whole blocks, and few enough for the cache."""

# A disk is busy with 4 requests under way, and half of these threads are copying and hashing.
_THREADS = 8
# Rows that are not taken whole are read in pieces that do not end where blocks do.
_ROWS_NBYTES = 4 * READ_NBYTES


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes ``[start, stop)`` of a file, and who takes them.

    ``use`` is called with them, in any thread; they are gone when it returns.
    """

    start: int
    stop: int
    use: Callable[[memoryview], None]


class FileReads:
    """Reads of one load.

    So many runs are read at a time that at most ``concurrent_bytes`` are in flight. Without
    ``save_id`` files of any writer are verified if they can be.
    """

    def __init__(self, folder: Path, concurrent_bytes: int, save_id: str | None) -> None:
        self._folder = folder
        self._save_id = save_id
        self._limit = concurrent_bytes
        self._counting = threading.Lock()
        self._waiting: list[tuple[_DataFile, FileRange]] = []
        self._is_stopped = False
        self.nbytes = 0
        """Bytes that were read."""

    def add(self, name: str, runs: Iterable[FileRange]) -> None:
        """Have these runs of a file read; in the order of their offsets it goes fastest."""
        file = _DataFile(self._folder / name, self._save_id)
        for run in runs:
            file.pending += 1
            self._waiting.append((file, run))

    def carry_out(self) -> None:
        """Read all that was added since the last time; the caller's thread takes part."""
        waiting, self._waiting = self._waiting, []
        largest = max((run.stop - run.start for _, run in waiting), default=1)
        copier = Copier(min(_THREADS, max(1, self._limit // largest)))
        try:
            interruptible(lambda: copier.share(waiting, self._work), self._stop)
        finally:
            for file, _ in waiting:
                file.close()

    def _stop(self) -> None:
        self._is_stopped = True

    def _work(self, left: Iterator[tuple[_DataFile, FileRange]]) -> None:
        with contextlib.closing(PrivateBuffer(READ_NBYTES + 2 * BLOCK_NBYTES)) as scratch:
            for file, run in left:
                if self._is_stopped:
                    break
                nbytes = self._read(file, run, scratch.view)
                with self._counting:
                    self.nbytes += nbytes
                    file.pending -= 1
                if not file.pending:
                    file.close()

    def _read(self, file: _DataFile, run: FileRange, scratch: memoryview) -> int:
        file.open()
        start, stop = file.span(run)
        nbytes = round_up(stop - start, PAGE_NBYTES)
        with contextlib.ExitStack() as own:
            if nbytes > len(scratch):
                with storage_errors("read", file.path):
                    scratch = own.enter_context(contextlib.closing(PrivateBuffer(nbytes))).view
            file.read(start, stop, scratch[:nbytes])
            run.use(scratch[run.start - start : run.stop - start])
        return stop - start


class _DataFile:
    """One file while runs of it are waiting."""

    def __init__(self, path: Path, save_id: str | None) -> None:
        self.path = path
        self.pending = 0
        self._save_id = save_id
        self._lock = threading.Lock()
        self._file: OpenFile | None = None
        self._direct: io.FileIO | None = None
        self._trailer: Trailer | None = None

    def open(self) -> None:
        with self._lock:
            if self._file is not None:
                return
            file = OpenFile(self.path)
            try:
                with storage_errors("read", self.path):
                    self._trailer = (
                        read_trailer(file)
                        if self._save_id is None
                        else require_trailer(file, self._save_id, self.path)
                    )
                    self._direct = None if file.is_cached() else file.open_direct()
            except BaseException:
                file.close()
                raise
            self._file = file

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
            if self._direct is not None:
                close_read(self._direct)
            self._file = self._direct = None

    def span(self, run: FileRange) -> tuple[int, int]:
        """Return the bytes to read for a run: whole blocks, if they are verified."""
        if self._trailer is None:
            return run.start // PAGE_NBYTES * PAGE_NBYTES, run.stop
        if run.stop > self._trailer.covered_nbytes:
            raise CorruptShardError(
                f"{self.path} holds {self._trailer.covered_nbytes} bytes of values, and those from "
                f"{run.start} to {run.stop} are wanted"
            )
        start = run.start // BLOCK_NBYTES * BLOCK_NBYTES
        return start, min(round_up(run.stop, BLOCK_NBYTES), self._trailer.covered_nbytes)

    def read(self, start: int, stop: int, view: memoryview) -> None:
        """Read and verify ``[start, stop)`` into whole pages."""
        assert self._file is not None
        with storage_errors("read", self.path):
            wanted = stop - start
            if self._direct is None:
                self._file.read_into(start, view[:wanted])
            else:
                self._file.read_into(start, view, wanted, fd=self._direct.fileno())
        if self._trailer is not None:
            hasher = BlockHasher(FileIdentity(self.path.name, self._trailer.save_id))
            hasher.check(start, [view[:wanted]], memoryview(self._trailer.digests))


@dataclass(frozen=True, slots=True)
class LoadContext:
    """Objects that all items of one load share.

    Attributes:
        planner: Planner of the load, which knows the tensors.
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

    Attributes:
        is_foreign: True once the item turned out to have another frame than the expected one.
        device: Device of the tensor that gets the values.
    """

    def __init__(self, context: LoadContext, request: ReadItem, info: StorageInfo) -> None:
        self.info = info
        self.is_foreign = False
        self.device = torch.device("cpu")
        self._context = context
        self._request = request

    def whole(self) -> FileRange:
        """Return the run of the whole item, which torch then parses."""
        return FileRange(self.info.offset, self.info.offset + self.info.length, self._load)

    def runs(self) -> list[FileRange]:
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
        return [FileRange(self.info.offset, begin, check), *values.runs()]

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

    Returns its dtype, shape and frame; ``None`` if torch would write another size.
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


def add_runs(reads: FileReads, runs: list[tuple[ItemRead, FileRange]]) -> None:
    """Add runs of items to the reads of files; those that begin within ``READ_NBYTES`` are one."""
    by_file: dict[str, list[FileRange]] = {}
    for item, run in runs:
        by_file.setdefault(item.info.relative_path, []).append(run)
    for name, of_file in by_file.items():
        of_file.sort(key=lambda run: run.start)
        groups = groupby(of_file, lambda run: run.start // READ_NBYTES)
        reads.add(name, [_joined([*group]) for _, group in groups])


def _joined(runs: list[FileRange]) -> FileRange:
    start = runs[0].start

    def use(data: memoryview) -> None:
        for run in runs:
            run.use(data[run.start - start : run.stop - start])

    return FileRange(start, max(run.stop for run in runs), use)


class _Values:
    """Values that one request wants of a saved part of a tensor.

    The saved part is contiguous in the file, from ``begin`` on. ``filled`` is called once the
    target has all values.
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

    def runs(self) -> list[FileRange]:
        """Return the runs to read."""
        whole_rows = torch.Size(length for _, length in self._inner) == self._row_shape
        target = self._target
        if whole_rows and is_host_run(target) and target.dtype is self._dtype:
            ends = range(
                self._begin // READ_NBYTES * READ_NBYTES + READ_NBYTES, self._end, READ_NBYTES
            )
            cuts = [self._begin, *ends, self._end]
            return [FileRange(a, b, self._taking_bytes(a)) for a, b in pairwise(cuts)]
        step = max(1, _ROWS_NBYTES // self._row_nbytes)
        return [
            FileRange(
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
    """Copy values to a tensor of the same shape, whatever the dtypes and the devices."""
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
