"""torch's file system reader, with one read of the metadata for all ranks and fast, verified data.

It reads checkpoints of any writer of torch's format. Files that this package has written are
verified block by block as they are read; the values go from there straight into their tensors.
"""

from __future__ import annotations

import ctypes
import io
import math
import os
import pickle
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from localckpt import errors
from localckpt.deadline import within
from localckpt.errors import CheckpointingException, CorruptShardError, PeerLostError
from localckpt.global_tier.framing import Frame, frame_of
from localckpt.global_tier.read import READ_NBYTES, FileReads, Run
from localckpt.global_tier.torch_dcp import METADATA_NAME, StorageInfo
from localckpt.state_dict.host_memory import address_of
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.tensor_table import copy_values
from localckpt.storage.failures import storage_errors

__all__ = ["CachedMetadataFileSystemReader"]

# Bytes between two items that are cheaper to read than to leave out.
_GAP_NBYTES = 256 << 10

_METADATA_CLASSES = (
    *(getattr(dcp_metadata, name) for name in dcp_metadata.__all__),
    dcp_metadata._MEM_FORMAT_ENCODING,
    StorageInfo,
)


class CachedMetadataFileSystemReader(FileSystemReader):
    """Reads a checkpoint of torch.distributed.checkpoint's format.

    Args:
        path: The checkpoint's directory.
        concurrent_bytes: How many bytes this rank reads at once at most, beside the tensors that
            they go to; an item that is larger, and cannot be read in pieces, goes alone.
        process_group: The ranks that load together; ``None`` for all.
        share_metadata: One rank reads the metadata for all, which all ask for together; else each
            reads it itself.
        safe_globals: Classes that the metadata may name, beyond torch's own.
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
        super().__init__(path, _extension_registry)
        self._concurrent_bytes = concurrent_bytes
        self._process_group = process_group
        self._share = share_metadata
        self._allowed = SafeGlobals((*_METADATA_CLASSES, *safe_globals))
        self._save_id = save_id
        self._metadata_digest = metadata_digest
        self._timeout_s = timeout_s
        self._metadata: Metadata | None = None
        self._frames: dict[tuple[torch.dtype, torch.Size], Frame] = {}
        self.nbytes_read = 0
        """Bytes of data files that the last load read on this rank."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Turn to another checkpoint."""
        super().reset(checkpoint_id)
        self._metadata = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the checkpoint holds. All ranks ask for it, unless it is not shared.

        Raises:
            StorageError: It cannot be read; the same on every rank.
            CorruptShardError: It is damaged, or names what a file may not.
            PeerLostError: The rank that reads it did not tell in time.
        """
        if kwargs.get("rank") is not None:
            # What each rank has written for itself alone, without the others.
            return super().read_metadata(*args, **kwargs)
        if self._metadata is None:
            self._metadata = self._parse(self._shared() if self._is_shared() else self._read())
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
        by_file: dict[str, list[_Item]] = {}
        for request in plan.items:
            info = self.storage_data[request.storage_index]
            item = _Item(self, planner, lock, request, info)
            by_file.setdefault(info.relative_path, []).append(item)
        for name, items in by_file.items():
            items.sort(key=lambda item: item.info.offset)
            reads.add(name, _together([run for item in items for run in item.runs()]))
        reads.carry_out()
        self.nbytes_read = reads.nbytes
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def saved_part(self, request: ReadItem) -> tuple[torch.dtype, torch.Size, Frame] | None:
        """The dtype and the shape of the part of a tensor that a request reads from, and its frame
        if it was written as torch writes it here and now.
        """
        index = request.storage_index
        described = self.read_metadata().state_dict_metadata[index.fqn]
        if not isinstance(described, TensorStorageMetadata):
            return None
        hint = index.index
        chunks = described.chunks
        if hint is None or not (0 <= hint < len(chunks) and chunks[hint].offsets == index.offset):
            hint = next(i for i, chunk in enumerate(chunks) if chunk.offsets == index.offset)
        key = (described.properties.dtype, chunks[hint].sizes)
        if key not in self._frames:
            self._frames[key] = frame_of(*key)
        return (*key, self._frames[key])

    def _is_shared(self) -> bool:
        if not (self._share and dist.is_available() and dist.is_initialized()):
            return False
        return dist.get_world_size(self._process_group) > 1

    def _read(self) -> bytes:
        path = Path(self.path) / METADATA_NAME
        with storage_errors("read", path):
            data = path.read_bytes()
        if self._metadata_digest not in (None, xxhash.xxh3_64_intdigest(data)):
            raise CorruptShardError(f"{path} is damaged, or belongs to another save")
        return data

    def _shared(self) -> bytes:
        group = self._process_group
        told: list[Any] = [None]
        if dist.get_rank(group) == 0:
            try:
                told = [self._read()]
            except CheckpointingException as error:
                told = [(type(error).__name__, str(error))]
        first = 0 if group is None else dist.get_global_rank(group, 0)

        def share() -> None:
            dist.broadcast_object_list(told, first, group)

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
        if isinstance(told[0], tuple):
            kind, text = told[0]
            raise getattr(errors, kind)(f"rank {first}: {text}")
        return cast(bytes, told[0])

    def _parse(self, data: bytes) -> Metadata:
        try:
            metadata = _MetadataUnpickler(data, self._allowed).load()
        except CheckpointingException:
            raise
        except Exception as error:
            # Damage can have any of pickle's functions fail in any way.
            raise CorruptShardError(
                f"the metadata of {self.path} is damaged ({type(error).__name__}: {error})"
            ) from error
        if not isinstance(metadata, Metadata):
            raise CorruptShardError(f"the metadata of {self.path} is none")
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes, allowed: SafeGlobals) -> None:
        super().__init__(io.BytesIO(data))
        self._allowed = allowed

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        return self._allowed.find(module_name, global_name)


@dataclass(frozen=True, slots=True)
class _Item:
    """One request of a load, and how its bytes come to their tensor."""

    reader: CachedMetadataFileSystemReader
    planner: LoadPlanner
    lock: threading.Lock
    request: ReadItem
    info: StorageInfo

    def runs(self) -> list[Run]:
        """What is read for it first."""
        whole = Run(self.info.offset, self.info.offset + self.info.length, self._load)
        if self.request.type == LoadItemType.BYTE_IO or self.info.transform_descriptors:
            return [whole]
        if 0 in self.request.lengths:
            return []
        part = self.reader.saved_part(self.request)
        if part is None:
            return [whole]
        dtype, shape, frame = part
        nbytes = math.prod(shape) * dtype.itemsize
        if self.info.length != len(frame.head) + nbytes + len(frame.tail):
            return [whole]
        with self.lock:
            target = self.planner.resolve_tensor(self.request).detach()
        begin = self.info.offset + len(frame.head)
        rows = _Rows(self, dtype, shape, begin, target)

        def use(data: memoryview) -> list[Run]:
            if data[: len(frame.head)] != frame.head:
                # By another release of torch, or not contiguous: torch knows what it means.
                return [whole]
            if len(data) < self.info.length:
                return rows.runs()
            rows.take_all(data[len(frame.head) : len(frame.head) + nbytes])
            return []

        return [
            Run(self.info.offset, whole.stop if self.info.length <= READ_NBYTES else begin, use)
        ]

    def commit(self, target: torch.Tensor) -> None:
        """Tell the planner that the tensor holds its values."""
        with self.lock:
            self.planner.commit_tensor(self.request, target)

    def _load(self, data: memoryview) -> list[Run]:
        """Have torch read the item."""
        stream: IO[bytes] = io.BytesIO(data)
        descriptors = self.info.transform_descriptors
        if descriptors:
            transformed = self.reader.transforms.transform_load_stream(
                self.request, descriptors, stream
            )
            stream = io.BytesIO(transformed.read(-1))
        if self.request.type == LoadItemType.BYTE_IO:
            with self.lock:
                self.planner.load_bytes(self.request, cast(io.BytesIO, stream))
            return []
        saved = torch.load(stream, map_location="cpu", weights_only=True)
        for dim, (start, length) in enumerate(
            zip(self.request.storage_offsets, self.request.lengths, strict=True)
        ):
            saved = saved.narrow(dim, start, length)
        with self.lock:
            target = self.planner.resolve_tensor(self.request).detach()
        _copy(target, saved)
        self.commit(target)
        return []


class _Rows:
    """The rows of a saved tensor that a request wants, in pieces that can be read in any order.

    Args:
        item: The request.
        dtype, shape: Of what was saved.
        begin: Where its values begin in the file.
        target: Where they go; of the shape that the request wants.
    """

    def __init__(
        self,
        item: _Item,
        dtype: torch.dtype,
        shape: torch.Size,
        begin: int,
        target: torch.Tensor,
    ) -> None:
        self._item = item
        self._dtype = dtype
        self._begin = begin
        self._target = target
        # Rows are those of the first dimension that has any.
        self._dim = next((dim for dim, size in enumerate(shape) if size > 1), 0)
        self._row_shape = shape[self._dim + 1 :]
        self._row_nbytes = math.prod(self._row_shape) * dtype.itemsize
        request = item.request
        self._first = request.storage_offsets[self._dim] if shape else 0
        self._count = request.lengths[self._dim] if shape else 1
        self._inner = list(zip(request.storage_offsets, request.lengths, strict=True))
        self._missing = self._count
        self._lock = threading.Lock()
        inner_lengths = torch.Size(request.lengths[self._dim + 1 :])
        self._flat = (
            inner_lengths == self._row_shape
            and target.is_cpu
            and target.is_contiguous()
            and target.dtype is dtype
        )

    def runs(self) -> list[Run]:
        """Each piece on its own."""
        step = max(1, READ_NBYTES // self._row_nbytes)
        return [self._run(row, min(row + step, self._count)) for row in range(0, self._count, step)]

    def take_all(self, data: memoryview) -> None:
        """Take the rows out of all values of the saved tensor."""
        start = self._first * self._row_nbytes
        self._take(0, self._count, data[start : start + self._count * self._row_nbytes])

    def _run(self, row: int, stop: int) -> Run:
        def use(data: memoryview) -> list[Run]:
            self._take(row, stop, data)
            return []

        begin = self._begin + self._first * self._row_nbytes
        return Run(begin + row * self._row_nbytes, begin + stop * self._row_nbytes, use)

    def _take(self, row: int, stop: int, data: memoryview) -> None:
        if self._flat:
            place = self._target.data_ptr() + row * self._row_nbytes
            ctypes.memmove(place, address_of(data), len(data))
        else:
            flat = torch.frombuffer(data, dtype=torch.uint8).view(self._dtype)
            rows = flat.view(*([1] * self._dim), stop - row, *self._row_shape)
            if self._target.dim() == 0:
                rows = rows.view(())
            else:
                for dim, (start, length) in enumerate(self._inner[self._dim + 1 :], self._dim + 1):
                    rows = rows.narrow(dim, start, length)
            place_of = self._target
            if self._target.dim():
                place_of = self._target.narrow(self._dim, row, stop - row)
            _copy(place_of, rows)
        with self._lock:
            self._missing -= stop - row
            over = not self._missing
        if over:
            self._item.commit(self._target)


def _together(runs: list[Run]) -> list[Run]:
    """Runs that are near each other in the file, as one."""
    groups: list[list[Run]] = []
    for run in runs:
        if groups:
            first, last = groups[-1][0], groups[-1][-1]
            if run.start - last.stop <= _GAP_NBYTES and run.stop - first.start <= READ_NBYTES:
                groups[-1].append(run)
                continue
        groups.append([run])
    return [group[0] if len(group) == 1 else _joined(group) for group in groups]


def _joined(group: list[Run]) -> Run:
    start = group[0].start

    def use(data: memoryview) -> list[Run]:
        parts = ((run, data[run.start - start : run.stop - start]) for run in group)
        return [further for run, part in parts for further in run.use(part)]

    return Run(start, max(run.stop for run in group), use)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if target.shape != source.shape:
        raise CorruptShardError(
            f"a part of shape {tuple(source.shape)} was saved where one of shape "
            f"{tuple(target.shape)} is wanted"
        )
    if target.dtype is source.dtype:
        copy_values(target, source)
    else:
        target.copy_(source)
