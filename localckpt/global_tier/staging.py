"""Items of a save: their values as ``torch.save`` writes them, layout in files, and buffers.

With the frame of a tensor known, saving it is a copy of its values between two short runs of bytes.
Objects are loaded without running other code, and what could not be loaded so is not saved.
"""

from __future__ import annotations

import io
import math
import pickle
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeGuard

import torch
import xxhash
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from localckpt.errors import CheckpointingException, StorageError, UnsafeGlobalError
from localckpt.global_tier.data_files import covered_nbytes, file_nbytes, write_data_file
from localckpt.global_tier.metadata import DATA_SUFFIX, StorageInfo
from localckpt.global_tier.objects import Retries
from localckpt.global_tier.places import Place
from localckpt.memory.copying import BlockCopies, Copier
from localckpt.memory.gpu_copies import CopiesUnderWay, SideStreams, copy_to_host
from localckpt.memory.host_memory import PAGE_NBYTES, round_up
from localckpt.memory.tensor_bytes import is_flat
from localckpt.storage.buffers import Buffer, BufferPool, PrivateBuffer
from localckpt.storage.failures import storage_errors

FILE_NBYTES = 256 << 20
"""Bytes of tensors after which a file ends: what a drain that is cut off writes again at most."""

# Values of this size begin on a page: copies between memory that is not aligned alike take longer.
_PAGE_ALIGNED_NBYTES = 256 << 10
_ALIGNMENT = 64
# Whole digest blocks, hashed before they are written.
_PIECE_NBYTES = 16 << 20
# More than tensors of one model have shapes, and bounded, since files name shapes, too.
_FRAMES = 1 << 14
# torch keeps what may be named in a list of the process.
_ALLOWING = threading.Lock()
# What torch says of such an integer.
_LONG_INTEGER = f"Unsupported operand {pickle.LONG4[0]}"
# Values that tell by their text whether they changed, and that every reader takes.
_SIMPLE = (int, float, bool, str, type(None))
# Readers take no integers of more bytes.
_INTEGER_BITS = 8 * 255 - 1


class ItemReader:
    """Values of the items of one save after the other, as a planner gives them."""

    def __init__(self, safe_globals: Iterable[Any] = ()) -> None:
        self._safe_globals = tuple(safe_globals)
        self._simple: dict[str, tuple[str, memoryview]] = {}
        self._checked: set[int] = set()
        self._checked_kinds: set[tuple[type, torch.dtype]] = set()

    def read(self, item: WriteItem, planner: SavePlanner) -> torch.Tensor | memoryview:
        """An item's values: a plain tensor of the item's dtype and shape, or a run of bytes."""
        if item.type == WriteItemType.BYTE_IO:
            return self._read_object(item, planner)
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, torch.Tensor), "a planner gives tensors for items that are"
        if tensor.layout is not torch.strided:
            raise CheckpointingException(
                f"{item.index.fqn} is a {tensor.layout} tensor, whose parts cannot be loaded: "
                f"save tensor.to_dense(), or its indices and values"
            )
        if tensor.is_quantized:
            raise CheckpointingException(
                f"{item.index.fqn} is quantized, and its parts cannot be loaded: save "
                f"tensor.dequantize(), or tensor.int_repr() and its scale"
            )
        tensor = tensor.detach()
        data = item.tensor_data
        assert data is not None
        if is_plain(tensor, data.properties.dtype, data.chunk.sizes):
            return tensor
        stream = io.BytesIO()
        torch.save(tensor.cpu(), stream)
        kind = type(tensor), tensor.dtype
        if kind not in self._checked_kinds:
            require_loadable(item.index.fqn, stream, self._safe_globals)
            self._checked_kinds.add(kind)
        return memoryview(stream.getvalue())

    def _read_object(self, item: WriteItem, planner: SavePlanner) -> memoryview:
        # What a planner of the user's makes of an object is known only when it is made, and is no
        # more than bytes to us.
        if not _looks_up(planner):
            return _made(item, planner)
        name, value = item.index.fqn, planner.lookup_object(item.index)
        if type(value) in _SIMPLE and not (
            type(value) is int and value.bit_length() > _INTEGER_BITS
        ):
            text = f"{type(value).__name__} {value!r}"
            if self._simple.get(name, ("",))[0] != text:
                self._simple[name] = text, _made(item, planner)
            return self._simple[name][1]
        data = _made(item, planner)
        digest = xxhash.xxh3_64_intdigest(data)
        if digest not in self._checked:
            require_loadable(name, io.BytesIO(data), self._safe_globals)
            self._checked.add(digest)
        return data


