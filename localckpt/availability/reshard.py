"""Plan of a load on other ranks, or into another sharding: who takes what, and who reads it.

Tensors are described in groups of one dtype and shape of which a shard has the same elements: few,
however many tensors there are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import xxhash

from localckpt.availability.inventory import Inventory
from localckpt.errors import MismatchError, NoReplicasAvailableError
from localckpt.ids import Checkpoint
from localckpt.state_dict.boxes import Region, common, overlapping_pairs, text_of, volume, without
from localckpt.state_dict.containers import prefix_in
from localckpt.state_dict.targets import STRICT, TargetRules, listed, mismatch


def assign_readers(
    checkpoint: Checkpoint, inventory: Inventory, computed: Mapping[int, int] | None = None
) -> dict[int, int]:
    """Choose for each shard a rank of this job, on a node that holds the shard.

    The rank describes the shard, and reads what ranks of nodes that do not hold it want. Where
    tensors are divided among the ranks in their order, as by FSDP, the rank that has the middle of
    a shard now is one of those that want the most of it: it is chosen if its node holds the shard,
    else the rank that has the fewest bytes so far. ``computed`` has the ranks of shards that were
    computed. Raises NoReplicasAvailableError if no node holds some shard.
    """
    holders, nbytes = inventory.holders(checkpoint), inventory.shards(checkpoint)
    readers = dict(computed or {})
    load = dict.fromkeys((r for ranks in inventory.ranks_on.values() for r in ranks), 0)
    for shard in range(checkpoint.world_size):
        if shard in readers:
            continue
        if shard not in holders:
            raise NoReplicasAvailableError(
                f"no node holds the shard of rank {shard} of iteration {checkpoint.iteration}"
            )
        reader = (2 * shard + 1) * len(load) // (2 * checkpoint.world_size)
        if inventory.node_of(reader) not in holders[shard]:
            ranks = (rank for node in holders[shard] for rank in inventory.ranks_on[node])
            reader = min(ranks, key=lambda rank: (load[rank], rank))
        readers[shard] = reader
        load[reader] += nbytes[shard]
    return dict(sorted(readers.items()))


class Keys(NamedTuple):
    """Global tensors of one dtype and one shape, by their keys in order."""

    dtype: str
    shape: tuple[int, ...]
    keys: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name by which ranks refer to them: a digest."""
        return xxhash.xxh3_64_hexdigest(json.dumps(self).encode())


class TensorGroup(NamedTuple):
    """Elements that a rank or a shard has of some global tensors.

    ``name`` is that of the :class:`Keys`. ``equal_on`` is a text for the ranks whose elements are
    said to be equal; of what is wanted it is empty.
    """

    name: str
    region: Region
    equal_on: str = ""


def tuples_of(fields: Any) -> Any:
    """Return values from JSON, with tuples for the lists that JSON makes of them."""
    return tuple(map(tuples_of, fields)) if isinstance(fields, list) else fields


def group_tensors(
    tensors: Iterable[tuple[str, str, tuple[int, ...], Region, str]],
) -> tuple[dict[TensorGroup, list[list[int]]], dict[str, Keys]]:
    """Divide tensors into groups.

    Returns for each group the numbers of its tensors by key, in the order of the keys: more than
    one number where tensors are the same part of one global tensor; and the keys of each group by
    their name.
    """
    alike: dict[tuple[str, tuple[int, ...], Region, str], dict[str, list[int]]] = {}
    for number, (key, dtype, shape, region, equal_on) in enumerate(tensors):
        of_kind = alike.setdefault((dtype, shape, region, equal_on), {})
        of_kind.setdefault(key, []).append(number)
    groups: dict[TensorGroup, list[list[int]]] = {}
    tables: dict[str, Keys] = {}
    for (dtype, shape, region, equal_on), numbers in alike.items():
        keys = Keys(dtype, shape, tuple(sorted(numbers)))
        name = keys.name
        tables[name] = keys
        groups[TensorGroup(name, region, equal_on)] = [numbers[key] for key in keys.keys]
    return groups, tables


class Take(NamedTuple):
    """Elements of some global tensors that a rank takes from a shard, which ``reader`` reads.

    That is the rank itself where its node holds the shard.

    ``keys`` are those of both groups, in order; ``None`` if they are all keys of both.
    """

    receiver: int
    shard: int
    reader: int
    wanted: TensorGroup
    saved: TensorGroup
    keys: tuple[str, ...] | None
    region: Region

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> Take:
        receiver, shard, reader, wanted, saved, keys, region = tuples_of(fields)
        groups = TensorGroup(*wanted), TensorGroup(*saved)
        return cls(receiver, shard, reader, *groups, keys, region)


class Unsettled(NamedTuple):
    """Elements of some global tensors that several shards have, and do not say that they are equal.

    Ranks that shard a tensor over meshes of their own have such elements, as those of tensor
    parallelism where a layer is left out of it. ``holders`` are one shard for each set of ranks
    that says that it is equal, or two whose parts overlap.
    """

    keys: tuple[str, ...]
    region: Region
    holders: tuple[tuple[int, TensorGroup], ...]


