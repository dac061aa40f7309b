"""Reads of the items of a load: the parts of their values in data files, and the tensors they fill.

Values that torch writes as contiguous bytes go straight into their tensors. All other items are
read whole, and parsed by torch. Several files are read at a time, within a budget, and each block
of them is verified.
"""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from localckpt.errors import CheckpointingException, CorruptShardError, MismatchError
from localckpt.global_tier.data_files import FileIdentity, data_bytes, read_trailer
from localckpt.global_tier.metadata import StorageInfo
from localckpt.global_tier.write_items import Frame, frame_of, load_object
from localckpt.memory.copying import Copier
from localckpt.memory.host_memory import memory_at
from localckpt.memory.tensor_bytes import narrowed
from localckpt.ranks.deadline import interruptible
from localckpt.state_dict.boxes import Rectangle
from localckpt.state_dict.part_reads import COPIED_NBYTES, Part, convert_values, read_parts
from localckpt.state_dict.source import VerifiedBytes
from localckpt.storage.files import FileSource

# A disk is busy with 4 requests under way, and half of these threads are copying and hashing.
_THREADS = 8
# Less at once would read the blocks between small items again and again.
_LEAST_NBYTES = 4 << 20


class FileReads:
    """Reads of one load.

    So many files are read at a time that at most ``concurrent_bytes`` are in flight beside the
    tensors. Without ``save_id`` files of any writer are verified if they can be.
    """

    def __init__(self, folder: Path, concurrent_bytes: int, save_id: str | None) -> None:
        self._folder = folder
        self._save_id = save_id
        self._limit = concurrent_bytes
        self._at_once = 1
        self._counting = threading.Lock()
        self._is_stopped = False
        self.nbytes = 0
        """Bytes that were read."""

    def read(self, items: Sequence[ItemRead]) -> None:
        """Read all items; the caller's thread takes part."""
        by_file: dict[str, list[ItemRead]] = {}
        for item in sorted(items, key=lambda item: item.info.offset):
            by_file.setdefault(item.info.relative_path, []).append(item)
        largest = max((item.held_nbytes for item in items), default=0)
        self._at_once = min(_THREADS, len(by_file), max(1, self._limit // max(1, largest)))
        copier = Copier(max(1, self._at_once))

        def work(files: Iterator[tuple[str, list[ItemRead]]]) -> None:
            for name, of_file in files:
                with closing(FileSource(self._folder / name)) as source:
                    self._read_items(self._content(source), of_file)

        interruptible(lambda: copier.share([*by_file.items()], work), self._stop)

    def _content(self, source: FileSource) -> VerifiedBytes:
        path = source.path
        if self._save_id is not None:
            return data_bytes(source, path, self._save_id, self._count)
        if (trailer := read_trailer(source, path.name)) is not None:
            return trailer.content(source, path.name, self._count)
        return VerifiedBytes(source, FileIdentity(path.name, ""), source.nbytes, None, self._count)

    def _read_items(self, content: VerifiedBytes, items: Sequence[ItemRead]) -> None:
        waiting: list[ItemRead] = []
        held_nbytes, most_nbytes = 0, max(self._limit // self._at_once, _LEAST_NBYTES)
        for item in items:
            if (stop := item.info.offset + item.info.length) > content.end:
                raise CorruptShardError(
                    f"{self._folder / item.info.relative_path} holds {content.end} bytes of "
                    f"values, and those from {item.info.offset} to {stop} are wanted"
                )
            if waiting and held_nbytes + item.held_nbytes > most_nbytes:
                self._read_together(content, waiting)
                waiting, held_nbytes = [], 0
            waiting.append(item)
            held_nbytes += item.held_nbytes
        self._read_together(content, waiting)

    def _read_together(self, content: VerifiedBytes, items: Sequence[ItemRead]) -> None:
        parts = [part for item in items for part in item.parts()]
        most_nbytes = max(min(COPIED_NBYTES, self._limit) // self._at_once, _LEAST_NBYTES)
        read_parts(content, parts, most_nbytes, max(1, _THREADS // self._at_once))
        # By another release of torch, or not contiguous: torch knows what they mean.
        if foreign := [item for item in items if not item.take()]:
            self._read_items(content, foreign)

    def _count(self, nbytes: int) -> None:
        with self._counting:
            self.nbytes += nbytes
        if self._is_stopped:
            raise CheckpointingException("the load was interrupted")

    def _stop(self) -> None:
        self._is_stopped = True


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
        device: Device of the tensor that gets the values.
        held_nbytes: Bytes of an item that is read whole.
    """

    def __init__(self, context: LoadContext, request: ReadItem, info: StorageInfo) -> None:
        self.info = info
        self.device = torch.device("cpu")
        self.held_nbytes = 0
        self._context = context
        self._request = request
        # The head of the item or all of it, once it is read.
        self._data = torch.empty(0, dtype=torch.uint8)
        self._saved: tuple[torch.dtype, torch.Size, Frame] | None = None
        if request.type != LoadItemType.BYTE_IO and not info.transform_descriptors:
            self._saved = _saved_part(context.metadata, request, info.length)
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

    def _commit(self) -> None:
        with self._context.lock:
            self._context.planner.commit_tensor(self._request, self._target)

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
