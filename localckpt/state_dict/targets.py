"""Matching of the tensors of a state that is loaded into with the saved tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

import torch

from localckpt.errors import MismatchError
from localckpt.memory.tensor_bytes import is_flat
from localckpt.state_dict.boxes import Box, Region, whole
from localckpt.state_dict.containers import prefix_in
from localckpt.state_dict.global_view import Job, boxes_of, named
from localckpt.state_dict.names import Names, names_of, only_in
from localckpt.state_dict.skeleton import collection_paused, find_tensors
from localckpt.state_dict.stateful import NO_FREEDOM, Freedom, TensorKind
from localckpt.state_dict.tensor_table import (
    ARRAY,
    SHARED,
    UNNAMED,
    TableEntry,
    build_table,
    free_name,
    packed,
    printable,
    structures,
)

_SHOWN_DIFFERENCES = 10
FIT = (
    "Make the state as it was when it was saved. load() lets go of names with partial=True, "
    "converts with allow_dtype_change=True, and makes new tensors without into="
)
"""Advice on the topic ``fit``, on a state that is not as it was saved."""


LetsGo = Callable[[str], bool]
"""Tells by its dotted name whether a part or a value may be on one side only, saved or given."""


def let_nothing_go(name: str) -> bool:
    """Return False: whatever is saved must be given, and the reverse."""
    return False


class Matched(NamedTuple):
    """Tensors to fill, found for the saved ones.

    Attributes:
        given: By the number of a saved tensor the given one; none where a new one is needed:
            arrays, tensors of meshes, free ones that differ, and missing ones.
        targets: By its name the target of each slot of a given tensor, but for converted ones.
        converted: Numbers of tensors that are given with another dtype, and take the values of new
            ones.
    """

    given: dict[int, torch.Tensor]
    targets: dict[str, torch.Tensor]
    converted: frozenset[int] = frozenset()
    left: frozenset[int] = frozenset()


class _Member(NamedTuple):
    """Tensor of one side of a match, and the tensors that share its slot as its ``group``."""

    number: int
    entry: TableEntry
    group: frozenset[tuple[str, tuple[Any, ...]]]

    @property
    def kind(self) -> TensorKind:
        return self.entry.torch_dtype(), self.entry.shape

    def others(self, path: str) -> str:
        shared = sorted(other for other, _ in self.group if other != path)
        return f"sharing memory with {', '.join(shared)}" if shared else "with memory of its own"


@dataclass(frozen=True, slots=True)
class TargetRules:
    """Ways in which saved tensors may differ from those that are given.

    Values that are ``free`` are taken as saved. New tensors are made for missing ones if
    ``is_partial``. What ``lets_go`` allows on one side only is left as it is. ``named`` parts some
    rank must have saved. ``compare`` is a caller's own comparison of names: misfits by part.
    """

    free: Freedom = NO_FREEDOM
    is_partial: bool = False
    converts: bool = False
    lets_go: LetsGo = let_nothing_go
    named: frozenset[str] = frozenset()
    compare: Callable[[Names, Names], Mapping[str, list[str]]] = lambda _, __: {}

    def require_named(self, saved: Collection[str]) -> None:
        if unknown := sorted(self.named.difference(saved)):
            # Without what the front door saves beside the parts.
            parts = sorted({*saved} - {"localckpt"})
            raise MismatchError(
                f"{', '.join(map(repr, unknown))}: neither a part of the state nor one that was "
                f"saved. The checkpoint has {', '.join(parts)}. Nothing was changed"
            )


STRICT = TargetRules()
"""Rules by which nothing may differ."""


@dataclass(frozen=True)
class Targets:
    """Tensors that are to be filled, in the order in which the skeleton numbers them.

    ``names`` are paths by ``id(tensor)``, as are ``boxes``, and ``dtensors`` with boxes by the ids
    of their local tensors.
    """

    tensors: list[torch.Tensor]
    names: dict[int, str]
    rules: TargetRules
    parts: Names | None
    boxes: dict[int, Box] = field(default_factory=dict)
    dtensors: dict[int, Any] = field(default_factory=dict)

    def match(
        self,
        saved: Sequence[TableEntry],
        boxes: Mapping[int, Box],
        new: Container[int],
        paths: Callable[[], Mapping[int, str]],
        differ: NamesDiffer,
    ) -> Matched:
        """Find the given tensor for each saved tensor.

        Args:
            boxes: By the number of a saved tensor, the part of a global tensor that it is.
            new: Numbers of the saved tensors that are made anew, as those of device meshes and of
                sparse tensors.
            paths: Returns the paths of the saved tensors that are in containers, by their numbers.
        """
        numbers = [
            number
            for number, entry in enumerate(saved)
            if entry.kind != ARRAY and number not in new
        ]
        names = self._names_for(saved, numbers)
        targets = _by_slot([saved[number] for number in numbers], self.tensors, names)
        if targets is not None:
            if differ.lines:
                raise mismatch(differ.lines)
            matched = Matched(dict(zip(numbers, self.tensors, strict=True)), targets)
        else:
            matched = self._match_by_path({n: saved[n] for n in numbers}, names, paths, differ)
        self._require_same_places(matched.given, boxes)
        return matched

    def _match_by_path(
        self,
        saved: Mapping[int, TableEntry],
        names: Mapping[int, str],
        paths: Callable[[], Mapping[int, str]],
        differ: NamesDiffer,
    ) -> Matched:
        table = build_table(self.tensors, names)
        by_number = {n: names[id(t)] for n, t in enumerate(self.tensors) if id(t) in names}
        there = _members(saved, paths)
        here = _members(dict(enumerate(table.entries)), lambda: by_number)
        known = set(self.names.values())

        def is_free(path: str) -> bool:
            kinds = (side[path].kind if path in side else None for side in (there, here))
            # A tensor without a path may be in a free part of the state, or may not.
            is_unnamed = path.startswith(UNNAMED) and path not in known
            free = self.rules.free
            return free.allows(path, *kinds) or (is_unnamed and bool(free.below))

        same = {p for p, member in there.items() if p in here and member.group == here[p].group}
        strict = {p for p in there.keys() - same if not is_free(p)}
        # Tensors that share a slot are given all together, or not at all.
        absent = {p for p in strict if not any(other in here for other, _ in there[p].group)}
        lets_go = self.rules.lets_go
        left = {p for p in absent if lets_go(p)}
        # Tensors without a path are made: they may be in parts that are let go.
        unnamed = {p for p in absent if p.startswith(UNNAMED) and lets_go is not let_nothing_go}
        strict -= absent if self.rules.is_partial else left | unnamed
        converted, lines = set(), []
        for path in (path for path in there if path in strict):
            one, other = there[path], here.get(path)
            # What is free leaves the tensors that it shares memory with.
            if other is not None and _within(one, strict) == _within(other, strict):
                same.add(path)
            elif other is not None and self.rules.converts and _differ_in_dtype(one, other):
                converted.add(path)
            elif prefix_in(path, differ.names) is None:
                lines.append(_difference(path, one, other))
        lines += [
            f"{path}: given, not saved"
            for path in here
            if path not in there and not is_free(path) and not lets_go(path)
            if prefix_in(path, differ.names) is None
        ]
        if lines or differ.lines:
            raise mismatch(in_turn(differ.lines, lines))
        filled = [path for path in there if path in same]
        entries = [there[path].entry for path in filled]
        tensors = [self.tensors[here[path].number] for path in filled]
        slots = {
            id(tensor): (entry.slot or "").removeprefix(SHARED)
            for entry, tensor in zip(entries, tensors, strict=True)
        }
        if (targets := _by_slot(entries, tensors, slots)) is None:
            raise mismatch(["the tensors share memory in another way"])
        return Matched(
            {there[p].number: self.tensors[here[p].number] for p in (*filled, *converted)},
            targets,
            frozenset(there[path].number for path in converted),
            frozenset(there[path].number for path in left),
        )

    def _names_for(self, saved: Sequence[TableEntry], numbers: Sequence[int]) -> dict[int, str]:
        """Return the names, with those in an image for tensors without a path, in their order.

        Where some are missing, the others get names of no saved tensor: none takes another's
        values.
        """
        unnamed = [tensor for tensor in self.tensors if id(tensor) not in self.names]
        if not unnamed:
            return self.names
        if len(numbers) == len(self.tensors):
            of_numbers = zip(numbers, self.tensors, strict=True)
            return {id(tensor): f"{UNNAMED}{number}" for number, tensor in of_numbers} | self.names
        there: Sequence[int] = [
            number
            for number in numbers
            if (saved[number].slot or "").removeprefix(SHARED) == f"{UNNAMED}{number}"
        ]
        if len(there) != len(unnamed):
            there = range(len(saved), len(saved) + len(unnamed))
        of_unnamed = zip(there, unnamed, strict=True)
        return self.names | {id(tensor): f"{UNNAMED}{number}" for number, tensor in of_unnamed}

    def are_sharded_otherwise(
        self,
        saved: Sequence[TableEntry],
        boxes: Mapping[int, Box],
        saved_dtensors: Callable[[], Container[int]],
    ) -> bool:
        """Return whether some are other parts of global tensors than what was saved of these.

        Tensors without a box are whole. A whole DTensor in place of a plain tensor, or the reverse,
        counts as another part. Tensors of another global shape, or on one side only, do not.
        """
        there: dict[tuple[str, tuple[int, ...]], dict[Region, int]] = {}
        for number, entry in enumerate(saved):
            box = boxes.get(number)
            shape = entry.shape if box is None else box.shape
            key = (entry.slot or "") if box is None else box.key
            there.setdefault((key, shape), {})[whole(shape) if box is None else box.runs] = number
        both_whole: list[tuple[int, bool]] = []
        for tensor in self.tensors:
            own = self.boxes.get(id(tensor))
            shape = tuple(tensor.shape) if own is None else own.shape
            key = self.names.get(id(tensor), "") if own is None else own.key
            region = whole(shape) if own is None else own.runs
            if not (regions := there.get((key, shape))):
                continue
            if region not in regions:
                return True
            is_dtensor = id(tensor) in self.dtensors
            if region == whole(shape) and (is_dtensor or regions[region] in boxes):
                both_whole.append((regions[region], is_dtensor))
        known = saved_dtensors() if both_whole else ()
        return any((number in known) != is_dtensor for number, is_dtensor in both_whole)

    def _require_same_places(
        self, given: Mapping[int, torch.Tensor], boxes: Mapping[int, Box]
    ) -> None:
        """Refuse tensors of equal shape that are other parts of their global tensors."""
        lines = []
        for number, saved in boxes.items():
            own = self.boxes.get(id(given.get(number)))
            if own is not None and own[:3] != saved[:3]:
                key = f" {own.key}" if own.key != saved.key else ""
                lines.append(f"{saved.key}: saved as {saved.place}, given as{key} {own.place}")
        if lines:
            raise mismatch(lines).advised(
                "sharding",
                "Shard it over the ranks as it was when it was saved, in the same order, or make "
                "the manager with elastic=True",
            )


@collection_paused()
def find_targets(state: Any, rules: TargetRules = STRICT) -> Targets:
    tensors = find_tensors(state)
    found = named(state)
    # Places are compared, and not the ranks that have them.
    boxes = boxes_of(found.tellers, tensors, Job(0, ()))
    by_id = {id(tensors[number]): box for number, box in boxes.items()}
    dtensors = _by_local_tensor(t.value for t in found.tellers if t.kind == "DTensor")
    of_boxes = {local: dtensors[local] for local in by_id if local in dtensors}
    parts = names_of(state, rules.free)
    return Targets(tensors, found.names, rules, parts, by_id, of_boxes)


def _members(
    entries: Mapping[int, TableEntry], paths: Callable[[], Mapping[int, str]]
) -> dict[str, _Member]:
    """Return the tensors of one side by their paths: their slots' names, but for shared slots."""
    uses = Counter(entry.slot for entry in entries.values())
    is_shared = [uses[e.slot] > 1 or e.is_blob or e.slot is None for e in entries.values()]
    known = paths() if any(is_shared) else {}
    taken: set[str] = set()
    named: list[str] = []
    groups: dict[tuple[str | None, int], list[tuple[str, tuple[Any, ...]]]] = {}
    alike = structures(list(entries.values()))
    for (number, entry), shared, structure in zip(entries.items(), is_shared, alike, strict=True):
        wanted = known.get(number, f"{UNNAMED}{number}") if shared else entry.slot or ""
        named.append(free_name(printable(wanted), taken))
        taken.add(named[-1])
        group = entry.slot, number if entry.slot is None else 0
        groups.setdefault(group, []).append((named[-1], structure[1:]))
    sets = {group: frozenset(members) for group, members in groups.items()}
    return {
        path: _Member(number, entry, sets[entry.slot, number if entry.slot is None else 0])
        for path, (number, entry) in zip(named, entries.items(), strict=True)
    }