@dataclass(slots=True)
class ReshardPlan:
    """Plan of a load on another number of ranks: each element is taken once, after a comparison."""

    takes: list[Take] = field(default_factory=list)
    unsettled: list[Unsettled] = field(default_factory=list)


def plan_reshard(
    saved: Mapping[int, Sequence[TensorGroup]],
    wanted: Mapping[int, Sequence[TensorGroup]],
    tables: Mapping[str, Keys],
    readers: Mapping[int, int],
    nodes: Sequence[str],
    *,
    held: Mapping[int, Collection[str]] = MappingProxyType({}),
    excluded: Iterable[str] = (),
    dropped: Iterable[str] = (),
    fits: TargetRules = STRICT,
) -> ReshardPlan:
    """Decide from whose shard each rank takes the elements that it wants.

    A rank reads itself what it takes from a shard that its node, by ``held``, holds; else the
    shard's reader does. Of equal parts in several shards the ranks take turns, those of a node with
    the shards that it holds. ``excluded`` are key prefixes of private
    tensors that are not taken, ``dropped`` of those that may be wanted by no rank. Raises
    MismatchError, which lists tensors of another dtype or shape, that were saved and are not
    wanted, or the reverse, or of which elements are in no shard.
    """
    excluded, dropped = frozenset(excluded), frozenset(dropped)
    all_keys, tables = tables, {name: _without(keys, excluded) for name, keys in tables.items()}
    places = {shard: held.get(shard) or [nodes[reader]] for shard, reader in readers.items()}
    sources = _Sources(saved, tables, places)
    differences = _differences(sources, wanted, tables, dropped, fits)
    plan = ReshardPlan()

    of_region: dict[str, dict[Region, list[int]]] = {}
    for rank, groups in wanted.items():
        for group in groups:
            of_region.setdefault(group.name, {}).setdefault(group.region, []).append(rank)
    for name, regions in of_region.items():
        for keys, holding in _divided(tables[name], sources.holding):
            if not holding:
                continue
            is_all = keys == all_keys[name].keys and holding == (name,)
            found = sources.of(holding)
            plan.unsettled += _unsettled(keys, tables[name].shape, found)
            for region, parts, lack in _covers(list(regions), list(found)):
                if lack:
                    differences += [f"{keys[0]}: elements {text_of(lack[0])} are in no shard"]
                    continue
                for rank in regions[region]:
                    for there, part in parts:
                        shard, group = found[there].for_rank(rank, nodes[rank])
                        is_here = nodes[rank] in held.get(shard, ())
                        reader = rank if is_here else readers[shard]
                        chosen, mine = None if is_all else keys, TensorGroup(name, region)
                        plan.takes.append(Take(rank, shard, reader, mine, group, chosen, part))
    if differences:
        raise mismatch(list(dict.fromkeys(differences)))
    return plan


class _Holders:
    """Shards that have the same elements: one for each set of ranks that says that it is equal."""

    def __init__(self) -> None:
        # On each node; by an empty name those of all nodes.
        self._on_node: dict[str, list[tuple[int, TensorGroup]]] = {}
        self._turns: dict[str, int] = {}
        self.of_sets: dict[str, tuple[int, TensorGroup]] = {}

    def add(self, shard: int, group: TensorGroup, nodes: Collection[str]) -> None:
        """Add a shard that is on some nodes."""
        self.of_sets.setdefault(group.equal_on, (shard, group))
        for node in ("", *nodes):
            self._on_node.setdefault(node, []).append((shard, group))

    def for_rank(self, rank: int, node: str) -> tuple[int, TensorGroup]:
        """Choose the shard that a rank takes the elements from."""
        place = node if node in self._on_node else ""
        shards = self._on_node[place]
        turn = self._turns.get(place, rank) % len(shards)
        self._turns[place] = turn + 1
        return shards[turn]


class _Sources:
    """Saved groups, by what they hold."""

    def __init__(
        self,
        saved: Mapping[int, Sequence[TensorGroup]],
        tables: Mapping[str, Keys],
        places: Mapping[int, Collection[str]],
    ) -> None:
        self._merged: dict[tuple[str, ...], dict[Region, _Holders]] = {}
        self._places = places
        self.holding: dict[tuple[str, tuple[int, ...], str], list[str]] = {}
        self.kinds: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
        self._members: dict[str, list[tuple[int, TensorGroup]]] = {}
        for shard, groups in saved.items():
            for group in groups:
                self._members.setdefault(group.name, []).append((shard, group))
        for name in self._members:
            dtype, shape, keys = tables[name]
            for key in keys:
                self.holding.setdefault((dtype, shape, key), []).append(name)
                self.kinds.setdefault(key, []).append((dtype, shape))

    def of(self, names: tuple[str, ...]) -> dict[Region, _Holders]:
        """Return, for the elements that shards have of tensors, the shards that have them."""
        if names not in self._merged:
            merged = self._merged[names] = {}
            for name in names:
                for shard, group in self._members[name]:
                    if volume(group.region):
                        holders = merged.setdefault(group.region, _Holders())
                        holders.add(shard, group, self._places[shard])
        return self._merged[names]


