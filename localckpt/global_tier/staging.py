"""Where the files of a save are put together: in buffers that are made once and used again.

Training waits for one copy of its tensors into such a buffer, and for nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from localckpt.global_tier.layout import FileLayout
from localckpt.global_tier.trailer import covered_nbytes, trailer_nbytes
from localckpt.global_tier.write import Stream
from localckpt.state_dict.copying import Copier
from localckpt.state_dict.host_memory import address_of
from localckpt.state_dict.layout import PAGE_NBYTES, round_up
from localckpt.state_dict.side_streams import CopiesUnderWay, SideStreams, copy_to_host
from localckpt.state_dict.tensor_table import is_flat
from localckpt.storage.buffers import Buffer, PrivateBuffer, SharedBuffer
from localckpt.storage.pool import BufferPool
from localckpt.storage.staging import StagingFolder, remove_orphans

__all__ = ["Region", "Staging"]

_PURPOSE = "files"
_SHARED_MEMORY = Path("/dev/shm")


class Region(NamedTuple):
    """Where one file is put together in a buffer.

    Attributes:
        start: Of the file in the buffer, on a page.
        covered: Bytes of its content; its trailer follows.
        streams: Where its items are, in the order of its layout.
    """

    start: int
    covered: int
    streams: tuple[Stream, ...]


class Staging:
    """Owns the buffers, and the threads that copy.

    Args:
        writer: Who writes: a ``"thread"`` of this process, from private memory, or another
            ``"process"``, from shared memory.
        threads: How many copy; ``None`` for this rank's share of the cores, at most 4.
        timeout_s: The longest that a save waits for the one before to be written, in seconds.
    """

    def __init__(
        self,
        writer: Literal["thread", "process"],
        *,
        threads: int | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        self._timeout_s = timeout_s
        self._copier = Copier(threads)
        self._streams = SideStreams(timeout_s)
        self._folder = StagingFolder(_SHARED_MEMORY)
        if writer == "process":
            remove_orphans(_SHARED_MEMORY)
        # One at a time: saves to shared storage are far between.
        make = PrivateBuffer if writer == "thread" else self._make_shared
        self._pool = BufferPool(make, depth=1)
        self._stuck: list[tuple[Buffer, CopiesUnderWay]] = []
        # Frames are in the buffer from the save before, as long as nothing moves.
        self._framed: tuple[Buffer, tuple[FileLayout, ...], list[int]] | None = None

    def prepare(
        self,
        files: Sequence[FileLayout],
        others: Sequence[Sequence[bytes | memoryview]],
        gpu: torch.device | None,
    ) -> None:
        """Make a buffer for such files in the background, so that the first save finds it."""
        _, nbytes = _regions(files, others)
        self._pool.prepare(_PURPOSE, nbytes, gpu)

    def take(
        self,
        files: Sequence[FileLayout],
        others: Sequence[Sequence[bytes | memoryview]],
        owner: object,
    ) -> tuple[Buffer, list[Region]]:
        """A buffer in which all files have room, and where each of them is.

        Args:
            files: What is to be put together.
            others: For each file the items whose sizes are not part of its layout.
            owner: Who takes it; see :meth:`release`.

        Raises:
            CheckpointingException: The saves before this one were not written in time.
            StorageError: There is no memory.
        """
        regions, nbytes = _regions(files, others)
        return self._pool.take(_PURPOSE, nbytes, self._timeout_s, owner), regions

    def fill(
        self,
        buffer: Buffer,
        files: tuple[FileLayout, ...],
        regions: Sequence[Region],
        tensors: dict[int, torch.Tensor],
        others: Sequence[Sequence[bytes | memoryview]],
    ) -> None:
        """Copy everything to its place; returns when all values are there.

        Args:
            buffer, regions: As :meth:`take` gave them.
            files, others: As for it.
            tensors: By the numbers of their slots.
        """
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
        for file, region, more in zip(files, regions, others, strict=True):
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
            for (offset, nbytes, _), data in zip(
                region.streams[len(file.slots) :], more, strict=True
            ):
                view[region.start + offset : region.start + offset + nbytes] = data
            content = max((s.offset + s.nbytes for s in region.streams), default=0)
            view[region.start + content : region.start + region.covered] = bytes(
                region.covered - content
            )
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
        self._copier.settle()
        self._pool.release(owner)

    def close(self) -> None:
        """Free the buffers and end the threads. May be called twice."""
        self._framed = None
        self._copier.close()
        self._pool.close()
        self._folder.close()

    def _make_shared(self, nbytes: int) -> Buffer:
        return SharedBuffer(self._folder.new_path(), nbytes)


def _regions(
    files: Sequence[FileLayout], others: Sequence[Sequence[bytes | memoryview]]
) -> tuple[list[Region], int]:
    """Where each file is in a buffer, and the bytes of all."""
    regions, start = [], 0
    for file, more in zip(files, others, strict=True):
        streams = [Stream(slot.offset, slot.end - slot.offset) for slot in file.slots]
        end = file.nbytes
        for data in more:
            streams.append(Stream(end, len(data)))
            end += len(data)
        covered = covered_nbytes(end)
        regions.append(Region(start, covered, tuple(streams)))
        start += round_up(covered + trailer_nbytes(covered), PAGE_NBYTES)
    return regions, start