def _within(member: _Member, paths: Container[str]) -> set[tuple[str, tuple[Any, ...]]]:
    return {row for row in member.group if row[0] in paths}


def _differ_in_dtype(saved: _Member, given: _Member) -> bool:
    shared, shared_now = ({path for path, _ in member.group} for member in (saved, given))
    return saved.entry.shape == given.entry.shape and shared == shared_now


def _difference(path: str, saved: _Member, given: _Member | None) -> str:
    if given is None:
        return f"{path}: saved, not given"
    kinds = [f"{e.dtype} {list(e.shape)}" for e in (saved.entry, given.entry)]
    if kinds[0] == kinds[1]:
        kinds = [saved.others(path), given.others(path)]
        if given.entry.slot is None:
            kinds[1] = "without memory, on the meta device"
        return f"{path}: saved {kinds[0]}, given {kinds[1]}"
    return f"{path}: saved as {kinds[0]}, given as {kinds[1]}"


def _by_local_tensor(dtensors: Iterable[Any]) -> dict[int, Any]:
    """Return DTensors by the ``id()`` of their local tensors; none that have one in common."""
    found: dict[int, Any] = {}
    for dtensor in dtensors:
        local = id(dtensor._local_tensor)
        found[local] = dtensor if found.get(local, dtensor) is dtensor else None
    return {local: dtensor for local, dtensor in found.items() if dtensor is not None}


