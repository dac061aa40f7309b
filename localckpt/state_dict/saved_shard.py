"""Values and parts of a saved shard that another number of ranks loads."""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from functools import cached_property, partial

import torch
import xxhash

from localckpt.errors import CorruptShardError, MismatchError
from localckpt.ids import ShardIdentity
from localckpt.memory.tensor_bytes import flat_bytes
from localckpt.state_dict.boxes import (
    Box,
    Rectangle,
    Region,
    local_starts,
    private_box,
    rectangles_of,
    volume,
)
from localckpt.state_dict.names import Names, names_of
from localckpt.state_dict.reader import ImageReader
from localckpt.state_dict.resharded import outlines_of, require_one, values_below
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.skeleton import collection_paused
from localckpt.state_dict.source import ShardSource
from localckpt.state_dict.stateful import NO_FREEDOM, Freedom, TensorKind
from localckpt.state_dict.tensor_table import ARRAY, UNNAMED
from localckpt.state_dict.values import (
    Placeholder,
    Unit,
    digest_of,
    read_tree,
    root_of,
    units_of,
)

PRIVATE = "private"
"""Text for :meth:`SavedShard.equal_on` of a tensor that the table of boxes does not have."""
# Elements whose digest is asked for are read so many bytes at a time.
_DIGESTED_NBYTES = 16 << 20


class SavedShard(ImageReader):
    """Reader of a shard for its parts.

    Attributes:
        tensors: Boxes by number: those in the table of boxes, and private ones of read values.
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
        self.tensors: dict[int, Box] = {}
        taken: set[tuple[str, Region]] = set()
        for number, box in self.tables.boxes.items():
            # Of equal parts of one tensor, such as tied weights, any will do.
            if (box.key, box.runs) not in taken:
                taken.add((box.key, box.runs))
                self._add(number, box)

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
                    # Its digest is compared with those of other shards, as values are.
                    self._add(number, private_box(key, self.entries[number].shape))

    def other_paths(self) -> Iterator[tuple[str, int]]:
        """Yield the paths after the first of tensors that are in several places, as tied weights.

        Each is given with the tensor's number.
        """
        seen: set[int] = set()
        for path, placeholder in self._placeholders():
            if len(placeholder.numbers) == 1:
                (number,) = placeholder.numbers
                if number in seen:
                    yield path, number
                seen.add(number)

    def equal_on(self, number: int) -> str:
        """Text for the ranks whose tensors of this part are said to be equal."""
        if (box := self.tables.boxes.get(number)) is None:
            return PRIVATE
        return "all" if box.ranks is None else box.ranks.text

    def require_together(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Check that tensors which are given sharing memory were not saved apart."""
        slots = {b.key: self.entries[n].slot for n, b in self.tensors.items() if volume(b.runs)}
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

        digests = self.ruled_digests
        self.ruled, self.others = wanted(self.ruled), wanted(self.others)
        self.ruled_digests = {unit.key: digests[unit.key] for unit in self.ruled}

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
        hasher, dtype = xxhash.xxh3_64(), self.entries[number].torch_dtype()
        # The parts of some rows together, which lie side by side.
        for rows in _divided_by_rows(region, _DIGESTED_NBYTES // dtype.itemsize):
            parts = [
                (number, rectangle, torch.empty(rectangle.sizes, dtype=dtype))
                for rectangle in rectangles_of(rows)
            ]
            self.read_parts(parts)
            for _, _, values in parts:
                hasher.update(flat_bytes(values).numpy().data)
        return hasher.hexdigest()

    def read_parts(self, parts: Iterable[tuple[int, Rectangle, torch.Tensor]]) -> None:
        """Read rectangles of the global tensors of some numbers; see :meth:`read`."""
        self.read(
            (number, Rectangle(local_starts(self.tensors[number].runs, *at), at.sizes), out)
            for number, at, out in parts
        )

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

    def _add(self, number: int, box: Box) -> None:
        entry = self.entries[number]
        if entry.slot is None or entry.slot in self.absent:
            return
        if math.prod(box.shape) >= 1 << 62:
            raise CorruptShardError(
                f"{self.identity}: {box.key!r} would have {math.prod(box.shape)} items"
            )
        self.tensors[number] = box

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


def _divided_by_rows(region: Region, most: int) -> Iterator[Region]:
    """Divide a region by rows into parts of at most so many elements, but of a row at least."""
    if not region:
        yield region
        return
    rows, *others = region
    step = max(1, most // max(1, volume(tuple(others))))
    for start, count in rows:
        for row in range(start, start + count, step):
            yield (((row, min(step, start + count - row)),), *others)
