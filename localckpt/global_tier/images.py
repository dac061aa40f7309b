"""Images of ranks on shared storage: what a drain keeps of each beside the data files.

A drained checkpoint has the values of an image's tensors in its data files. The envelope of an
image is the rest of its bytes, and the places of its tensors, so that a rank can read the image as
it was on its node.

The content of an envelope is the length of a JSON text in 8 bytes, the text, and the rest of the
image's bytes in order. The text has the size of the image, and ``[start, stop, name, offsets,
skipped]`` for each range of the image in a data file: the item that has it, as
torch.distributed.checkpoint's metadata names it, and the bytes of the item before it.
"""

from __future__ import annotations

import json
import math
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from localckpt.errors import CorruptShardError, MismatchError, StorageError
from localckpt.global_tier.data_files import data_bytes, opened
from localckpt.global_tier.folders import SharedCheckpoint
from localckpt.global_tier.metadata import StorageInfo
from localckpt.global_tier.places import OpenedFile, Place
from localckpt.global_tier.staging import frame_of
from localckpt.ids import ShardIdentity
from localckpt.state_dict.boxes import Rectangle
from localckpt.state_dict.reader import ImageReader
from localckpt.state_dict.source import ShardSource, read_header
from localckpt.storage.buffers import Buffer
from localckpt.storage.catalog import Problem
from localckpt.storage.failures import storage_errors
from localckpt.storage.store import Claim, Slot, Store, Stored


class ItemPlace(NamedTuple):
    """Place of one item's values in an image: all of a tensor, or a part of it."""

    number: int
    part: Rectangle | None = None


def envelope_name(rank: int) -> str:
    return f"__{rank}.envelope"


def envelope_of(
    image: ImageReader, places: Mapping[MetadataIndex, ItemPlace]
) -> tuple[int, Callable[[], Iterator[bytes | memoryview]]]:
    """Return size and content of an image's envelope; data files hold what is at ``places``."""
    ranges: list[list[Any]] = []
    for found in sorted(_ranges(image, places), key=lambda found: found[:2]):
        # Tensors may share bytes: the first that has them is enough.
        if not ranges or found[0] >= ranges[-1][1]:
            ranges.append(found)
    text = json.dumps([image.header.nbytes, ranges], separators=(",", ":")).encode()
    head = len(text).to_bytes(8, "little") + text
    ends = [0, *(stop for _, stop, *_ in ranges)]
    begins = [*(start for start, *_ in ranges), image.header.nbytes]
    rest = [(end, begin) for end, begin in zip(ends, begins, strict=True) if end < begin]

    def content() -> Iterator[bytes | memoryview]:
        yield head
        digests_start = image.header.digests_start
        for start, stop in rest:
            yield from image.pieces(start, min(stop, digests_start))
            first, last = (max(at - digests_start, 0) for at in (start, stop))
            yield image.digest_bytes[first:last]

    return len(head) + sum(stop - start for start, stop in rest), content


def _ranges(image: ImageReader, places: Mapping[MetadataIndex, ItemPlace]) -> Iterator[list[Any]]:
    """Yield the ranges of an image that items of data files have, as an envelope lists them."""
    for index, (number, part) in places.items():
        entry = image.entries[number]
        offsets, sizes = part or ((0,), entry.shape)
        run = image.run_of(number)
        # Only whole rows are one range.
        if run is None or sizes[1:] != entry.shape[1:] or 0 in sizes:
            continue
        dtype = entry.torch_dtype()
        begin = run[0] + offsets[0] * math.prod(sizes[1:]) * dtype.itemsize
        end = begin + math.prod(sizes) * dtype.itemsize
        skipped = len(frame_of(dtype, torch.Size(sizes)).head)
        yield [begin, end, index.fqn, index.offset and [*index.offset], skipped]


