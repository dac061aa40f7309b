"""Saved shard that is opened for parts of its tensors, and for the values beside them."""

from __future__ import annotations

import math
from collections.abc import (
    Collection,
    Container,
    Iterable,
    Iterator,
    Sequence,
)
from dataclasses import dataclass
from functools import cached_property, partial

import torch
import xxhash

from localckpt.errors import CorruptShardError, MismatchError
from localckpt.ids import ShardIdentity
from localckpt.memory.host_memory import memory_at
from localckpt.memory.tensor_bytes import flat_bytes, integer_view
from localckpt.state_dict.boxes import Region, divided, rows_of, volume, whole
from localckpt.state_dict.names import Names, names_of
from localckpt.state_dict.resharded import (
    Target,
    copy_part,
    outlines_of,
    require_one,
    values_below,
)
from localckpt.state_dict.restore import ImageReader
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.skeleton import collection_paused
from localckpt.state_dict.source import ByteRange, ShardSource
from localckpt.state_dict.stateful import NO_FREEDOM, Freedom, TensorKind
from localckpt.state_dict.tensor_table import ARRAY, UNNAMED, TableEntry
from localckpt.state_dict.values import (
    Placeholder,
    Unit,
    digest_of,
    read_tree,
    root_of,
    units_of,
)

PRIVATE = "private"
"""Text for :attr:`SavedTensor.equal_on` of a tensor that the table of boxes does not have."""

# Parts that are copied are divided into parts of this size, and so many bytes are read at once.
_COPIED_NBYTES = 16 << 20
_WAITING_NBYTES = 64 << 20


@dataclass(frozen=True)
class SavedTensor:
    """Tensor of a shard, as a part of a global tensor.

    Attributes:
        equal_on: Text for the ranks whose tensors of this part are said to be equal.
        start: Offset of its first item in the image.
    """

    number: int
    key: str
    shape: tuple[int, ...]
    region: Region
    equal_on: str
    entry: TableEntry
    start: int

    @cached_property
    def itemsize(self) -> int:
        return self.entry.torch_dtype().itemsize

    @cached_property
    def nbytes(self) -> int:
        offset = 0 if self.entry.view is None else self.entry.view[0]
        return self.entry.reach_nbytes() - offset

    def span(self, first: int, count: int) -> tuple[int, int]:
        """Return first byte and end of some rows of a tensor that :attr:`is_in_order`."""
        row_nbytes = volume(self.region[1:]) * self.itemsize
        start = self.start + first * row_nbytes
        return start, start + count * row_nbytes

    @cached_property
    def is_in_order(self) -> bool:
        """True if its items are one run of the image's items, in the order of their indices."""
        return self.start % self.itemsize == 0 and self.entry.is_contiguous


