"""Parts of divided tensors: what of a tensor that several ranks have equal one image stores.

A divided slot holds some rows of each tensor in it; the images of the other ranks of the division
hold the rest. The table of parts is stored in the skeleton as JSON, beside the table of tensors,
which describes each tensor whole.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
import xxhash

from localckpt.errors import CorruptShardError
from localckpt.state_dict.boxes import Box, RankSet
from localckpt.state_dict.division import SharedTensor, divide
from localckpt.state_dict.layout import TensorSlot
from localckpt.state_dict.regions import Region, narrowed_rows
from localckpt.state_dict.tensor_table import (
    ARRAY,
    Source,
    TableEntry,
    TensorTable,
    packed,
    stored_strides,
)

__all__ = [
    "LEAST_NBYTES",
    "Agreed",
    "DividedTable",
    "SlotPart",
    "divide_table",
    "parse_parts",
    "render_parts",
]

LEAST_NBYTES = 64 << 10
"""Tensors below this size stay whole in each image. They cost little, and among them are those that
programs call equal and do not keep so, such as the running statistics of a batch norm."""

_Group = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SlotPart:
    """Part of a divided slot that an image holds.

    Attributes:
        ranks: Ranks of the division, in ascending order.
        start: First row.
        count: Number of rows.
        strides: Strides of the part in the slot; ``None`` if it is contiguous.
    """

    ranks: _Group
    start: int
    count: int
    strides: tuple[int, ...] | None

    def entry(self, whole: TableEntry) -> TableEntry:
        """Describe the part as a tensor of its own."""
        view = None if self.strides is None else (0, self.strides)
        return whole._replace(shape=self.shape(whole.shape), view=view)

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the part of a tensor of some shape."""
        return whole if self.count == _rows(whole) else (self.count, *whole[1:])

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """View the part of a whole tensor, in the order of its items in the slot."""
        return packed(_narrowed(tensor, self.start, self.count), self.strides)

    def region(self, box: Box, local: tuple[int, ...]) -> Region:
        """Return the elements of the global tensor that the part of a tensor is."""
        if self.count == _rows(local):
            return box.runs
        # A global tensor may have more dimensions in front.
        return narrowed_rows(box.runs, len(box.shape) - len(local), self.start, self.count)


class Agreed(NamedTuple):
    """Agreement of the ranks of a division, without which their parts do not fit together.

    Attributes:
        ranks: The ranks.
        digest: Digest of the keys, places, dtypes and shapes of the divided tensors.
    """

    ranks: _Group
    digest: int


