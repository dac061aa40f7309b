"""torch's file system reader, with one read of the metadata for all ranks and fast, verified data.

It reads checkpoints of any writer of torch's format. Several files are read at a time, within a
budget. Those that this package has written are verified block by block.
"""

from __future__ import annotations

import io
import math
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from localckpt.errors import CheckpointingException, CorruptShardError, MismatchError, PeerLostError
from localckpt.global_tier.data_files import data_bytes, opened
from localckpt.global_tier.metadata import METADATA_NAME, StorageInfo, read_metadata
from localckpt.global_tier.places import Place, place_of
from localckpt.global_tier.staging import Frame, frame_of, load_object
from localckpt.memory.copying import Copier
from localckpt.memory.gpu_copies import await_training
from localckpt.memory.host_memory import memory_at
from localckpt.memory.tensor_bytes import narrowed
from localckpt.ranks.deadline import interruptible, within
from localckpt.ranks.failure import Failure
from localckpt.state_dict.boxes import Rectangle
from localckpt.state_dict.part_reads import COPIED_NBYTES, Part, convert_values, read_parts
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.source import VerifiedBytes
from localckpt.storage.failures import storage_errors

# A disk is busy with 4 requests under way, and half of these threads are copying and hashing.
_THREADS = 8
# Less at once would read the blocks between small items again and again.
_LEAST_NBYTES = 4 << 20