def _made(item: WriteItem, planner: SavePlanner) -> memoryview:
    stream = planner.resolve_data(item)
    assert isinstance(stream, io.BytesIO), "a planner gives bytes for items that are"
    # Python 3.13 complains on stderr of a stream that is collected with its ``getbuffer``.
    return memoryview(stream.getvalue())


def _looks_up(planner: SavePlanner) -> TypeGuard[DefaultSavePlanner]:
    """Return whether the planner saves the objects that it finds, and nothing made of them."""
    if not isinstance(planner, DefaultSavePlanner):
        return False
    kind = type(planner)
    return (
        kind.resolve_data is DefaultSavePlanner.resolve_data
        and kind.transform_object is DefaultSavePlanner.transform_object
    )


class Frame(NamedTuple):
    """Bytes around the values of a contiguous tensor in host memory."""

    head: bytes
    tail: bytes


@lru_cache(_FRAMES)
def frame_of(dtype: torch.dtype, shape: torch.Size) -> Frame:
    """The frame of any tensor of this dtype and shape, as torch itself writes it."""
    recorder = _Recorder()
    with torch.serialization.skip_data():
        torch.save(torch.empty(shape, dtype=dtype), recorder)  # type: ignore[arg-type]
    return Frame(*(bytes(part) for part in recorder.parts))