class DividedTable(NamedTuple):
    """Table of a state of which some slots are divided.

    Attributes:
        table: The table, whose divided slots hold the part of this rank.
        parts: By the name of each divided slot the part of this rank.
        agreed: One for each division.
        cut: Numbers of the tensors of which a part is stored, neither nothing nor all, with their
            first row and number of rows.
    """

    table: TensorTable
    parts: dict[str, SlotPart]
    agreed: tuple[Agreed, ...]
    cut: tuple[tuple[int, int, int], ...]

    def stored(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors, with views of their rows in place of those that are cut."""
        result = list(tensors)
        for number, start, count in self.cut:
            result[number] = tensors[number].narrow(0, start, count)
        return result


class _Unit(NamedTuple):
    """Slot that can be divided."""

    number: int
    """Number of a slot."""
    key: str
    keys: tuple[str, ...]
    box: Box
    entry: TableEntry


def divide_table(
    table: TensorTable,
    boxes: Mapping[int, Box],
    tensors: Sequence[torch.Tensor],
    rank: int,
    neighbours: Sequence[int],
) -> DividedTable:
    """Divide what the ranks of a node have equal among them.

    Args:
        table: Table of the whole state.
        boxes: Parts of global tensors that the tensors are, with the ranks that have them equal.
        tensors: The tensors.
        rank: This rank.
        neighbours: All ranks of its node.
    """
    groups: dict[_Group, list[_Unit]] = {}
    of_set: dict[RankSet, _Group] = {}
    for unit in _units(table, boxes):
        ranks = unit.box.ranks
        assert ranks is not None, "its ranks are named"
        if ranks not in of_set:
            of_set[ranks] = tuple(sorted(r for r in neighbours if r in ranks))
        group = of_set[ranks]
        if len(group) > 1 and rank in group:
            groups.setdefault(group, []).append(unit)
    slots, sources = list(table.slots), list(table.sources)
    parts: dict[str, SlotPart] = {}
    agreed: list[Agreed] = []
    cut: list[tuple[int, int, int]] = []
    for group, units in sorted(groups.items()):
        shared = [_shared(unit) for unit in units]
        divided = divide(shared, len(group))
        agreed.append(Agreed(group, _digest(units)))
        for unit, tensor in zip(units, shared, strict=True):
            start, count = divided[tensor.key][group.index(rank)]
            slot, source = slots[unit.number], sources[unit.number]
            strides = source.strides
            if count < tensor.rows:
                view = _narrowed(tensors[source.number].detach(), start, count)
                strides = stored_strides(view) if count else None
                slots[unit.number] = _slot_of(slot, packed(view, strides))
                sources[unit.number] = Source(source.number, None, strides)
                if count:
                    cut.append((source.number, start, count))
            parts[slot.name] = SlotPart(group, start, count, strides)
    narrowed = TensorTable(table.entries, tuple(slots), tuple(sources))
    return DividedTable(narrowed, parts, tuple(agreed), tuple(cut))


def _units(table: TensorTable, boxes: Mapping[int, Box]) -> Iterator[_Unit]:
    """Yield the slots that can be divided: all tensors in one are the same, and equal elsewhere."""
    of_slot: dict[str | None, list[int]] = {}
    for number, entry in enumerate(table.entries):
        of_slot.setdefault(entry.slot, []).append(number)
    times = Counter((box.key, box.runs) for box in boxes.values())
    for number, (slot, source) in enumerate(zip(table.slots, table.sources, strict=True)):
        numbers = of_slot[slot.name]
        if slot.nbytes < LEAST_NBYTES or source.span is not None:
            continue
        found = [boxes[n] for n in numbers if n in boxes]
        if len(found) < len(numbers) or any(times[box.key, box.runs] > 1 for box in found):
            continue
        entry = table.entries[numbers[0]]
        if found[0].ranks is None or any(box.ranks != found[0].ranks for box in found):
            continue
        if _is_divisible([table.entries[n] for n in numbers]):
            first = min(found, key=lambda box: box.key)
            yield _Unit(number, first.key, tuple(sorted(b.key for b in found)), first, entry)


def _is_divisible(entries: Sequence[TableEntry]) -> bool:
    """Return whether the tensors of a slot are one and the same, and fill it."""
    first = entries[0]
    if any(entry.kind == ARRAY or entry[1:3] != first[1:3] for entry in entries):
        return False
    if any(entry.view != first.view for entry in entries):
        return False
    return first.view is None or (first.view[0] == 0 and _is_dense(first.shape, first.view[1]))


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    step = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride != step:
                return False
            step *= size
    return True


def _shared(unit: _Unit) -> SharedTensor:
    shape, itemsize = unit.entry.shape, unit.entry.torch_dtype().itemsize
    place = json.dumps([unit.key, unit.box.runs])
    return SharedTensor(place, _rows(shape), math.prod(shape[1:]) * itemsize)


def _digest(units: Sequence[_Unit]) -> int:
    rows = sorted((u.keys, u.box.shape, u.box.runs, u.entry.dtype, u.entry.shape) for u in units)
    return xxhash.xxh3_64_intdigest(json.dumps(rows).encode())


def _slot_of(whole: TensorSlot, value: torch.Tensor) -> TensorSlot:
    nbytes = value.numel() * value.itemsize
    # A dtype without a name in the format is stored as bytes.
    is_named = math.prod(whole.shape) * value.itemsize == whole.nbytes
    shape = tuple(value.shape) if is_named else (nbytes,)
    return TensorSlot(whole.name, whole.dtype, shape, nbytes)


def _rows(shape: Sequence[int]) -> int:
    return shape[0] if shape else 1


def _narrowed(tensor: torch.Tensor, start: int, count: int) -> torch.Tensor:
    if count == _rows(tensor.shape):
        return tensor
    return (tensor if tensor.dim() else tensor.reshape(1)).narrow(0, start, count)


# The table of parts.


def render_parts(parts: Mapping[str, SlotPart]) -> bytes:
    """Build the text of a table; the ranks of a division stand in it once."""
    groups: dict[_Group, int] = {}
    rows = [
        [slot, groups.setdefault(p.ranks, len(groups)), p.start, p.count, p.strides]
        for slot, p in parts.items()
    ]
    return json.dumps([list(groups), rows], separators=(",", ":")).encode()


def parse_parts(
    text: bytes,
    entries: Sequence[TableEntry],
    boxes: Mapping[int, Box],
    rank: int,
    world_size: int,
) -> dict[str, SlotPart]:
    """Parse and check the text of a table.

    Args:
        text: The text.
        entries: The tensors of the image.
        boxes: The parts of global tensors that they are.
        rank: The rank whose image it is.
        world_size: Number of ranks of its job.

    Returns:
        By the name of each divided slot the part that the image holds.

    Raises:
        CorruptShardError: The text is no table, or contradicts the tensors, their boxes or itself.
    """
    try:
        lists, rows = json.loads(text)
        groups = [_parse_ranks(ranks, rank, world_size) for ranks in lists]
        if not rows:
            return {}
        of_slot: dict[str | None, list[int]] = {}
        for number, entry in enumerate(entries):
            of_slot.setdefault(entry.slot, []).append(number)
        parts: dict[str, SlotPart] = {}
        equal: dict[tuple[RankSet | None, _Group], bool] = {}
        for slot, group, start, count, strides in rows:
            if type(slot) is not str or slot not in of_slot or slot in parts:
                _refuse(f"a part of {slot!r:.80}")
            if type(group) is not int or not 0 <= group < len(groups):
                _refuse(f"a division {group!r:.80} of {len(groups)}")
            numbers = of_slot[slot]
            ranks = groups[group]
            for found in (boxes.get(n) for n in numbers):
                which = None if found is None else found.ranks, ranks
                if which not in equal:
                    equal[which] = which[0] is not None and all(r in which[0] for r in ranks)
                if not equal[which]:
                    _refuse(f"a part of {slot!r:.80}, which ranks {ranks!r:.80} do not share")
            those = [entries[n] for n in numbers]
            if not _is_divisible(those):
                _refuse(f"a part of {slot!r:.80}, whose tensors differ")
            parts[slot] = _parse_part(ranks, start, count, strides, those[0])
    except CorruptShardError:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        raise CorruptShardError(f"the table of parts cannot be read: {error}") from error
    return parts


def _parse_ranks(ranks: Any, rank: int, world_size: int) -> _Group:
    if not all(type(r) is int and 0 <= r < world_size for r in ranks):
        _refuse(f"the ranks {ranks!r:.80} of {world_size}")
    if list(ranks) != sorted(set(ranks)) or len(ranks) < 2 or rank not in ranks:
        _refuse(f"the ranks {ranks!r:.80} in an image of rank {rank}")
    return tuple(ranks)


def _parse_part(ranks: _Group, start: Any, count: Any, strides: Any, whole: TableEntry) -> SlotPart:
    if type(start) is not int or type(count) is not int:
        _refuse(f"the rows {start!r:.80} and {count!r:.80}")
    if min(start, count) < 0 or start + count > _rows(whole.shape):
        _refuse(f"the rows {start}:{start + count} of {list(whole.shape)}")
    part = SlotPart(ranks, start, count, None if strides is None else tuple(strides))
    if part.strides is not None:
        shape = part.shape(whole.shape)
        if not all(type(s) is int for s in part.strides) or len(part.strides) != len(shape):
            _refuse(f"the strides {strides!r:.80}")
        if not _is_dense(shape, part.strides):
            _refuse(f"the strides {strides!r:.80} of {list(shape)}")
    return part


def _refuse(what: str) -> NoReturn:
    raise CorruptShardError(f"the table of parts has {what}, which cannot be")
