"""Saved shard that is opened for parts of its tensors, and for the values beside them."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import xxhash

from localckpt.errors import CorruptShardError
from localckpt.ids import ShardIdentity
from localckpt.state_dict.boxes import Box
from localckpt.state_dict.direct_runs import DirectRun, RunTarget, find_run
from localckpt.state_dict.placed_runs import PlacedRuns
from localckpt.state_dict.regions import Cut, Region, cuts_of, flat_rectangles, whole
from localckpt.state_dict.restore import ImageReader
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.skeleton import collection_paused
from localckpt.state_dict.source import PIECE_NBYTES, ShardSource
from localckpt.state_dict.tensor_table import ARRAY, TableEntry
from localckpt.state_dict.value_digests import digest_of
from localckpt.state_dict.values import (
    Placeholder,
    Unit,
    read_tree,
    root_of,
    units_of,
    with_tensors,
)

__all__ = ["Deliver", "Direct", "SavedShard", "SavedTensor", "integer_view"]

Deliver = Callable[[Any, int, Cut, torch.Tensor], None]
"""``deliver(receiver, number, cut, values)``: takes a part of a tensor. The values are valid until
it returns; it is called by several threads."""

Direct = Callable[[Any], RunTarget | None]
"""``direct(receiver)``: the tensor that a part may be read straight into; ``None`` if that may not
be."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def integer_view(flat: torch.Tensor, itemsize: int, shape: Sequence[int]) -> torch.Tensor:
    """View bytes as items of a size, whatever their dtype."""
    return flat.view(_INTEGERS.get(itemsize, torch.complex128)).view(tuple(shape))


@dataclass(frozen=True)
class SavedTensor:
    """Tensor of a shard, as a part of a global tensor.

    Attributes:
        number: Number of the tensor in the image.
        key: Key of the global tensor.
        shape: Shape of the global tensor.
        region: Elements of it that the tensor has.
        is_private: Whether the table of boxes does not have the tensor: it is whole by itself.
        entry: Entry in the table of tensors.
        start: Offset of its first item in the image.
    """

    number: int
    key: str
    shape: tuple[int, ...]
    region: Region
    is_private: bool
    entry: TableEntry
    start: int

    @property
    def itemsize(self) -> int:
        """Bytes of an item."""
        return self.entry.torch_dtype().itemsize

    @cached_property
    def local(self) -> tuple[int, ...]:
        """Shape of the tensor, with as many dimensions as the global one."""
        shape = self.entry.shape
        return (1,) * (len(self.region) - len(shape)) + shape

    @cached_property
    def order(self) -> tuple[int, ...] | None:
        """Dimensions in the order of memory; ``None`` if its items are not one run of bytes."""
        dims = tuple(range(len(self.local)))
        if self.start % self.itemsize:
            return None
        if self.entry.view is None:
            return dims
        extra = len(self.local) - len(self.entry.shape)
        strides = (math.inf,) * extra + self.entry.view[1]
        order = tuple(sorted(dims, key=lambda dim: -strides[dim]))
        step = 1
        for dim in reversed(order):
            if self.local[dim] > 1:
                if strides[dim] != step:
                    return None
                step *= self.local[dim]
        return order


class _Part(NamedTuple):
    """Part of a tensor that a receiver wants."""

    receiver: Any
    region: Region