class SharedImages(Store):
    """Images of the ranks that have saved one checkpoint on shared storage, to read."""

    def __init__(
        self, found: SharedCheckpoint, places: Mapping[MetadataIndex, StorageInfo]
    ) -> None:
        super().__init__(str(found.folder.path), Claim())
        self._folder, self._save_id = found.folder.path, found.record.save_id
        self._places = places

    def identity(self, rank: int) -> ShardIdentity:
        """Return the identity of a rank's image; MismatchError if the checkpoint has no images."""
        if not self._has_image(rank):
            raise MismatchError(
                f"{self.domain} was not saved by a Checkpointer: load it with "
                f"GlobalCheckpointManager, or dcp.load. Nothing was changed"
            )
        with closing(self._open(rank)) as source:
            return read_header(source).identity

    def open(self, identity: ShardIdentity) -> ShardSource:
        return self._open(identity.rank)

    def holds(self, identity: ShardIdentity) -> bool:
        return self._has_image(identity.rank)

    def quarantine(self, identity: ShardIdentity, problem: Problem) -> None:
        """Do nothing: other ranks, and jobs of another number of ranks, read the same files."""

    def list_stored(self) -> list[Stored]:
        return []

    def commit(self, slots: Sequence[Slot]) -> None:
        self._refuse()

    def close(self) -> None:
        pass

    def _take_memory(self, slot: Slot, timeout_s: float) -> Buffer:
        self._refuse()

    def _drop_memory(self, slot: Slot) -> None:
        pass

    def _refuse(self) -> NoReturn:
        raise StorageError(f"{self._folder} is read only")

    def _has_image(self, rank: int) -> bool:
        with storage_errors("look at", self._folder):
            return (self._folder / envelope_name(rank)).size() is not None

    def _open(self, rank: int) -> ShardSource:
        path = self._folder / envelope_name(rank)
        with closing(opened(path)) as file:
            envelope = data_bytes(file, path, self._save_id)
            content = memoryview(bytearray(envelope.end))
            envelope.read_into(0, content)
        return _Source(self._folder, path.name, content, self._places)


class _Segment(NamedTuple):
    """Range of an image, and where its bytes are; ``name`` is that of a data file."""

    start: int
    stop: int
    name: str | None
    offset: int


class _Source:
    """Source of an image whose bytes are in an envelope, and in data files."""

    threads = 8

    def __init__(
        self,
        folder: Place,
        name: str,
        content: memoryview,
        places: Mapping[MetadataIndex, StorageInfo],
    ) -> None:
        self._folder = folder
        self._content = content
        self._files: dict[str, OpenedFile] = {}
        self._lock = threading.Lock()
        try:
            self.nbytes, self._segments = _segments(content, places)
        except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
            raise CorruptShardError(f"{folder / name} cannot be read: {error!r}") from error
        self._starts = [segment.start for segment in self._segments]

    def read(self, start: int, stop: int) -> memoryview:
        view = memoryview(bytearray(stop - start))
        self._fill(start, view)
        return view

    def read_into(self, start: int, parts: Sequence[memoryview]) -> None:
        for part in parts:
            self._fill(start, part)
            start += len(part)

    def close(self) -> None:
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()

    def _fill(self, start: int, memory: memoryview) -> None:
        number, done = bisect_right(self._starts, start) - 1, 0
        while done < len(memory):
            if not 0 <= number < len(self._segments):
                raise CorruptShardError(f"an image in {self._folder} ends at byte {self.nbytes}")
            segment = self._segments[number]
            at = start + done - segment.start
            part = memory[done : done + min(len(memory) - done, segment.stop - segment.start - at)]
            offset = segment.offset + at
            if segment.name is None:
                part[:] = self._content[offset : offset + len(part)]
            else:
                with storage_errors("read", self._folder / segment.name):
                    self._file(segment.name).fill(offset, part)
            done += len(part)
            number += 1

    def _file(self, name: str) -> OpenedFile:
        with self._lock:
            if name not in self._files:
                self._files[name] = opened(self._folder / name)
            return self._files[name]


def _segments(
    content: memoryview, places: Mapping[MetadataIndex, StorageInfo]
) -> tuple[int, list[_Segment]]:
    """Parse an envelope: the size of the image, and all of its ranges in order."""
    length = int.from_bytes(content[:8], "little")
    nbytes, rows = json.loads(bytes(content[8 : 8 + length]))
    segments: list[_Segment] = []
    end, rest = 0, 8 + length
    for start, stop, fqn, offsets, skipped in rows:
        index = MetadataIndex(fqn, None if offsets is None else torch.Size(offsets))
        info = places[index]
        if not end <= start < stop <= nbytes or not 0 <= skipped <= info.length - (stop - start):
            raise ValueError(f"a range {start}:{stop} of {fqn}")
        if Path(info.relative_path).name != info.relative_path:
            raise ValueError(f"a file {info.relative_path}")
        if end < start:
            segments.append(_Segment(end, start, None, rest))
        segments.append(_Segment(start, stop, info.relative_path, info.offset + skipped))
        end, rest = stop, rest + start - end
    segments.append(_Segment(end, nbytes, None, rest))
    rest += nbytes - end
    if rest > len(content):
        raise ValueError(f"{rest} bytes of {len(content)}")
    return nbytes, segments
