"""Parts of divided tensors: what of a tensor that several ranks have equal one image stores.

A divided slot holds some rows of each tensor in it; the images of the other ranks of the division
hold the rest. The table of parts is stored in the skeleton as JSON, beside the table of tensors,
which describes each tensor whole. The division is a pure function of what all of the ranks know, so
each rank computes it by itself. A load finds the rows in the images of all ranks of a division:
together they must be all rows, each once.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

import torch
import xxhash

from localckpt.errors import CorruptShardError
from localckpt.state_dict.boxes import Box, RankSet, Region, narrowed_rows
from localckpt.state_dict.layout import TensorSlot
from localckpt.state_dict.tensor_table import (
    ARRAY,
    Source,
    TableEntry,
    TensorTable,
)

__all__ = [
    "LEAST_NBYTES",
    "Agreed",
    "DividedTable",
    "MissingRows",
    "SharedTensor",
    "SlotPart",
    "Tables",
    "co_owners_of",
    "divide",
    "divide_table",
    "find_pieces",
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
        start, count: First row, and number of rows; they are contiguous in the slot.
    """

    ranks: _Group
    start: int
    count: int

    def entry(self, whole: TableEntry) -> TableEntry:
        """Describe the part as a tensor of its own."""
        return whole._replace(shape=self.shape(whole.shape), view=None)

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the part of a tensor of some shape."""
        return whole if self.count == _rows(whole) else (self.count, *whole[1:])

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """View the part of a whole tensor."""
        return _narrowed(tensor, self.start, self.count)

    def region(self, box: Box, local: tuple[int, ...]) -> Region:
        """Return the elements of the global tensor that the part of a tensor is."""
        if self.count == _rows(local):
            return box.runs
        # A global tensor may have more dimensions in front.
        return narrowed_rows(box.runs, len(box.shape) - len(local), self.start, self.count)


class Agreed(NamedTuple):
    """Agreement of the ranks of a division, without which their parts do not fit together.

    Attributes:
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


class SharedTensor(NamedTuple):
    """Tensor that all ranks of a division have equal.

    Attributes:
        key: Key; no two tensors have the same.
        rows: Number of indices in its first dimension; 1 for a tensor without dimensions.
    """

    key: str
    rows: int
    row_nbytes: int

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.rows * self.row_nbytes


_Rows = tuple[int, int]
"""First row, and number of rows, of a tensor."""


def divide(tensors: Iterable[SharedTensor], parts: int) -> dict[str, list[_Rows]]:
    """Divide tensors among ranks: whole ones by size, and by rows what exceeds a fair share.

    Returns by key the rows of each rank, in the order of the ranks: together all rows, each once.
    No rank has more than a fair share beyond what another has, but for rows of divided tensors.
    """
    ordered = sorted(tensors, key=lambda tensor: (-tensor.nbytes, tensor.key))
    total = sum(tensor.nbytes for tensor in ordered)
    sizes = [0] * parts
    divided: dict[str, list[_Rows]] = {}
    for tensor in ordered:
        if tensor.nbytes * parts > total and tensor.rows > 1:
            cuts = [tensor.rows * part // parts for part in range(parts + 1)]
        else:
            owner = sizes.index(min(sizes))
            cuts = [0] * (owner + 1) + [tensor.rows] * (parts - owner)
        divided[tensor.key] = rows = [(a, b - a) for a, b in pairwise(cuts)]
        sizes = [size + n * tensor.row_nbytes for size, (_, n) in zip(sizes, rows, strict=True)]
    return divided


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
    node_ranks: Sequence[int],
) -> DividedTable:
    """Divide what the ranks of a node have equal among them, as the boxes say."""
    groups: dict[_Group, list[_Unit]] = {}
    of_set: dict[RankSet, _Group] = {}
    for unit in _units(table, boxes):
        ranks = unit.box.ranks
        assert ranks is not None, "its ranks are named"
        if ranks not in of_set:
            of_set[ranks] = tuple(sorted(r for r in node_ranks if r in ranks))
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
            if count < tensor.rows or source.strides is not None:
                view = _narrowed(tensors[source.number].detach(), start, count)
                slots[unit.number] = _slot_of(slot, view)
                sources[unit.number] = Source(source.number, None, None)
            if 0 < count < tensor.rows:
                cut.append((source.number, start, count))
            parts[slot.name] = SlotPart(group, start, count)
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
        [slot, groups.setdefault(p.ranks, len(groups)), p.start, p.count]
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
    """Parse and check the text of a table: by the name of each divided slot the image's part."""
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
        for slot, group, start, count in rows:
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
            parts[slot] = _parse_part(ranks, start, count, those[0])
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