def _by_slot(
    saved: Sequence[TableEntry],
    tensors: Sequence[torch.Tensor],
    names: Mapping[int, str],
) -> dict[str, torch.Tensor] | None:
    """Return the target of each slot of an image; ``None`` if the tensors differ from the saved."""
    # A short cut that nearly always applies, since a restart waits for this.
    if (targets := _plain_targets(saved, tensors, names)) is not None:
        return targets
    table = build_table(tensors, names)
    if structures(saved) != structures(table.entries):
        return None
    targets = {
        # With the saved strides, since the given tensor may have its dimensions in another
        # order in memory.
        slot.name: source._replace(strides=saved[source.number].strides).value(
            tensors[source.number]
        )
        for slot, source in zip(table.slots, table.sources, strict=True)
    }
    _require_apart(targets)
    return targets


def _plain_targets(
    saved: Sequence[TableEntry], tensors: Sequence[torch.Tensor], names: Mapping[int, str]
) -> dict[str, torch.Tensor] | None:
    if len(saved) != len(tensors) or len({entry.slot for entry in saved}) < len(saved):
        return None
    targets = {}
    for entry, tensor in zip(saved, tensors, strict=True):
        if (
            entry.slot is None
            or entry.slot != names.get(id(tensor))
            or entry.shape != tensor.shape
            or entry.torch_dtype() is not tensor.dtype
            or tensor.is_meta
        ):
            return None
        target = packed(tensor, entry.strides)
        if not is_flat(target) or target.numel() < tensor.numel():
            return None
        targets[entry.slot] = target
    return None if find_overlaps(targets.items()) else targets


