"""torch's file system reader, with one read of the metadata for all ranks and fast, verified data.

It reads checkpoints of any writer of torch's format. Files that this package has written are
verified block by block as they are read; the values go from there straight into their tensors.
"""

from __future__ import annotations

import ctypes
import io
import math
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from localckpt.errors import CheckpointingException, CorruptShardError, PeerLostError
from localckpt.global_tier.metadata import METADATA_NAME, StorageInfo
from localckpt.global_tier.metadata_pickle import read_metadata
from localckpt.global_tier.read_files import READ_NBYTES, FileReads, Run
from localckpt.global_tier.write_items import Frame, frame_of, load_object
from localckpt.memory.gpu_copies import await_training
from localckpt.memory.host_memory import address_of
from localckpt.memory.tensor_bytes import copy_values
from localckpt.ranks.deadline import within
from localckpt.ranks.failure import Failure
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.storage.failures import storage_errors
from localckpt.storage.names import local_path

__all__ = ["CachedMetadataFileSystemReader"]


class CachedMetadataFileSystemReader(FileSystemReader):
    """Reader of a checkpoint of torch.distributed.checkpoint's format.

    Args:
        path: The checkpoint's directory.
        concurrent_bytes: How many bytes this rank reads at once at most, beside the tensors that
            they go to; an item that is larger, and cannot be read in pieces, goes alone.
        process_group: The ranks that load together; ``None`` for all.
        share_metadata: One rank reads the metadata for all, which all ask for together; else each
            reads it itself.
        safe_globals: Classes that the metadata, and tensors of other classes than torch's, may
            name.
        save_id: The save that all files must belong to, and be verified against.
        metadata_digest: The hash of the metadata of that save.
        timeout_s: How long the ranks wait for the metadata, in seconds.
        _extension_registry: torch's stream transforms, as compression.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        concurrent_bytes: int = 32_000_000_000,
        process_group: dist.ProcessGroup | None = None,
        share_metadata: bool = True,
        safe_globals: Iterable[Any] = (),
        save_id: str | None = None,
        metadata_digest: int | None = None,
        timeout_s: float = 300.0,
        _extension_registry: Any = None,
    ) -> None:
        if concurrent_bytes < 1:
            raise CheckpointingException(
                f"concurrent_bytes is {concurrent_bytes}; it must be above 0"
            )
        super().__init__(local_path(path), _extension_registry)
        self._concurrent_bytes = concurrent_bytes
        self._process_group = process_group
        self._share = share_metadata
        self.safe_globals = tuple(safe_globals)
        self._save_id = save_id
        self._metadata_digest = metadata_digest
        self._timeout_s = timeout_s
        self._metadata: Metadata | None = None
        self.nbytes_read = 0
        """Bytes of data files that the last load read on this rank."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Switch to another checkpoint."""
        super().reset(checkpoint_id)
        self._metadata = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read what the checkpoint holds. All ranks call it, unless the metadata is not shared.

        Raises:
            StorageError: It cannot be read; the same on every rank.
            CorruptShardError: It is damaged, or names what a file may not.
            PeerLostError: The rank that reads it did not answer in time.
        """
        if kwargs.get("rank") is not None:
            # What each rank has written for itself alone, without the others.
            self._metadata = self._parse(self._read(Path(self._get_metadata_path(kwargs["rank"]))))
        if self._metadata is None:
            shared = self._is_shared()
            self._metadata = self._parse(self._shared() if shared else self._read(self._common))
        if self._metadata.storage_meta is None:
            self._metadata.storage_meta = StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan names into the planner's tensors.

        Raises:
            CorruptShardError: A file is damaged, or of another save.
            StorageError: A file cannot be read.
        """
        reads = FileReads(Path(self.path), self._concurrent_bytes, self._save_id)
        lock = threading.Lock()
        places = self._places(plan)
        items = [
            _ItemRead(self, planner, lock, request, info)
            for request, info in zip(plan.items, places, strict=True)
        ]
        runs = [(item, run) for item in items for run in item.runs()]
        # What training has queued on them must not come after what is loaded.
        await_training({item.device for item in items}, self._timeout_s)
        _add_runs(reads, runs)
        reads.carry_out()
        # By another release of torch, or not contiguous: torch knows what they mean.
        _add_runs(reads, [(item, item.whole()) for item in items if item.is_foreign])
        reads.carry_out()
        self.nbytes_read = reads.nbytes
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def saved_part(
        self, request: ReadItem, nbytes: int
    ) -> tuple[torch.dtype, torch.Size, Frame] | None:
        """The part of a tensor that a request reads from, if torch would write it so here and now.

        Args:
            request: Reads from it.
            nbytes: How long it is in its file.

        Returns:
            Its dtype, shape and frame; ``None`` if it is of another length.
        """
        index = request.storage_index
        described = self.read_metadata().state_dict_metadata[index.fqn]
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

    def _places(self, plan: LoadPlan) -> list[StorageInfo]:
        """Places of a plan's items in their files.

        They are compared with the sizes of the files before memory is made: forged metadata may
        name any place.

        Raises:
            CorruptShardError: Metadata names no place, or one beyond the end of its file.
            StorageError: A file cannot be looked at.
        """
        sizes: dict[str, int] = {}
        places = []
        for request in plan.items:
            index = request.storage_index
            info = self.storage_data.get(index)
            if info is None:
                raise CorruptShardError(
                    f"the metadata of {self.path} does not say where {index.fqn} lies"
                )
            path = Path(self.path) / info.relative_path
            if info.relative_path not in sizes:
                with storage_errors("read", path):
                    sizes[info.relative_path] = path.stat().st_size
            if info.offset + info.length > sizes[info.relative_path]:
                raise CorruptShardError(
                    f"{path} is cut short: it has {sizes[info.relative_path]} bytes, and "
                    f"{index.fqn} lies from {info.offset} to {info.offset + info.length}"
                )
            places.append(info)
        return places

    def _is_shared(self) -> bool:
        if not (self._share and dist.is_available() and dist.is_initialized()):
            return False
        return dist.get_world_size(self._process_group) > 1

    @property
    def _common(self) -> Path:
        return Path(self.path) / METADATA_NAME

    def _read(self, path: Path) -> bytes:
        with storage_errors("read", path):
            data = path.read_bytes()
        if self._metadata_digest not in (None, xxhash.xxh3_64_intdigest(data)):
            raise CorruptShardError(f"{path} is damaged, or belongs to another save")
        return data

    def _shared(self) -> bytes:
        group = self._process_group
        shared: list[Any] = [None]
        if dist.get_rank(group) == 0:
            try:
                shared = [self._read(self._common)]
            except CheckpointingException as error:
                shared = [Failure.of(error).to_json()]
        first = 0 if group is None else dist.get_global_rank(group, 0)

        def share() -> None:
            dist.broadcast_object_list(shared, first, group)

        try:
            if "cpu" in str(dist.get_backend_config(group)):
                within(self._timeout_s, share)
            else:
                # A GPU belongs to the thread that chose it, and NCCL has a deadline of its own.
                share()
        except (TimeoutError, RuntimeError) as error:
            raise PeerLostError(
                f"rank {first} has not told what the metadata of {self.path} is ({error}). "
                f"Nothing was changed"
            ) from error
        if isinstance(shared[0], list):
            failure = Failure.from_json(shared[0])
            raise replace(failure, text=f"rank {first}: {failure.text}").error()
        return cast(bytes, shared[0])

    def _parse(self, data: bytes) -> Metadata:
        try:
            return read_metadata(data, SafeGlobals(self.safe_globals))
        except CorruptShardError as error:
            raise CorruptShardError(f"the metadata of {self.path} is damaged: {error}") from error