def _parse_part(ranks: _Group, start: Any, count: Any, whole: TableEntry) -> SlotPart:
    if type(start) is not int or type(count) is not int:
        _refuse(f"the rows {start!r:.80} and {count!r:.80}")
    if min(start, count) < 0 or start + count > _rows(whole.shape):
        _refuse(f"the rows {start}:{start + count} of {list(whole.shape)}")
    return SlotPart(ranks, start, count)


def _refuse(what: str) -> NoReturn:
    raise CorruptShardError(f"the table of parts has {what}, which cannot be")


class Tables(NamedTuple):
    """Tables of an image.

    Attributes:
        entries: The tensors, each described whole.
        boxes: By the number of a tensor, the part of a global tensor that it is.
        parts: By the name of each divided slot, the part of it that the image holds.
    """

    entries: tuple[TableEntry, ...]
    boxes: dict[int, Box]
    parts: dict[str, SlotPart]


class MissingRows(NamedTuple):
    """Rows of a tensor that another image holds.

    Attributes:
        number: Number of the tensor in the image that lacks them.
        slot: Name of the slot that holds them in the other image.
        part: The rows, as the other image has them.
    """

    number: int
    slot: str
    part: SlotPart


def co_owners_of(tables: Tables, rank: int) -> tuple[int, ...]:
    """Return the ranks whose images hold what the image of a rank lacks, in ascending order."""
    groups = {part.ranks for part in tables.parts.values()}
    return tuple(sorted({co_owner for ranks in groups for co_owner in ranks} - {rank}))


def find_pieces(
    own: Tables, rank: int, others: Mapping[int, Tables]
) -> dict[int, list[MissingRows]]:
    """Find the rows that an image lacks, by the rank whose image holds them.

    ``others`` has the tables of at least the :func:`co_owners_of` the image.
    """
    if not own.parts:
        return {}
    numbers: dict[str | None, int] = {}
    for number, entry in enumerate(own.entries):
        numbers.setdefault(entry.slot, number)
    places = {
        co_owner: {(box.key, box.shape, box.runs): number for number, box in tables.boxes.items()}
        for co_owner, tables in others.items()
    }
    found: dict[int, list[MissingRows]] = {}
    for slot, part in own.parts.items():
        number = numbers[slot]
        entry, box = own.entries[number], own.boxes[number]
        taken = [(part.start, part.count)]
        for co_owner in part.ranks:
            if co_owner == rank:
                continue
            there = places[co_owner].get((box.key, box.shape, box.runs))
            piece = None if there is None else _piece(number, entry, others[co_owner], there, part)
            if piece is None:
                raise CorruptShardError(
                    f"{box.key!r} is divided among ranks {list(part.ranks)} in the image of rank "
                    f"{rank}, and not so in that of rank {co_owner}"
                )
            taken.append((piece.part.start, piece.part.count))
            if piece.part.count:
                found.setdefault(co_owner, []).append(piece)
        _require_tiling(taken, entry.shape[0] if entry.shape else 1, box.key, part.ranks)
    return found


def _piece(
    number: int, entry: TableEntry, tables: Tables, there: int, part: SlotPart
) -> MissingRows | None:
    other = tables.entries[there]
    found = tables.parts.get(other.slot or "")
    if found is None or found.ranks != part.ranks:
        return None
    if (other.dtype, other.shape) != (entry.dtype, entry.shape):
        return None
    assert other.slot is not None, "it has a part"
    return MissingRows(number, other.slot, found)


def _require_tiling(
    taken: list[tuple[int, int]], rows: int, key: str, ranks: tuple[int, ...]
) -> None:
    end = 0
    for start, count in sorted(row for row in taken if row[1]):
        if start != end:
            what = "are in none" if start > end else "are in several"
            raise CorruptShardError(
                f"rows {min(start, end)}:{max(start, end)} of {key!r} {what} of the images of "
                f"ranks {list(ranks)}"
            )
        end = start + count
    if end != rows:
        raise CorruptShardError(
            f"rows {end}:{rows} of {key!r} are in none of the images of ranks {list(ranks)}"
        )