class SavedShard:
    """Shard that is opened for its parts.

    Args:
        source: Source of the image; closed by :meth:`close`.
        allowed: Allow-list for the classes in the shard.
        identity: Identity that the image must have.
        rules: Key prefixes of values that the caller has a rule for.

    Attributes:
        tensors: Tensors by their number, but for those that are values or parts of values.
        ruled, others: Values; see :func:`units_of`.

    Raises:
        CorruptShardError: The image is damaged, belongs to another shard, or contradicts itself.
        RestoreError: The values cannot be made.
    """

    @collection_paused()
    def __init__(
        self,
        source: ShardSource,
        allowed: SafeGlobals,
        identity: ShardIdentity,
        rules: Sequence[str],
    ) -> None:
        self.identity = identity
        self._source = source
        self._reader = ImageReader(source, allowed, identity)
        skeleton = self._reader.checked_skeleton()
        self._entries, boxes, self._divided = self._reader.tables
        root = root_of(read_tree(skeleton, allowed, self._value_tensor(boxes)))
        ruled, others = units_of(root, boxes.__contains__, rules)
        self.ruled, self.others = ruled, others
        self.tensors: dict[int, SavedTensor] = {}
        taken: set[tuple[str, Region]] = set()
        for number, box in boxes.items():
            # Of equal parts of one tensor, such as tied weights, any will do.
            if (box.key, box.runs) not in taken:
                taken.add((box.key, box.runs))
                self._add(number, box.key, box.shape, self._region(number, box), is_private=False)
        below = (part for unit in ruled for part in _parts_of(unit))
        for unit in (*others, *below):
            if isinstance(unit.value, Placeholder):
                for number, key in self._keys(unit):
                    shape = self._entries[number].shape
                    self._add(number, key, shape, whole(shape), is_private=True)

    @property
    def nbytes(self) -> int:
        """Size of the image in bytes."""
        return self._source.nbytes

    def close(self) -> None:
        """Close the source."""
        self._source.close()

    @staticmethod
    def values(units: Iterable[Unit]) -> list[Unit]:
        """Return what is no tensor of some values: the largest parts of them that hold none."""
        parts = (part for unit in units for part in _parts_of(unit))
        return [part for part in parts if not isinstance(part.value, Placeholder)]

    def whole_values(self, units: Iterable[Unit]) -> list[Unit]:
        """Return values with their tensors in them, read into host memory."""
        return [Unit(place, with_tensors(value, self.tensor_of)) for place, value in units]

    @cached_property
    def digests(self) -> dict[str, str]:
        """Digests of the values and private tensors that no rule is for, by their keys."""
        return {unit.key: digest_of(unit.value, self._digest) for unit in self.others}

    @cached_property
    def ruled_digests(self) -> dict[str, str]:
        """Digests of the values that a rule is for, by their keys."""
        return {unit.key: digest_of(unit.value, self._digest) for unit in self.ruled}

    def tensor_of(self, number: int) -> torch.Tensor:
        """Read a tensor, contiguous, into host memory."""
        entry = self._entries[number]
        if entry.slot is None:
            return torch.empty(entry.shape, dtype=entry.torch_dtype(), device="meta")
        if not entry.reach_nbytes():
            return torch.empty(entry.shape, dtype=entry.torch_dtype())
        return self._as_stored(entry).contiguous()

    def stream(
        self,
        wanted: Mapping[int, Iterable[tuple[Any, Region]]],
        deliver: Deliver,
        direct: Direct = lambda _: None,
    ) -> None:
        """Read parts of tensors, and only the pieces of the image that hold them.

        Args:
            wanted: By the number of a tensor, who wants which elements of the global tensor.
            deliver: Takes each part, in cuts of at most a piece.
            direct: Returns the memory that a receiver's part may be read straight into.

        Raises:
            CorruptShardError: A block is damaged.
            StorageError: The medium failed.
        """
        regular: list[tuple[SavedTensor, list[_Part]]] = []
        for number, parts in wanted.items():
            tensor, those = self.tensors[number], [_Part(*part) for part in parts]
            if not math.prod(tensor.local):
                continue
            if tensor.order is None:
                self._deliver_irregular(tensor, those, deliver)
            else:
                regular.append((tensor, those))
        regular.sort(key=lambda pair: pair[0].start)
        by_piece: dict[int, list[tuple[SavedTensor, list[_Part]]]] = {}
        users = Counter(tensor.entry.slot for tensor, _ in regular)
        found: list[DirectRun] = []
        for tensor, those in regular:
            if users[tensor.entry.slot] == 1:
                runs, those = _split_runs(tensor, those, direct)
                found += runs
                for run in runs:
                    for start in range(_piece_of(run.start), run.stop, PIECE_NBYTES):
                        by_piece.setdefault(start, [])
            stop = tensor.start + math.prod(tensor.local) * tensor.itemsize
            for start in self._pieces(tensor, those, stop):
                by_piece.setdefault(start, []).append((tensor, those))
        direct_runs = PlacedRuns(found)
        of_thread = threading.local()

        def places(start: int, stop: int) -> list[memoryview]:
            if not hasattr(of_thread, "buffer"):
                of_thread.buffer = memoryview(bytearray(PIECE_NBYTES))
            of_thread.nbytes = stop - start
            return direct_runs.places(start, stop, lambda: of_thread.buffer)

        def filled(start: int, _: list[memoryview]) -> None:
            data = torch.frombuffer(of_thread.buffer[: of_thread.nbytes], dtype=torch.uint8)
            for tensor, those in by_piece[start]:
                _deliver_from(tensor, those, start, data, deliver)
            stop = start + of_thread.nbytes
            for run in direct_runs.overlapping(start, stop):
                run.note_filled(start, stop)

        self._reader.parts.stream(places, filled, sorted(by_piece))

    def _pieces(self, tensor: SavedTensor, parts: Sequence[_Part], stop: int) -> list[int]:
        """Starts of the pieces of the image that hold parts of a tensor."""
        starts = range(_piece_of(tensor.start), stop, PIECE_NBYTES)
        if not parts or len(starts) == 1:
            return list(starts) if parts else []
        wanted = []
        for start in starts:
            begin, end = max(start, tensor.start), min(start + PIECE_NBYTES, stop)
            cuts = (c for part in parts for c in _cuts_between(tensor, part, begin, end))
            if next(cuts, None) is not None:
                wanted.append(start)
        return wanted

    def _deliver_irregular(
        self, tensor: SavedTensor, parts: Sequence[_Part], deliver: Deliver
    ) -> None:
        """Deliver parts of a tensor that is not one run of bytes, as of overlapping views."""
        stored = self._as_stored(tensor.entry)
        items = stored.view(_INTEGERS.get(tensor.itemsize, stored.dtype)).reshape(tensor.local)
        rows = max(1, PIECE_NBYTES // max(1, items[:1].numel() * tensor.itemsize))
        rows = rows if items.dim() else 1
        for receiver, part in parts:
            for begin in range(0, items.shape[0] if items.dim() else 1, rows):
                starts = (begin, *(0 for _ in tensor.local[1:])) if items.dim() else ()
                sizes = (
                    (min(rows, items.shape[0] - begin), *tensor.local[1:]) if items.dim() else ()
                )
                for cut in cuts_of(tensor.region, part, starts, sizes):
                    deliver(receiver, tensor.number, cut, narrowed(items, cut.local, cut.sizes))

    def _as_stored(self, entry: TableEntry) -> torch.Tensor:
        assert entry.slot is not None, "a tensor without data is not read"
        slot = self._reader.header.slots[entry.slot]
        offset, strides = entry.view or (0, None)
        start = self._reader.header.data_start + slot.offset
        data = self._reader.parts.read(start + offset, start + entry.reach_nbytes())
        dtype = entry.torch_dtype()
        flat = torch.frombuffer(data, dtype=torch.uint8).view(dtype)
        if strides is None:
            return flat.view(entry.shape)
        return flat.as_strided(entry.shape, strides)

    def _value_tensor(self, boxes: Mapping[int, Any]) -> Callable[[int], torch.Tensor | None]:
        """Give tensors that are in no container: arrays, and those in objects."""

        def tensor(number: int) -> torch.Tensor | None:
            entry = self._entries[number]
            is_unnamed = entry.slot is not None and entry.slot.startswith("tensor.")
            if entry.kind != ARRAY and (not is_unnamed or number in boxes):
                return None
            return self.tensor_of(number)

        return tensor

    def _keys(self, unit: Unit) -> list[tuple[int, str]]:
        """Numbers and keys of the tensors of a unit that is made of tensors."""
        numbers = unit.value.numbers
        if len(numbers) == 1:
            return [(numbers[0], unit.key)]
        named = []
        for number in numbers:
            slot = self._entries[number].slot or ""
            named.append((number, slot if slot.startswith(f"{unit.key}.") else f"{unit.key}.?"))
        return named

    def _region(self, number: int, box: Box) -> Region:
        """Elements of a global tensor that the image holds of a tensor."""
        entry = self._entries[number]
        part = self._divided.get(entry.slot or "")
        return box.runs if part is None else part.region(box, entry.shape)

    def _add(
        self, number: int, key: str, shape: tuple[int, ...], region: Region, *, is_private: bool
    ) -> None:
        entry = self._entries[number]
        if (slot := entry.slot) is None:
            return
        if (part := self._divided.get(slot)) is not None:
            if not part.count:
                return
            entry = part.entry(entry)
        offset = entry.view[0] if entry.view is not None else 0
        header = self._reader.header
        start = header.data_start + header.slots[slot].offset + offset
        if math.prod(shape) >= 1 << 62:
            raise CorruptShardError(f"{self.identity}: {key!r} would have {math.prod(shape)} items")
        self.tensors[number] = SavedTensor(number, key, shape, region, is_private, entry, start)

    def _digest(self, placeholder: Placeholder) -> str:
        hasher = xxhash.xxh3_64()
        for number in placeholder.numbers:
            entry = self._entries[number]
            hasher.update(f"{entry.dtype}{entry.shape}".encode())
            if entry.slot is not None and entry.reach_nbytes():
                run = self.tensor_of(number).reshape(-1).view(torch.uint8)
                hasher.update(run.numpy().tobytes())
        return hasher.hexdigest()


def _parts_of(unit: Unit) -> list[Unit]:
    """Divide a value into tensors and the largest parts that hold none."""
    _, parts = units_of(unit.value, lambda _: False, ())
    return [Unit((*unit.place, *part.place), part.value) for part in parts]


def narrowed(tensor: torch.Tensor, starts: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """View a rectangle of a tensor."""
    for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, size)
    return tensor


def _piece_of(offset: int) -> int:
    """Return the start of the piece of an image that holds a byte."""
    return offset // PIECE_NBYTES * PIECE_NBYTES


def _split_runs(
    tensor: SavedTensor, parts: Sequence[_Part], direct: Direct
) -> tuple[list[DirectRun], list[_Part]]:
    """Divide parts into those that are read straight into memory, and the others."""
    if tensor.order != tuple(range(len(tensor.local))) or not tensor.local:
        return [], list(parts)
    row_nbytes = math.prod(tensor.local[1:]) * tensor.itemsize
    regions = [part.region for part in parts]
    runs, others = [], []
    for number, part in enumerate(parts):
        found = None
        if (target := direct(part.receiver)) is not None:
            found = find_run(tensor.region, regions, number, target, tensor.start, row_nbytes)
        if target is None or found is None:
            others.append(part)
        else:
            runs.append(DirectRun(*found, target.filled))
    return runs, others


def _permuted(values: Sequence[Any], order: Sequence[int]) -> tuple[Any, ...]:
    return tuple(values[dim] for dim in order)


def _cuts_between(tensor: SavedTensor, part: _Part, begin: int, end: int) -> Iterable[Cut]:
    """Cuts of a part among the items of a tensor that lie in some bytes; dimensions in order."""
    order = tensor.order or ()
    shape = _permuted(tensor.local, order)
    region, wanted = _permuted(tensor.region, order), _permuted(part.region, order)
    first = (begin - tensor.start) // tensor.itemsize
    last = (end - tensor.start) // tensor.itemsize
    for starts, sizes in flat_rectangles(shape, first, last):
        yield from cuts_of(region, wanted, starts, sizes)


def _deliver_from(
    tensor: SavedTensor,
    parts: Sequence[_Part],
    start: int,
    data: torch.Tensor,
    deliver: Deliver,
) -> None:
    """Deliver the parts of a tensor that are in a piece of the image."""
    order = tensor.order
    assert order is not None, "its items are one run"
    itemsize, shape = tensor.itemsize, _permuted(tensor.local, order)
    stop = tensor.start + math.prod(shape) * itemsize
    begin, end = max(start, tensor.start), min(start + len(data), stop)
    region = _permuted(tensor.region, order)
    wanted = [(receiver, _permuted(part, order)) for receiver, part in parts]
    back = tuple(order.index(dim) for dim in range(len(order)))
    at = begin - start
    first, last = (begin - tensor.start) // itemsize, (end - tensor.start) // itemsize
    for starts, sizes in flat_rectangles(shape, first, last):
        nbytes = math.prod(sizes) * itemsize
        items = integer_view(data[at : at + nbytes], itemsize, sizes)
        at += nbytes
        for receiver, part in wanted:
            for cut in cuts_of(region, part, starts, sizes):
                inside = [a - b for a, b in zip(cut.local, starts, strict=True)]
                values = narrowed(items, inside, cut.sizes).permute(back)
                natural = Cut(*(_permuted(numbers, back) for numbers in cut))
                deliver(receiver, tensor.number, natural, values)