# Rows that are not taken whole are read in pieces that do not end where blocks do.
_ROWS_NBYTES = 4 * READ_NBYTES


class _ItemRead:
    """One request of a load, and how its bytes come to their tensor.

    Attributes:
        is_foreign: Its frame turned out not to be the one that its values were looked for in.
        device: Where its values go.
    """

    def __init__(
        self,
        reader: CachedMetadataFileSystemReader,
        planner: LoadPlanner,
        lock: threading.Lock,
        request: ReadItem,
        info: StorageInfo,
    ) -> None:
        self.info = info
        self.is_foreign = False
        self.device = torch.device("cpu")
        self._reader = reader
        self._planner = planner
        # Planners are not made for several threads.
        self._lock = lock
        self._request = request

    def whole(self) -> Run:
        """Read all of it, and leave it to torch."""
        return Run(self.info.offset, self.info.offset + self.info.length, self._load)

    def runs(self) -> list[Run]:
        """Return the runs of the item, which may be read in any order."""
        if self._request.type == LoadItemType.BYTE_IO or self.info.transform_descriptors:
            return [self.whole()]
        if 0 in self._request.lengths:
            return []
        part = self._reader.saved_part(self._request, self.info.length)
        if part is None:
            return [self.whole()]
        dtype, shape, frame = part
        target = self._target()
        begin = self.info.offset + len(frame.head)

        awaited = {"frame", "values"}

        def arrived(what: str) -> None:
            with self._lock:
                awaited.discard(what)
                if not awaited and not self.is_foreign:
                    self._planner.commit_tensor(self._request, target)

        def check(head: memoryview) -> None:
            self.is_foreign = head != frame.head
            arrived("frame")

        values = _Values(dtype, shape, begin, self._request, target, partial(arrived, "values"))
        return [Run(self.info.offset, begin, check), *values.runs()]

    def _target(self) -> torch.Tensor:
        with self._lock:
            target = self._planner.resolve_tensor(self._request).detach()
        self.device = target.device
        return target

    def _load(self, data: memoryview) -> None:
        stream: IO[bytes] = io.BytesIO(data)
        if self.info.transform_descriptors:
            transformed = self._reader.transforms.transform_load_stream(
                self._request, self.info.transform_descriptors, stream
            )
            stream = io.BytesIO(transformed.read(-1))
        if self._request.type == LoadItemType.BYTE_IO:
            with self._lock:
                self._planner.load_bytes(self._request, cast(io.BytesIO, stream))
            return
        name = self._request.dest_index.fqn
        saved = load_object(name, cast(io.BytesIO, stream), self._reader.safe_globals)
        parts = zip(self._request.storage_offsets, self._request.lengths, strict=True)
        for dim, (start, length) in enumerate(parts):
            saved = saved.narrow(dim, start, length)
        target = self._target()
        _copy_part(target, saved)
        with self._lock:
            self._planner.commit_tensor(self._request, target)


def _add_runs(reads: FileReads, runs: list[tuple[_ItemRead, Run]]) -> None:
    """Have runs read, those that lie between the same two multiples of ``READ_NBYTES`` at once."""
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
        """Return the runs to read."""
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
    if target.dtype is source.dtype:
        copy_values(target, source)
    else:
        target.copy_(source)