class CachedMetadataFileSystemReader(FileSystemReader):
    """Reader of a checkpoint of torch.distributed.checkpoint's format.

    Args:
        path: The checkpoint's directory, or its URL.
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
        path: str | os.PathLike[str] | Place,
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
        self._folder = place_of(path)
        # torch makes a plain path of it.
        super().__init__(str(self._folder), _extension_registry)
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

    def reset(self, checkpoint_id: str | os.PathLike[str] | Place | None = None) -> None:
        """Switch to another checkpoint."""
        if checkpoint_id:
            self._folder = place_of(checkpoint_id)
        super().reset(str(self._folder))
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
            self._metadata = self._parse(self._read(f"__{kwargs['rank']}{METADATA_NAME}"))
        if self._metadata is None:
            shared = self._share and dist.is_available() and dist.is_initialized()
            shared = shared and dist.get_world_size(self._process_group) > 1
            self._metadata = self._parse(self._shared() if shared else self._read())
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
        # On all ranks, of which some may have no tensor to read.
        metadata, calls = self.read_metadata(), threading.Lock()
        items = [
            ItemRead(self, planner, calls, request, info, metadata)
            for request, info in zip(plan.items, self._places(plan), strict=True)
            if request.type == LoadItemType.BYTE_IO or 0 not in request.lengths
        ]
        # What training has queued on them must not come after what is loaded.
        await_training({item.device for item in items}, self._timeout_s)
        self.read_items(items)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _places(self, plan: LoadPlan) -> list[StorageInfo]:
        """Places of a plan's items; none is beyond the end of its file, whatever metadata says."""
        wanted = (self.storage_data.get(request.storage_index) for request in plan.items)
        names = {info.relative_path for info in wanted if info is not None}
        with storage_errors("read", self._folder):
            sizes = self._folder.sizes(names)
        places = []
        for request in plan.items:
            index = request.storage_index
            info = self.storage_data.get(index)
            if info is None:
                raise CorruptShardError(
                    f"the metadata of {self._folder} does not say where {index.fqn} lies"
                )
            path = self._folder / info.relative_path
            if info.relative_path not in sizes:
                raise CorruptShardError(f"{path} is gone")
            if info.offset + info.length > sizes[info.relative_path]:
                raise CorruptShardError(
                    f"{path} is cut short: it has {sizes[info.relative_path]} bytes, and "
                    f"{index.fqn} lies from {info.offset} to {info.offset + info.length}"
                )
            places.append(info)
        return places

    def _read(self, name: str = METADATA_NAME) -> bytes:
        path = self._folder / name
        with storage_errors("read", path):
            data = path.read()
        if self._metadata_digest not in (None, xxhash.xxh3_64_intdigest(data)):
            raise CorruptShardError(f"{path} is damaged, or belongs to another save")
        return data

    def _shared(self) -> bytes:
        group = self._process_group
        shared: list[Any] = [None]
        if dist.get_rank(group) == 0:
            try:
                shared = [self._read()]
            except CheckpointingException as error:
                shared = [Failure.of(error).to_json()]
        first = 0 if group is None else dist.get_global_rank(group, 0)
        share = partial(dist.broadcast_object_list, shared, first, group)
        try:
            if "cpu" in str(dist.get_backend_config(group)):
                within(self._timeout_s, share)
            else:
                # A GPU belongs to the thread that chose it, and NCCL has a deadline of its own.
                share()
        except (TimeoutError, RuntimeError) as error:
            raise PeerLostError(
                f"rank {first} has not told what the metadata of {self._folder} is ({error}). "
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
            raise CorruptShardError(
                f"the metadata of {self._folder} is damaged: {error}"
            ) from error

    def read_items(self, items: Sequence[ItemRead]) -> None:
        """Read items, of several files at once; :meth:`read_data` calls it."""
        self.nbytes_read = 0
        counting, stopped = threading.Lock(), threading.Event()
        by_file: dict[str, list[ItemRead]] = {}
        for item in sorted(items, key=lambda item: item.info.offset):
            by_file.setdefault(item.info.relative_path, []).append(item)
        largest = max((item.held_nbytes for item in items), default=0)
        at_once = max(1, min(_THREADS, len(by_file), self._concurrent_bytes // max(1, largest)))

        def count(nbytes: int) -> None:
            with counting:
                self.nbytes_read += nbytes
            if stopped.is_set():
                raise CheckpointingException("the load was interrupted")

        def work(files: Iterator[tuple[str, list[ItemRead]]]) -> None:
            for name, of_file in files:
                place = self._folder / name
                with closing(opened(place)) as source:
                    content = data_bytes(source, place, self._save_id, count)
                    self._read_items(content, of_file, at_once)

        interruptible(lambda: Copier(at_once).share([*by_file.items()], work), stopped.set)

    def _read_items(self, content: VerifiedBytes, items: Sequence[ItemRead], at_once: int) -> None:
        waiting: list[ItemRead] = []
        held_nbytes, most_nbytes = 0, max(self._concurrent_bytes // at_once, _LEAST_NBYTES)
        for item in items:
            if (stop := item.info.offset + item.info.length) > content.end:
                raise CorruptShardError(
                    f"{self._folder / item.info.relative_path} holds {content.end} bytes of "
                    f"values, and those from {item.info.offset} to {stop} are wanted"
                )
            if waiting and held_nbytes + item.held_nbytes > most_nbytes:
                self._read_together(content, waiting, at_once)
                waiting, held_nbytes = [], 0
            waiting.append(item)
            held_nbytes += item.held_nbytes
        self._read_together(content, waiting, at_once)

    def _read_together(
        self, content: VerifiedBytes, items: Sequence[ItemRead], at_once: int
    ) -> None:
        parts = [part for item in items for part in item.parts()]
        most_nbytes = max(min(COPIED_NBYTES, self._concurrent_bytes) // at_once, _LEAST_NBYTES)
        read_parts(content, parts, most_nbytes, max(1, _THREADS // at_once))
        # By another release of torch, or not contiguous: torch knows what they mean.
        if foreign := [item for item in items if not item.take()]:
            self._read_items(content, foreign, at_once)


class ItemRead:
    """Read of one item: values that torch writes as contiguous bytes go straight to their tensor.

    All others are read whole (``held_nbytes``), and parsed by torch. Each call of the planner holds
    ``calls``: planners are not made for several threads.
    """

    def __init__(
        self,
        reader: CachedMetadataFileSystemReader,
        planner: LoadPlanner,
        calls: threading.Lock,
        request: ReadItem,
        info: StorageInfo,
        metadata: Metadata,
    ) -> None:
        self.info = info
        self.device = torch.device("cpu")
        self.held_nbytes = 0
        self._reader, self._planner, self._calls = reader, planner, calls
        self._request = request
        # The head of the item or all of it, once it is read.
        self._data = torch.empty(0, dtype=torch.uint8)
        self._saved: tuple[torch.dtype, torch.Size, Frame] | None = None
        if request.type != LoadItemType.BYTE_IO and not info.transform_descriptors:
            self._saved = _saved_part(metadata, request, info.length)
        if self._saved is None:
            self.held_nbytes = info.length
        else:
            self._target = self._find_target()

    def parts(self) -> list[Part]:
        """Return the parts of the file to read before :meth:`take`."""
        start, head_nbytes = self.info.offset, self.info.length
        parts = []
        if self._saved is not None:
            dtype, shape, frame = self._saved
            head_nbytes = len(frame.head)
            wanted = Rectangle(tuple(self._request.storage_offsets), tuple(self._request.lengths))
            values = start + head_nbytes
            parts.append(Part.contiguous(values, dtype, shape, wanted, self._target))
        self._data = torch.empty(head_nbytes, dtype=torch.uint8)
        head = Rectangle((0,), (head_nbytes,))
        parts.append(Part.contiguous(start, torch.uint8, (head_nbytes,), head, self._data))
        return parts

    def take(self) -> bool:
        """Give the planner what was read; False if the item has to be read whole after all."""
        data = memory_at(self._data.data_ptr(), self._data.nbytes)
        if self._saved is None:
            self._load(data)
        elif data != self._saved[2].head:
            self._saved, self.held_nbytes = None, self.info.length
            return False
        else:
            self._commit()
        # Else the bytes would stay until all files are read.
        self._data = torch.empty(0, dtype=torch.uint8)
        return True

    def _find_target(self) -> torch.Tensor:
        with self._calls:
            target = self._planner.resolve_tensor(self._request).detach()
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

    def _commit(self) -> None:
        with self._calls:
            self._planner.commit_tensor(self._request, self._target)

    def _load(self, data: memoryview) -> None:
        stream = io.BytesIO(data)
        if self.info.transform_descriptors:
            transformed = self._reader.transforms.transform_load_stream(
                self._request, self.info.transform_descriptors, stream
            )
            stream = io.BytesIO(transformed.read(-1))
        if self._request.type == LoadItemType.BYTE_IO:
            with self._calls:
                self._planner.load_bytes(self._request, stream)
            return
        name = self._request.dest_index.fqn
        saved = load_object(name, stream, self._reader.safe_globals)
        saved = narrowed(saved, self._request.storage_offsets, self._request.lengths)
        self._target = self._find_target()
        if self._target.shape != saved.shape:
            raise CorruptShardError(
                f"a part of shape {tuple(saved.shape)} was saved where one of shape "
                f"{tuple(self._target.shape)} is wanted"
            )
        convert_values(self._target, saved)
        self._commit()


def _saved_part(
    metadata: Metadata, request: ReadItem, nbytes: int
) -> tuple[torch.dtype, torch.Size, Frame] | None:
    """Return dtype, shape and frame of a saved part; ``None`` if torch writes another size now."""
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