def _require_apart(targets: dict[str, torch.Tensor]) -> None:
    """Refuse targets that share memory, as numpy arrays can: each would overwrite another."""
    flat = [(name, target) for name, target in targets.items() if is_flat(target)]
    if overlaps := find_overlaps(flat):
        one, other = overlaps[0]
        raise MismatchError(
            f"the state to load into differs from the saved one, and was left as it is: {one} and "
            f"{other} were saved apart, and those given share memory"
        ).advised("fit", FIT)


def find_overlaps(flat: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, str]]:
    """Return the names of flat tensors that share bytes, in pairs that connect all of them."""
    return overlapping_spans(
        (tensor.data_ptr(), tensor.data_ptr() + nbytes, name)
        for name, tensor in flat
        if not tensor.is_meta and (nbytes := tensor.nbytes)
    )


def overlapping_spans(spans: Iterable[tuple[int, int, str]]) -> list[tuple[str, str]]:
    """Return the names of spans of memory that overlap, in pairs that connect all of them."""
    found = []
    end, last = 0, ""
    for start, stop, name in sorted(spans):
        if start < end:
            found.append((last, name))
        if stop >= end:
            end, last = stop, name
    return found


class NamesDiffer(NamedTuple):
    """Names that were saved and are missing, and in words what else does not fit."""

    missing: list[str]
    lines: list[str]
    names: frozenset[str]