def _divided(
    keys: Keys, holding: Mapping[tuple[str, tuple[int, ...], str], list[str]]
) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Divide keys by the saved groups that have them."""
    parts: dict[tuple[str, ...], list[str]] = {}
    for key in keys.keys:
        names = tuple(holding.get((keys.dtype, keys.shape, key), ()))
        parts.setdefault(names, []).append(key)
    return [(tuple(those), names) for names, those in parts.items()]


def _unsettled(
    keys: tuple[str, ...], shape: Sequence[int], found: Mapping[Region, _Holders]
) -> list[Unsettled]:
    """Find elements that shards of several sets have, each set being equal in itself."""
    held = [(region, holders.of_sets) for region, holders in found.items()]
    if len({name for _, sets in held for name in sets}) < 2:
        return []
    result = [
        Unsettled(keys, region, tuple(of_sets.values()))
        for region, of_sets in held
        if len(of_sets) > 1
    ]
    # Parts that do not overlap, as of one mesh, are no more than the whole.
    if sum(volume(region) for region, _ in held) <= math.prod(shape):
        return result
    regions = [region for region, _ in held]
    for a, b in overlapping_pairs(regions, regions):
        (one, of_one), (other, of_other) = held[a], held[b]
        is_said = a >= b or not of_one.keys().isdisjoint(of_other)
        if not is_said and (shared := common(one, other)) is not None:
            two = next(iter(of_one.values())), next(iter(of_other.values()))
            result.append(Unsettled(keys, shared, two))
    return result


def require_equal(
    unsettled: Sequence[Unsettled], digests: Mapping[int, Mapping[str, Sequence[str]]]
) -> None:
    """Raise MismatchError unless what shards have of the same elements is equal.

    ``digests`` has for each shard, by the number of an item, the digests of its tensors in the
    order of the keys.
    """
    differences = []
    for number, (keys, _, holders) in enumerate(unsettled):
        (first, _), *others = holders
        expected = digests[first][str(number)]
        for shard, _ in others:
            pairs = zip(keys, expected, digests[shard][str(number)], strict=True)
            differences += [
                f"{key}: differs between the shards of ranks {first} and {shard}"
                for key, one, other in pairs
                if one != other
            ]
    if differences:
        raise MismatchError(
            f"tensors of one key differ between ranks that saved them: "
            f"{listed(list(dict.fromkeys(differences)))}. "
            f"Nothing was changed. Give tensors that differ keys of their own, or load on as many "
            f"ranks, with the same sharding, as saved them"
        )


def _covers(
    wanted: Sequence[Region], saved: Sequence[Region]
) -> Iterable[tuple[Region, list[tuple[Region, Region]], list[Region]]]:
    """Cover regions by others.

    Yields:
        Each wanted region; saved regions with the elements that are taken of each, no element
        twice; and the elements that are in none.
    """
    overlapping: dict[int, list[int]] = {}
    for w, s in overlapping_pairs(wanted, saved):
        overlapping.setdefault(w, []).append(s)
    for w, region in enumerate(wanted):
        left = [region] if volume(region) else []
        parts: list[tuple[Region, Region]] = []
        for s in overlapping.get(w, ()):
            if not left:
                break
            found = (common(piece, saved[s]) for piece in left)
            parts += [(saved[s], part) for part in found if part is not None]
            left = [rest for piece in left for rest in without(piece, saved[s])]
        yield region, parts, left


def _without(keys: Keys, excluded: frozenset[str]) -> Keys:
    """Leave keys out that are below some prefixes."""
    if not excluded:
        return keys
    return keys._replace(keys=tuple(key for key in keys.keys if prefix_in(key, excluded) is None))


def _differences(
    sources: _Sources,
    wanted: Mapping[int, Sequence[TensorGroup]],
    tables: Mapping[str, Keys],
    dropped: frozenset[str],
    fits: TargetRules,
) -> list[str]:
    """List the keys that only one side has, or that differ in dtype or shape."""
    lines = []
    names = dict.fromkeys(group.name for groups in wanted.values() for group in groups)
    given: set[str] = set()
    for name in names:
        dtype, shape, keys = tables[name]
        given.update(keys)
        for key in keys:
            kinds = sources.kinds.get(key, [])
            if not kinds:
                lines += [] if fits.lets_go(key) else [f"{key}: given, not saved"]
            elif (dtype, shape) not in kinds:
                was, size = kinds[0]
                lines.append(f"{key}: saved as {was} {list(size)}, given as {dtype} {list(shape)}")
    absent = (k for k in sources.kinds if k not in given and prefix_in(k, dropped) is None)
    lines += [
        f"{key}: saved, not given"
        for key in absent
        if not fits.is_partial and not fits.lets_go(key)
    ]
    return lines
