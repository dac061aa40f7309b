"""Divided tensors: of what several ranks have equal, whole tensors are dealt to their images.

A divided slot is stored in the image of its owner, and is empty in the others, as the table of
parts in the skeleton says. Each rank computes the division by itself: a pure function.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import xxhash

from localckpt.errors import CorruptShardError
from localckpt.state_dict.boxes import Box, RankSet
from localckpt.state_dict.tensor_table import ARRAY, TableEntry, TensorTable

LEAST_NBYTES = 64 << 10
"""Tensors below this size stay whole in each image. They cost little, and among them are those that
programs call equal and do not keep so, such as the running statistics of a batch norm."""

_Group = tuple[int, ...]


class DividedSlot(NamedTuple):
    """Ranks of a division, in ascending order, and the one whose image holds the slot."""

    ranks: _Group
    owner: int


class Agreed(NamedTuple):
    """Ranks of a division, and the digest of the divided tensors that they must have in common."""

    ranks: _Group
    digest: int


class DividedTable(NamedTuple):
    """Table of a state in which slots that other ranks own are empty, and the divided slots."""

    table: TensorTable
    parts: dict[str, DividedSlot]
    agreed: tuple[Agreed, ...]


def deal(sizes: Mapping[str, int], parts: int) -> dict[str, int]:
    """Deal tensors by size in bytes to so many parts; returns the number of a part by key."""
    totals = [0] * parts
    owners: dict[str, int] = {}
    for key, nbytes in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        owners[key] = owner = totals.index(min(totals))
        totals[owner] += nbytes
    return owners


class _Unit(NamedTuple):
    """Slot that can be divided, by its number."""

    number: int
    keys: tuple[str, ...]
    box: Box
    entry: TableEntry

    @property
    def place(self) -> str:
        return json.dumps([self.keys[0], self.box.runs])


def divide_table(
    table: TensorTable, boxes: Mapping[int, Box], rank: int, node_ranks: Sequence[int]
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
    slots = list(table.slots)
    parts: dict[str, DividedSlot] = {}
    for group, units in sorted(groups.items()):
        owners = deal({u.place: slots[u.number].nbytes for u in units}, len(group))
        for unit in units:
            slot, owner = slots[unit.number], group[owners[unit.place]]
            parts[slot.name] = DividedSlot(group, owner)
            if owner != rank:
                slots[unit.number] = slot._replace(shape=(0,), nbytes=0)
    agreed = tuple(Agreed(group, _digest(units)) for group, units in sorted(groups.items()))
    return DividedTable(TensorTable(table.entries, tuple(slots), table.sources), parts, agreed)


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
        is_one = _are_one([table.entries[n] for n in numbers])
        if is_one and entry.reach_nbytes() == slot.nbytes:
            first = min(found, key=lambda box: box.key)
            yield _Unit(number, tuple(sorted(b.key for b in found)), first, entry)


def _are_one(entries: Sequence[TableEntry]) -> bool:
    first = as_stored(entries[0])
    return all(e.kind != ARRAY and as_stored(e) == first for e in entries)


def as_stored(entry: TableEntry) -> tuple[Any, ...]:
    """Return what the images of a division must say alike of a tensor."""
    return entry.dtype, entry.shape, entry.view


def _digest(units: Sequence[_Unit]) -> int:
    rows = sorted((u.keys, u.box.shape, u.box.runs, repr(as_stored(u.entry))) for u in units)
    return xxhash.xxh3_64_intdigest(json.dumps(rows).encode())


# The table of parts.


def render_parts(parts: Mapping[str, DividedSlot]) -> bytes:
    """Build the text of a table; the ranks of a division stand in it once."""
    groups: dict[_Group, int] = {}
    rows = [[slot, groups.setdefault(p.ranks, len(groups)), p.owner] for slot, p in parts.items()]
    return json.dumps([list(groups), rows], separators=(",", ":")).encode()


def parse_parts(
    text: bytes,
    entries: Sequence[TableEntry],
    boxes: Mapping[int, Box],
    rank: int,
    world_size: int,
) -> dict[str, DividedSlot]:
    try:
        lists, rows = json.loads(text)
        groups = [_parse_ranks(ranks, rank, world_size) for ranks in lists]
        of_slot: dict[str | None, list[int]] = {}
        for number, entry in enumerate(entries if rows else ()):
            of_slot.setdefault(entry.slot, []).append(number)
        parts: dict[str, DividedSlot] = {}
        equal: dict[tuple[RankSet | None, _Group], bool] = {}
        for slot, group, owner in rows:
            if type(slot) is not str or slot not in of_slot or slot in parts:
                _refuse(f"a part of {slot!r:.80}")
            if type(group) is not int or not 0 <= group < len(groups):
                _refuse(f"a division {group!r:.80} of {len(groups)}")
            numbers, ranks = of_slot[slot], groups[group]
            if type(owner) is not int or owner not in ranks:
                _refuse(f"an owner {owner!r:.80} of {ranks!r:.80}")
            for found in (boxes.get(n) for n in numbers):
                which = None if found is None else found.ranks, ranks
                if which not in equal:
                    equal[which] = which[0] is not None and all(r in which[0] for r in ranks)
                if not equal[which]:
                    _refuse(f"a part of {slot!r:.80}, which ranks {ranks!r:.80} do not share")
            if not _are_one([entries[n] for n in numbers]):
                _refuse(f"a part of {slot!r:.80}, whose tensors differ")
            parts[slot] = DividedSlot(ranks, owner)
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


def _refuse(what: str) -> NoReturn:
    raise CorruptShardError(f"the table of parts has {what}, which cannot be")


class Tables(NamedTuple):
    """Content of a skeleton: tensors, their boxes by number, divided slots by name, the pickle."""

    entries: tuple[TableEntry, ...]
    boxes: dict[int, Box]
    parts: dict[str, DividedSlot]
    pickle: bytes