def compare_names(
    saved: Names | None,
    given: Names | None,
    *,
    rules: TargetRules,
    is_dropped: Callable[[str], bool] = let_nothing_go,
) -> NamesDiffer:
    """Compare the names of two states; a part that was saved may be dropped."""
    if saved is None or given is None:
        return ALL_NAMED
    added = [n for n in only_in(given, saved, is_strict=True) if not rules.lets_go(n)]
    missing = [name for name in saved.keys() - given.keys() if not is_dropped(name)]
    absent = () if rules.is_partial else only_in(saved, given)
    lacking = [name for name in absent if not rules.lets_go(name)]
    if not added and {*missing}.isdisjoint(lacking):
        # What lacks is found where tensors are filled.
        lacking = []
    compared = rules.compare(saved, given)
    # What the caller says of a part tells more than the names in it.
    sides = (
        [f"{name}: saved, not given" for name in lacking if prefix_in(name, compared) is None],
        [f"{name}: given, not saved" for name in added if prefix_in(name, compared) is None],
    )
    lines = in_turn([line for part in compared.values() for line in part], *sides)
    return NamesDiffer(sorted(missing), lines, frozenset((*lacking, *added)))


ALL_NAMED = NamesDiffer([], [], frozenset())


def in_turn(*lists: Iterable[str]) -> list[str]:
    """Join lists of which not all may be shown, so that some of each are."""
    return [line for turn in zip_longest(*lists) for line in turn if line is not None]


def mismatch(lines: Sequence[str]) -> MismatchError:
    """Return the error that a state to load into differs from the saved one in some ways."""
    return MismatchError(
        f"the state to load into differs from the saved one, and was left as it is: {listed(lines)}"
    ).advised("fit", FIT)


def listed(lines: Sequence[str]) -> str:
    """Join lines to one text, which has the first of them and the number of others."""
    more = len(lines) - _SHOWN_DIFFERENCES
    return "; ".join(lines[:_SHOWN_DIFFERENCES]) + f"; and {more} more" * (more > 0)