class SavedShard(ImageReader):
    """Reader of a shard for its parts.

    Attributes:
        tensors: Tensors by number: those in the table of boxes, and private ones of read values.
        ruled, others: Values; see :func:`units_of`.
        outlines: Outlines of the free parts of the state.
        names: Names of the parts and values of the state, where it has names.
    """

    def __init__(
        self,
        source: ShardSource,
        allowed: SafeGlobals,
        identity: ShardIdentity,
        like: ImageReader | None = None,
    ) -> None:
        super().__init__(source, allowed, identity, like)
        self.ruled: list[Unit] = []
        self.others: list[Unit] = []
        self.outlines: list[Unit] = []
        self.names: Names | None = None
        self.tensors: dict[int, SavedTensor] = {}
        taken: set[tuple[str, Region]] = set()
        for number, box in self.tables.boxes.items():
            # Of equal parts of one tensor, such as tied weights, any will do.
            if (box.key, box.runs) not in taken:
                taken.add((box.key, box.runs))
                equal_on = "all" if box.ranks is None else box.ranks.text
                self._add(number, box.key, box.shape, box.runs, equal_on)

    @collection_paused()
    def read_values(self, rules: Collection[str], free: Freedom = NO_FREEDOM) -> None:
        """Read the values, and find the tensors that the table of boxes does not have.

        ``rules`` are key prefixes of values that the caller has a rule for. Values below names in
        ``free`` are loaded as they were saved.
        """
        boxes = self.tables.boxes
        skeleton, contents = self.checked_skeleton
        values = set(contents.composed)
        root = root_of(read_tree(skeleton, self.allowed, partial(self._value_tensor, values)))
        # What others are made of is there to be filled in strict parts only.
        if new := values_below(root, free, lambda n: self.entries[n].slot is None):
            values |= new
            root = root_of(read_tree(skeleton, self.allowed, partial(self._value_tensor, values)))
        self.ruled, self.others = units_of(root, boxes.__contains__, rules)
        self.names = names_of(root, free)
        self.outlines = outlines_of(root, free, rules, self._kind_of)
        below = (part for unit in self.ruled for part in _parts_of(unit))
        private: set[str] = set()
        for unit in (*self.others, *below):
            if isinstance(unit.value, Placeholder):
                for number in unit.value.numbers:
                    key = self.path_of(number, unit.key, unit.value)
                    # One tensor in two places has the path of the first, as everywhere.
                    if number in self.tensors:
                        continue
                    if len(unit.value.numbers) == 1:
                        require_one(key, private)
                    shape = self.entries[number].shape
                    # Its digest is compared with those of other shards, as values are.
                    self._add(number, key, shape, whole(shape), PRIVATE)

    def require_together(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Check that tensors which are given sharing memory were not saved apart."""
        if not (pairs := list(pairs)):
            return
        slots = {t.key: t.entry.slot for t in self.tensors.values() if volume(t.region)}
        for one, other in pairs:
            if one in slots and other in slots and slots[one] != slots[other]:
                raise MismatchError(
                    f"the state to load into differs from the saved one, and was left as it is: "
                    f"{one} and {other} were saved apart, and those given share memory. Give "
                    f"tensors with memory of their own"
                )

    def leave_out(self, keys: Collection[str]) -> None:
        """Forget the values below some top-level keys, before any is compared."""

        def wanted(units: list[Unit]) -> list[Unit]:
            return [unit for unit in units if str(next(iter(unit.place), "")) not in keys]

        self.ruled, self.others = wanted(self.ruled), wanted(self.others)

    @staticmethod
    def values(units: Iterable[Unit]) -> list[Unit]:
        """Return what is no tensor of some values: the largest parts of them that hold none."""
        parts = (part for unit in units for part in _parts_of(unit))
        return [part for part in parts if not isinstance(part.value, Placeholder)]

    @cached_property
    def digests(self) -> dict[str, str]:
        """Digests of the values and private tensors that no rule is for, by their keys."""
        return self._digests_of(self.others)

    @cached_property
    def ruled_digests(self) -> dict[str, str]:
        """Digests of the values that a rule is for, by their keys."""
        return self._digests_of(self.ruled)

    def tensor_of(self, number: int) -> torch.Tensor:
        tensor = self.tensor(number).detach()
        return tensor if tensor.is_meta else tensor.contiguous()

    def digest_of_part(self, number: int, region: Region) -> str:
        memory = memoryview(bytearray(volume(region) * self.tensors[number].itemsize))
        self.read_parts([(number, region, [self.target_in(memory, number, region)])])
        return xxhash.xxh3_64_hexdigest(memory)

    def target_in(self, memory: memoryview, number: int, region: Region) -> Target:
        """Return memory as what takes elements of a tensor, in their order."""
        sizes = [sum(count for _, count in runs) for runs in region]
        itemsize = self.tensors[number].itemsize
        flat = torch.frombuffer(memory[: math.prod(sizes) * itemsize], dtype=torch.uint8)
        return Target(integer_view(flat, itemsize).view(sizes), region)

    def read_parts(self, parts: Iterable[tuple[int, Region, Sequence[Target]]]) -> None:
        """Read parts of tensors, given by their numbers, and only the blocks that hold them.

        Rows of a tensor are read to where they belong; other parts are copied out of memory of
        their own, some parts at a time.
        """
        waiting: list[_Part] = []
        copied_nbytes = 0
        for number, whole_part, targets in parts:
            tensor = self.tensors[number]
            part = _Part(tensor, whole_part, targets)
            if part.memory is not None or not tensor.is_in_order:
                pieces = [part]
            else:
                regions = divided(whole_part, _COPIED_NBYTES // tensor.itemsize)
                pieces = [_Part(tensor, region, targets) for region in regions]
            for piece in pieces:
                waiting.append(piece)
                copied_nbytes += 0 if piece.memory is not None else piece.stop - piece.start
                if copied_nbytes >= _WAITING_NBYTES:
                    self._read(waiting)
                    waiting, copied_nbytes = [], 0
        self._read(waiting)

    def _read(self, parts: Sequence[_Part]) -> None:
        ranges: list[ByteRange] = []
        copies: list[tuple[_Part, torch.Tensor]] = []
        for sharing in _clusters(parts):
            start, stop = sharing[0].start, max(part.stop for part in sharing)
            if len(sharing) == 1 and (memory := sharing[0].memory) is not None:
                ranges.append(ByteRange(start, stop, memory))
                continue
            data = torch.empty(stop - start, dtype=torch.uint8)
            ranges.append(ByteRange(start, stop, memory_at(data.data_ptr(), stop - start)))
            copies += [(part, data[part.start - start : part.stop - start]) for part in sharing]
        self.read_ranges(ranges)
        for part, data in copies:
            part.copy(data)

    def _kind_of(self, number: int) -> TensorKind:
        entry, box = self.entries[number], self.tables.boxes.get(number)
        return entry.torch_dtype(), entry.shape if box is None else box.shape

    def _value_tensor(self, values: Container[int], number: int) -> torch.Tensor | None:
        """Give tensors that are in no container: arrays, those in objects, and parts of values."""
        entry = self.entries[number]
        is_unnamed = entry.slot is not None and entry.slot.startswith(UNNAMED)
        is_value = entry.kind == ARRAY or number in values
        if not is_value and (not is_unnamed or number in self.tables.boxes):
            return None
        return self.tensor_of(number)

    def _add(
        self, number: int, key: str, shape: tuple[int, ...], region: Region, equal_on: str
    ) -> None:
        entry = self.entries[number]
        if entry.slot is None or entry.slot in self.absent:
            return
        offset = entry.view[0] if entry.view is not None else 0
        start = self.start_of(number) + offset
        if math.prod(shape) >= 1 << 62:
            raise CorruptShardError(f"{self.identity}: {key!r} would have {math.prod(shape)} items")
        self.tensors[number] = SavedTensor(number, key, shape, region, equal_on, entry, start)

    def _digests_of(self, units: Sequence[Unit]) -> dict[str, str]:
        digests: dict[str, str] = {}
        for unit in units:
            digest = digest_of(unit.value, self._digest)
            # Of two values with one path, as keys with dots in them make it, each counts.
            digests[unit.key] = digests[unit.key] + digest if unit.key in digests else digest
        return digests

    def _digest(self, placeholder: Placeholder) -> str:
        hasher = xxhash.xxh3_64()
        for number in placeholder.numbers:
            entry = self.entries[number]
            hasher.update(f"{entry.dtype}{entry.shape}".encode())
            if entry.slot is not None:
                hasher.update(flat_bytes(self.tensor_of(number)).numpy().data)
        return hasher.hexdigest()


def _parts_of(unit: Unit) -> list[Unit]:
    """Divide a value into tensors and the largest parts that hold none."""
    _, parts = units_of(unit.value, lambda _: False, ())
    return [Unit((*unit.place, *part.place), part.value) for part in parts]


class _Part:
    """Part of a tensor, what takes it, and the bytes of the image that hold it.

    ``memory`` is where these bytes belong, in their order, if that is so.
    """

    def __init__(self, tensor: SavedTensor, part: Region, targets: Sequence[Target]) -> None:
        self._tensor, self._part, self._targets = tensor, part, targets
        self._region = tensor.region
        self.start, self.stop = tensor.start, tensor.start + tensor.nbytes
        self.memory: memoryview | None = None
        if tensor.is_in_order:
            first, count, self._region = rows_of(tensor.region, part)
            self.start, self.stop = tensor.span(first, count)
            if self._region == part and len(targets) == 1:
                self.memory = targets[0].memory_of(part)

    def copy(self, data: torch.Tensor) -> None:
        """Copy the part out of the bytes that hold it."""
        tensor = self._tensor
        if data.storage_offset() % tensor.itemsize:
            data = data.clone()
        items = integer_view(data, tensor.itemsize)
        if not tensor.is_in_order and tensor.entry.strides is not None:
            items = items.as_strided(
                tensor.entry.shape, tensor.entry.strides, items.storage_offset()
            )
        items = items.reshape([sum(count for _, count in runs) for runs in self._region])
        copy_part(self._part, items, self._region, self._targets)


def _clusters(parts: Iterable[_Part]) -> Iterator[list[_Part]]:
    """Divide parts into groups of which no two share a byte of the image."""
    cluster: list[_Part] = []
    end = 0
    for part in sorted(parts, key=lambda part: part.start):
        if cluster and part.start >= end:
            yield cluster
            cluster = []
        end = max(end, part.stop) if cluster else part.stop
        cluster.append(part)
    if cluster:
        yield cluster