def is_plain(tensor: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> bool:
    """Return whether a tensor is nothing but its values, one after the other."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_meta
        and tensor.dtype is dtype
        and tensor.shape == torch.Size(shape)
    )


class _Recorder(io.RawIOBase):
    """Recorder of what is written before and after the values, over which torch seeks."""

    def __init__(self) -> None:
        self.parts = (bytearray(), bytearray())
        self._part = self.parts[0]
        self._position = 0

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._part += data
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence != io.SEEK_CUR or self._part is self.parts[1]:
            raise io.UnsupportedOperation("torch.save seeks once, over the values of the tensor")
        self._part = self.parts[1]
        self._position += offset
        return self._position

    def tell(self) -> int:
        return self._position


def load_object(name: str, stream: io.BytesIO, safe_globals: Sequence[Any]) -> Any:
    """Load what ``torch.save`` wrote."""
    try:
        stream.seek(0)
        with _allowing(safe_globals):
            if unsafe := torch.serialization.get_unsafe_globals_in_checkpoint(stream):
                raise UnsafeGlobalError(
                    f"{name} refers to {', '.join(sorted(unsafe))}, which may not be loaded from a "
                    f"file. If you trust it, pass safe_globals=[...] or call "
                    f"torch.serialization.add_safe_globals([...]), when saving and when loading"
                )
            stream.seek(0)
            return torch.load(stream, map_location="cpu", weights_only=True)
    except CheckpointingException:
        raise
    except Exception as error:
        # A class that is allowed may raise anything.
        raise CheckpointingException(
            f"{name} cannot be loaded from a file: {_reason(error)}"
        ) from error


def require_loadable(name: str, stream: io.BytesIO, safe_globals: Sequence[Any]) -> None:
    """Refuse to save what :func:`load_object` refuses to load; by loading it."""
    try:
        load_object(name, stream, safe_globals)
    except UnsafeGlobalError:
        raise
    except CheckpointingException as error:
        raise CheckpointingException(
            f"{error}. So it is not saved: save plain lists, dicts, numbers and text in its place, "
            f"or have it hold state_dict() and load_state_dict()"
        ) from error


@contextmanager
def _allowing(safe_globals: Sequence[Any]) -> Iterator[None]:
    """Have torch take these, too. Those that the program has allowed itself stay allowed."""
    if not safe_globals:
        yield
        return
    with _ALLOWING:
        known = torch.serialization.get_safe_globals()
        with torch.serialization.safe_globals([g for g in safe_globals if g not in known]):
            yield


def _reason(error: Exception) -> str:
    """Text of an error, without torch's advice to load without checks."""
    text = str(error).rpartition("WeightsUnpickler error:")[2].strip().partition("\n")[0]
    if text == _LONG_INTEGER:
        return "it holds an integer of more than 255 bytes"
    return f"{type(error).__name__}: {text}"


class FileSlot(NamedTuple):
    """One tensor in a file."""

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
    """One file of a rank: tensors, and from ``nbytes`` on the ``others``, of no known sizes."""

    name: str
    slots: tuple[FileSlot, ...]
    others: tuple[int, ...]
    nbytes: int

    def results(self, plan: SavePlan, contents: Mapping[int, memoryview]) -> Iterator[WriteResult]:
        """Yield the place of each item, given the bytes of the others."""
        places = [(slot.number, slot.offset, slot.end - slot.offset) for slot in self.slots]
        end = self.nbytes
        for number in self.others:
            places.append((number, end, len(contents[number])))
            end += len(contents[number])
        for number, offset, nbytes in places:
            info = StorageInfo(self.name, offset, nbytes)
            yield WriteResult(plan.items[number].index, nbytes, info)


def lay_out_files(
    plan: SavePlan,
    others: Set[int],
    *,
    prefix: str,
    bins: int,
    separation_hint: str | None = None,
) -> tuple[FileLayout, ...]:
    """Divide a rank's items among files; ``others`` are those that are saved as a run of bytes."""
    if separation_hint is not None and (not separation_hint or "/" in separation_hint):
        raise CheckpointingException(
            f"separation_hint is {separation_hint!r}; it begins the names of files, so it must "
            f"be neither empty nor hold a '/'"
        )
    numbers = {id(item): number for number, item in enumerate(plan.items)}
    hint = separation_hint or ""
    groups: dict[str, list[WriteItem]] = {"": []}
    for item in plan.items:
        group = hint if item.index.fqn.startswith(hint) else ""
        groups.setdefault(group, []).append(item)
    files: list[FileLayout] = []
    for group, items in groups.items():
        for bucket in split_by_size_and_type(bins, items):
            if bucket:
                name = f"{group}{prefix}{len(files)}{DATA_SUFFIX}"
                files.append(_placed(name, plan, [numbers[id(item)] for item in bucket], others))
    return tuple(files)


def split_by_size_and_type(bins: int, items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    """Divide items into bins of about equal bytes, as torch does, by the sizes of their parts."""
    others = [item for item in items if item.type == WriteItemType.BYTE_IO]
    buckets = [others[i::bins] for i in range(bins)]
    tensors = [item for item in items if item.type != WriteItemType.BYTE_IO]
    sizes = [0] * bins
    for item in sorted(tensors, key=item_nbytes, reverse=True):
        smallest = sizes.index(min(sizes))
        buckets[smallest].append(item)
        sizes[smallest] += item_nbytes(item)
    return buckets


def lay_out_in_order(plan: SavePlan, starts: Mapping[int, int], prefix: str) -> list[FileLayout]:
    """Divide a rank's items among files, in the order in which their values lie in its image.

    ``starts`` has the first byte in the image of each tensor. The others have a file of their own.
    """
    buckets: list[list[int]] = []
    nbytes = 0
    for number in sorted(starts, key=lambda number: (starts[number], number)):
        nbytes += item_nbytes(plan.items[number])
        if not buckets or nbytes > FILE_NBYTES:
            buckets.append([])
            nbytes = item_nbytes(plan.items[number])
        buckets[-1].append(number)
    others = [number for number in range(len(plan.items)) if number not in starts]
    buckets += [others] if others else []
    return [
        _placed(f"{prefix}{n}{DATA_SUFFIX}", plan, bucket, {*others})
        for n, bucket in enumerate(buckets)
    ]


def item_nbytes(item: WriteItem) -> int:
    """Bytes of the part of a tensor that an item is."""
    data = item.tensor_data
    assert data is not None, "only tensors have a size before they are saved"
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def _placed(name: str, plan: SavePlan, bucket: Sequence[int], others: Set[int]) -> FileLayout:
    """Place the items of some numbers in a file, in their order."""
    slots: list[FileSlot] = []
    end = 0
    for number in bucket:
        data = plan.items[number].tensor_data
        if number in others or data is None:
            continue
        frame = frame_of(data.properties.dtype, data.chunk.sizes)
        nbytes = item_nbytes(plan.items[number])
        alignment = PAGE_NBYTES if nbytes >= _PAGE_ALIGNED_NBYTES else _ALIGNMENT
        begin = round_up(end + len(frame.head), alignment)
        slots.append(FileSlot(number, begin - len(frame.head), begin, nbytes, frame))
        end = slots[-1].end
    last = tuple(number for number in bucket if number in others)
    return FileLayout(name, tuple(slots), last, end)


@dataclass(eq=False)
class StagedFiles:
    """Items that one rank writes in one save: tensors until they are staged, and other contents.

    In ``folder`` their names have a ``mark`` that those of the layout lack.
    """

    plan: SavePlan
    files: tuple[FileLayout, ...]
    tensors: dict[int, torch.Tensor]
    contents: dict[int, memoryview]
    folder: Place
    save_id: str
    mark: str
    sync: bool
    buffer: Buffer | None = None

    @property
    def nbytes(self) -> int:
        return sum(file_nbytes(stop - start) for start, stop in self.ranges())

    def ranges(self) -> list[tuple[int, int]]:
        """Where each file's content lies in a buffer, from a page on."""
        ranges, start = [], 0
        for file in self.files:
            others = sum(len(self.contents[number]) for number in file.others)
            stop = start + covered_nbytes(file.nbytes + others)
            ranges.append((start, stop))
            start = round_up(stop, PAGE_NBYTES)
        return ranges

    def results(self) -> list[WriteResult]:
        return [place for file in self.files for place in file.results(self.plan, self.contents)]

    def write(self, retries: Retries) -> None:
        """Write all files side by side, in place of what is there, and give the buffer back."""
        assert self.buffer is not None, "it is staged"
        try:
            Copier(len(self.files)).share(
                [*zip(self.files, self.ranges(), strict=True)], partial(self._write, retries)
            )
            if self.sync:
                with storage_errors("make durable", self.folder):
                    self.folder.sync()
        finally:
            self.buffer.give_back()

    def _write(self, retries: Retries, files: Iterator[tuple[FileLayout, tuple[int, int]]]) -> None:
        for file, within in files:
            path = self.folder / marked(file.name, self.mark)
            pieces = partial(self._pieces, path, *within)
            write_data_file(path, self.save_id, pieces, retries, sync=self.sync)

    def _pieces(self, path: Place, start: int, stop: int) -> Iterator[memoryview]:
        assert self.buffer is not None, "it is staged"
        # This view keeps the memory mapped if the save is given up meanwhile.
        view = self.buffer.view[start:stop]
        if len(view) < stop - start:
            raise StorageError(f"{path} is not written: its save was given up")
        for at in range(0, len(view), _PIECE_NBYTES):
            yield view[at : at + _PIECE_NBYTES]


def marked(name: str, mark: str) -> str:
    """Return the name of a data file with a mark, such as that of its save."""
    return f"{name.removesuffix(DATA_SUFFIX)}{mark}{DATA_SUFFIX}"


class Staging:
    """Staging buffer of one writer, and the threads that copy."""

    def __init__(self, threads: int | None, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._copier = Copier(threads)
        self._streams = SideStreams(timeout_s)
        # One at a time: saves to shared storage are far between.
        self._pool = BufferPool(PrivateBuffer, depth=1)
        self._stuck: list[tuple[Buffer, CopiesUnderWay]] = []

    def stage(self, data: StagedFiles) -> None:
        """Copy all values to their places in a buffer, which :meth:`release` may take back."""
        ranges = data.ranges()
        buffer = self._pool.take("files", ranges[-1][1], self._timeout_s, owner=data)
        try:
            self._fill(buffer, data, ranges)
        except BaseException:
            buffer.give_back()
            raise
        # The values are those of the call: nothing of the state is kept.
        data.tensors, data.buffer = {}, buffer

    def _fill(self, buffer: Buffer, data: StagedFiles, ranges: Sequence[tuple[int, int]]) -> None:
        view = buffer.view
        runs: dict[tuple[int, int], int] = {}
        from_gpus: list[tuple[memoryview, torch.Tensor]] = []
        for file, (first, stop) in zip(data.files, ranges, strict=True):
            for slot in file.slots:
                begin = first + slot.data
                end = begin + slot.nbytes
                view[begin - len(slot.frame.head) : begin] = slot.frame.head
                view[end : end + len(slot.frame.tail)] = slot.frame.tail
                tensor = data.tensors[slot.number]
                if not slot.nbytes:
                    continue
                if not tensor.is_cpu:
                    from_gpus.append((view[begin:end], tensor))
                elif is_flat(tensor):
                    runs[begin, slot.nbytes] = tensor.data_ptr()
                else:
                    copy_to_host(view[begin:end], tensor)
            at = first + file.nbytes
            for content in (data.contents[number] for number in file.others):
                view[at : at + len(content)] = content
                at += len(content)
            view[at:stop] = bytes(stop - at)
        if from_gpus:
            buffer.pin(from_gpus[0][1].device)
        under_way = self._streams.queue(from_gpus)
        try:
            BlockCopies(runs).copy(view, 0, [*runs.values()], self._copier, keep=data.tensors)
        finally:
            try:
                under_way.wait()
            except BaseException:
                # A GPU may still write to it, whenever that may be: nobody else gets this memory.
                self._pool.forget(buffer)
                self._stuck.append((buffer, under_way))
                raise

    def release(self, data: StagedFiles) -> None:
        """Take out a buffer that nobody is going to give back."""
        self._copier.stop()
        self._pool.release(data)

    def close(self) -> None:
        """Free the buffers. May be called twice."""
        self._copier.stop()
        self._pool.close()
