"""Saved shard that is opened for parts of its tensors, and for the values beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import xxhash

from localckpt.errors import CorruptShardError, MismatchError
from localckpt.ids import ShardIdentity
from localckpt.memory.tensor_bytes import flat_bytes, integer_view
from localckpt.state_dict.boxes import Box
from localckpt.state_dict.names import Names, names_of
from localckpt.state_dict.outlines import outlines_of, values_below
from localckpt.state_dict.part_stream import PRIVATE, SavedTensor, picked, stream_parts
from localckpt.state_dict.regions import Region, volume, whole
from localckpt.state_dict.resharded import require_one
from localckpt.state_dict.restore import ImageReader
from localckpt.state_dict.runs import PartReceiver
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.skeleton import collection_paused
from localckpt.state_dict.source import ShardSource
from localckpt.state_dict.stateful import NO_FREEDOM, Freedom, TensorKind
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

__all__ = ["SavedShard"]


class SavedShard:
    """Shard that is opened for its parts.

    Args:
        source: Source of the image; closed by :meth:`close`.
        allowed: Allow-list for the classes in the shard.
        identity: Identity that the image must have.
        rules: Key prefixes of values that the caller has a rule for; ``None`` to leave values out,
            and tensors that are not in the table of boxes.
        free: Names whose values are loaded as they were saved.

    Attributes:
        tensors: Tensors by their number, but for those that are values or parts of values.
        ruled, others: Values; see :func:`units_of`.
        outlines: Outlines of the free parts of the state.
        names: Names of the parts and values of the state, where it has names.

    Raises:
        CorruptShardError: The image is damaged, belongs to another shard, or contradicts itself.
        MismatchError: Two tensors have one path.
        RestoreError: The values cannot be made.
    """

    @collection_paused()
    def __init__(
        self,
        source: ShardSource,
        allowed: SafeGlobals,
        identity: ShardIdentity,
        rules: Collection[str] | None,
        free: Freedom = NO_FREEDOM,
    ) -> None:
        self.identity = identity
        self._source = source
        self._reader = ImageReader(source, allowed, identity)
        self._entries, boxes, self._divided = self._reader.tables
        self.ruled: list[Unit] = []
        self.others: list[Unit] = []
        self.outlines: list[Unit] = []
        self.names: Names | None = None
        if rules is not None:
            skeleton, contents = self._reader.checked_skeleton()
            values = set(contents.composed)
            root = root_of(read_tree(skeleton, allowed, self._value_tensor(boxes, values)))
            # What others are made of is there to be filled in strict parts only.
            if new := values_below(root, free, lambda n: self._entries[n].slot is None):
                values |= new
                root = root_of(read_tree(skeleton, allowed, self._value_tensor(boxes, values)))
            self.ruled, self.others = units_of(root, boxes.__contains__, rules)
            self.names = names_of(root, free)
            self.outlines = outlines_of(root, free, rules, self._kind_of(boxes))
        self.tensors: dict[int, SavedTensor] = {}
        taken: set[tuple[str, Region]] = set()
        for number, box in boxes.items():
            # Of equal parts of one tensor, such as tied weights, any will do.
            if (box.key, box.runs) not in taken:
                taken.add((box.key, box.runs))
                equal_on = "all" if box.ranks is None else box.ranks.text
                self._add(number, box.key, box.shape, self._region(number, box), equal_on)
        below = (part for unit in self.ruled for part in _parts_of(unit))
        private: set[str] = set()
        for unit in (*self.others, *below):
            if isinstance(unit.value, Placeholder):
                for number, key in self._keys(unit):
                    # One tensor in two places has the path of the first, as everywhere.
                    if number in self.tensors:
                        continue
                    if len(unit.value.numbers) == 1:
                        require_one(key, private)
                    shape = self._entries[number].shape
                    # Its digest is compared with those of other shards, as values are.
                    self._add(number, key, shape, whole(shape), PRIVATE)

    def require_together(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Check that tensors which are given sharing memory were not saved apart.

        Args:
            pairs: Their keys.

        Raises:
            MismatchError: They were.
        """
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
        return self._digests_of(self.others)

    @cached_property
    def ruled_digests(self) -> dict[str, str]:
        """Digests of the values that a rule is for, by their keys."""
        return self._digests_of(self.ruled)

    def tensor_of(self, number: int) -> torch.Tensor:
        """Read a tensor, contiguous, into host memory."""
        entry = self._entries[number]
        if entry.slot is None:
            return torch.empty(entry.shape, dtype=entry.torch_dtype(), device="meta")
        if not entry.reach_nbytes():
            return torch.empty(entry.shape, dtype=entry.torch_dtype())
        return self._as_stored(entry).contiguous()

    def digest_of_part(self, number: int, region: Region) -> str:
        """Return the digest of elements that the shard has of a tensor, read into host memory."""
        tensor = self.tensors[number]
        part = self._as_stored(tensor.entry)
        if region != tensor.region:
            part = picked(integer_view(part).reshape(tensor.local), tensor.region, region)
        return xxhash.xxh3_64_hexdigest(flat_bytes(part.contiguous()).numpy().data)

    def stream(self, wanted: Mapping[int, Iterable[tuple[PartReceiver, Region]]]) -> None:
        """Read parts of tensors, and only the pieces of the image that hold them.

        Args:
            wanted: By the number of a tensor, who wants which elements of the global tensor.

        Raises:
            CorruptShardError: A block is damaged.
            StorageError: The medium failed.
        """
        tensors = ((self.tensors[number], parts) for number, parts in wanted.items())
        stream_parts(self._reader.parts, tensors, self._as_stored)

    def _as_stored(self, entry: TableEntry) -> torch.Tensor:
        flat = torch.frombuffer(self._read(entry), dtype=torch.uint8).view(entry.torch_dtype())
        if entry.view is None:
            return flat.view(entry.shape)
        return flat.as_strided(entry.shape, entry.view[1])

    def _read(self, entry: TableEntry) -> memoryview:
        """Read the bytes of the slot that a tensor has, into memory of their own."""
        assert entry.slot is not None, "a tensor without data is not read"
        start = self._reader.header.data_start + self._reader.header.slots[entry.slot].offset
        offset = 0 if entry.view is None else entry.view[0]
        return self._reader.parts.read(start + offset, start + entry.reach_nbytes())

    def _kind_of(self, boxes: Mapping[int, Box]) -> Callable[[int], TensorKind]:
        def kind(number: int) -> TensorKind:
            entry, box = self._entries[number], boxes.get(number)
            return entry.torch_dtype(), entry.shape if box is None else box.shape

        return kind

    def _value_tensor(
        self, boxes: Mapping[int, Any], values: Container[int]
    ) -> Callable[[int], torch.Tensor | None]:
        """Give tensors that are in no container: arrays, those in objects, and parts of values."""

        def tensor(number: int) -> torch.Tensor | None:
            entry = self._entries[number]
            is_unnamed = entry.slot is not None and entry.slot.startswith("tensor.")
            is_value = entry.kind == ARRAY or number in values
            if not is_value and (not is_unnamed or number in boxes):
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
        self, number: int, key: str, shape: tuple[int, ...], region: Region, equal_on: str
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
            entry = self._entries[number]
            hasher.update(f"{entry.dtype}{entry.shape}".encode())
            if entry.slot is not None and entry.reach_nbytes():
                if entry.view is None:
                    hasher.update(self._read(entry))
                    continue
                run = self.tensor_of(number).reshape(-1).view(torch.uint8)
                hasher.update(run.numpy().tobytes())
        return hasher.hexdigest()


def _parts_of(unit: Unit) -> list[Unit]:
    """Divide a value into tensors and the largest parts that hold none."""
    _, parts = units_of(unit.value, lambda _: False, ())
    return [Unit((*unit.place, *part.place), part.value) for part in parts]
