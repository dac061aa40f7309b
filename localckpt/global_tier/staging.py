"""Layout of a rank's data files, and the buffers in which they are staged.

The layout is a pure function of the save plan. Buffers are made once and used again. Training waits
for one copy of its tensors into a buffer, and for nothing else.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from localckpt.errors import CheckpointingException
from localckpt.global_tier.metadata import DATA_SUFFIX
from localckpt.global_tier.trailer import covered_nbytes, trailer_nbytes
from localckpt.global_tier.write_files import Stream
from localckpt.global_tier.write_items import Frame, frame_of
from localckpt.memory.copying import Copier
from localckpt.memory.gpu_copies import CopiesUnderWay, SideStreams, copy_to_host
from localckpt.memory.host_memory import PAGE_NBYTES, address_of, round_up
from localckpt.memory.tensor_bytes import is_flat
from localckpt.storage.buffers import Buffer, PrivateBuffer, SharedBuffer
from localckpt.storage.pool import BufferPool
from localckpt.storage.staging import StagingFolder, remove_orphans

__all__ = [
    "FileLayout",
    "Region",
    "Slot",
    "Staging",
    "WriteData",
    "item_nbytes",
    "lay_out_files",
    "place_items",
    "split_by_size_and_type",
]

# Values of this size begin on a page: copies between memory that is not aligned alike take longer.
_PAGE_ALIGNED_NBYTES = 256 << 10
_ALIGNMENT = 64


class Slot(NamedTuple):
    """One tensor in a file.

    Attributes:
        number: Number of its item in the plan.
        offset: Where its frame begins in the file.
        data: Where its values begin.
        nbytes: Size of its values.
        frame: What stands around them.
    """

    number: int
    offset: int
    data: int
    nbytes: int
    frame: Frame

    @property
    def end(self) -> int:
        return self.data + self.nbytes + len(self.frame.tail)


@dataclass(frozen=True, slots=True)
class FileLayout:
    """One file of a rank.

    Attributes:
        name: Name of the file.
        slots: The tensors, by offset.
        others: Numbers of the items that follow them, whose sizes are known when they are saved.
        nbytes: Size of all slots together.
    """

    name: str
    slots: tuple[Slot, ...]
    others: tuple[int, ...]
    nbytes: int


def lay_out_files(
    plan: SavePlan,
    others: Set[int],
    *,
    prefix: str,
    bins: int,
    separation_hint: str | None = None,
) -> tuple[FileLayout, ...]:
    """Divide a rank's items among files, and place them there.

    Args:
        plan: The items.
        others: Numbers of those that are saved as a run of bytes.
        prefix: Begins the names of this rank's files.
        bins: How many files of about the same size there are.
        separation_hint: Items whose names begin with it go to as many files of their own.

    Raises:
        CheckpointingException: The hint cannot be part of a file's name.
    """
    if separation_hint is not None and (not separation_hint or "/" in separation_hint):
        raise CheckpointingException(
            f"separation_hint is {separation_hint!r}; it begins the names of files, so it must "
            f"be neither empty nor hold a '/'"
        )
    numbers = {id(item): number for number, item in enumerate(plan.items)}
    groups: dict[str, list[WriteItem]] = {"": []}
    for item in plan.items:
        apart = separation_hint is not None and item.index.fqn.startswith(separation_hint)
        groups.setdefault(separation_hint if apart and separation_hint else "", []).append(item)
    files: list[FileLayout] = []
    for group, items in groups.items():
        for bucket in split_by_size_and_type(bins, items):
            if bucket:
                name = f"{group}{prefix}{len(files)}{DATA_SUFFIX}"
                placed = [(numbers[id(item)], item) for item in bucket]
                files.append(place_items(name, placed, others))
    return tuple(files)


def split_by_size_and_type(bins: int, items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    """Divide items into bins of about the same number of bytes: the largest first, each to the
    bin that has least; what is no tensor goes to one bin after the other.
    """
    buckets: list[list[WriteItem]] = [[] for _ in range(bins)]
    others = [item for item in items if item.type == WriteItemType.BYTE_IO]
    for i, item in enumerate(others):
        buckets[i % bins].append(item)
    tensors = [item for item in items if item.type != WriteItemType.BYTE_IO]
    tensors.sort(key=item_nbytes, reverse=True)
    sizes = [(0, i) for i in range(bins)]
    for item in tensors:
        size, i = sizes[0]
        buckets[i].append(item)
        heapq.heapreplace(sizes, (size + item_nbytes(item), i))
    return buckets


def item_nbytes(item: WriteItem) -> int:
    """Bytes of the part of a tensor that an item is, not of the whole tensor."""
    data = item.tensor_data
    assert data is not None, "only tensors have a size before they are saved"
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def place_items(name: str, bucket: Sequence[tuple[int, WriteItem]], others: Set[int]) -> FileLayout:
    """Place items in a file, in their order.

    Args:
        name: Name of the file.
        bucket: The items, and their numbers in the plan.
        others: Numbers of those that are saved as a run of bytes.
    """
    slots: list[Slot] = []
    end = 0
    for number, item in bucket:
        data = item.tensor_data
        if number in others or data is None:
            continue
        frame = frame_of(data.properties.dtype, data.chunk.sizes)
        nbytes = item_nbytes(item)
        alignment = PAGE_NBYTES if nbytes >= _PAGE_ALIGNED_NBYTES else _ALIGNMENT
        begin = round_up(end + len(frame.head), alignment)
        slots.append(Slot(number, begin - len(frame.head), begin, nbytes, frame))
        end = slots[-1].end
    last = tuple(number for number, _ in bucket if number in others)
    return FileLayout(name, tuple(slots), last, end)


_PURPOSE = "files"


class Region(NamedTuple):
    """Place of one file in a buffer.

    Attributes:
        start: Offset of the file in the buffer, on a page.
        covered: Bytes of its content; its trailer follows.
        streams: Where its items are, in the order of its layout.
    """

    start: int
    covered: int
    streams: tuple[Stream, ...]


@dataclass
class WriteData:
    """Data that one rank writes in one save, between planning and its end.

    Attributes:
        plan: This rank's items.
        files: Where each of them lies.
        tensors: Those that are tensors, by number; none once they are staged.
        others: For each file the bytes of those whose sizes are not part of its layout.
        is_staged: Everything is in a buffer, or has begun to be copied there.
        owner: In whose name the buffer is taken.
    """

    plan: SavePlan
    files: tuple[FileLayout, ...]
    tensors: dict[int, torch.Tensor]
    others: list[list[memoryview]]
    is_staged: bool = False
    owner: object = field(default_factory=object)

    def items_of(self, file: FileLayout) -> tuple[WriteItem, ...]:
        """The items of a file in the order in which they lie there."""
        numbers = [*(slot.number for slot in file.slots), *file.others]
        return tuple(self.plan.items[number] for number in numbers)


class Staging:
    """Staging buffers of one writer, and the threads that copy.

    Args:
        writer: Who writes: a ``"thread"`` of this process, from private memory, or another
            ``"process"``, from shared memory.
        threads: How many copy; ``None`` for this rank's share of the cores, at most 4.
        timeout_s: The longest that a save waits for the one before to be written, in seconds.
    """

    def __init__(
        self,
        writer: Literal["thread", "process"],
        threads: int | None,
        timeout_s: float,
    ) -> None:
        self._timeout_s = timeout_s
        self._copier = Copier(threads)
        self._streams = SideStreams(timeout_s)
        self._folder = StagingFolder()
        if writer == "process":
            remove_orphans()
        # One at a time: saves to shared storage are far between.
        make = PrivateBuffer if writer == "thread" else self._make_shared
        self._pool = BufferPool(make, depth=1)
        self._stuck: list[tuple[Buffer, CopiesUnderWay]] = []
        # Frames are in the buffer from the save before, as long as nothing moves.
        self._framed: tuple[Buffer, tuple[FileLayout, ...], list[int]] | None = None

    def prepare(self, data: WriteData) -> None:
        """Make a buffer for such data in the background, so that the first save finds it."""
        _, nbytes = _regions(data)
        gpus = (tensor.device for tensor in data.tensors.values() if tensor.is_cuda)
        self._pool.prepare(_PURPOSE, nbytes, next(gpus, None))

    def stage(self, data: WriteData) -> tuple[Buffer, list[Region]]:
        """Copy everything to its place in a buffer; returns when all values are there.

        Returns:
            The buffer, which its owner gives back or :meth:`release` does, and where each file is.

        Raises:
            CheckpointingException: The saves before this one were not written in time.
            StorageError: There is no memory.
        """
        regions, nbytes = _regions(data)
        buffer = self._pool.take(_PURPOSE, nbytes, self._timeout_s, data.owner)
        data.is_staged = True
        try:
            self._fill(buffer, data, regions)
        except BaseException:
            buffer.give_back()
            raise
        # The values are those of the call: nothing of the state is kept.
        data.tensors = {}
        return buffer, regions

    def _fill(self, buffer: Buffer, data: WriteData, regions: Sequence[Region]) -> None:
        files, tensors = data.files, data.tensors
        view, base = buffer.view, address_of(buffer.view)
        starts = [region.start for region in regions]
        framed = (
            self._framed is not None
            and self._framed[0] is buffer
            and self._framed[1] is files
            and self._framed[2] == starts
        )
        self._framed = None
        jobs: list[tuple[int, int, int]] = []
        from_gpus: list[tuple[memoryview, torch.Tensor]] = []
        for file, region, more in zip(files, regions, data.others, strict=True):
            for slot in file.slots:
                begin = region.start + slot.data
                end = begin + slot.nbytes
                if not framed:
                    view[begin - len(slot.frame.head) : begin] = slot.frame.head
                    view[end : end + len(slot.frame.tail)] = slot.frame.tail
                tensor = tensors[slot.number]
                if not slot.nbytes:
                    continue
                if not tensor.is_cpu:
                    from_gpus.append((view[begin:end], tensor))
                elif is_flat(tensor):
                    jobs.append((base + begin, tensor.data_ptr(), slot.nbytes))
                else:
                    copy_to_host(view[begin:end], tensor)
            for stream, content in zip(region.streams[len(file.slots) :], more, strict=True):
                begin = region.start + stream.offset
                view[begin : begin + stream.nbytes] = content
            end = max((s.offset + s.nbytes for s in region.streams), default=0)
            view[region.start + end : region.start + region.covered] = bytes(region.covered - end)
        if from_gpus:
            buffer.pin(from_gpus[0][1].device)
        under_way = self._streams.queue(from_gpus)
        try:
            self._copier.copy(jobs, (view, tensors))
        finally:
            try:
                under_way.wait()
            except BaseException:
                # A GPU may still write to it, whenever that may be: nobody else gets this memory.
                self._pool.forget(buffer)
                self._stuck.append((buffer, under_way))
                raise
        self._framed = (buffer, files, starts)

    def release(self, owner: object) -> None:
        """Take out a buffer that its owner is not going to give back."""
        self._copier.stop()
        self._pool.release(owner)

    def close(self) -> None:
        """Free the buffers. May be called twice."""
        self._framed = None
        self._copier.stop()
        self._pool.close()
        self._folder.close()

    def _make_shared(self, nbytes: int) -> Buffer:
        return SharedBuffer(self._folder.new_path(), nbytes)


def _regions(data: WriteData) -> tuple[list[Region], int]:
    """Return the place of each file in a buffer, and the bytes of all."""
    regions, start = [], 0
    for file, more in zip(data.files, data.others, strict=True):
        streams = [Stream(slot.offset, slot.end - slot.offset) for slot in file.slots]
        end = file.nbytes
        for content in more:
            streams.append(Stream(end, len(content)))
            end += len(content)
        covered = covered_nbytes(end)
        regions.append(Region(start, covered, tuple(streams)))
        start += round_up(covered + trailer_nbytes(covered), PAGE_NBYTES)
    return regions, start
