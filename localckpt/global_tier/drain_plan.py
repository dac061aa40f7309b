"""Plan of a drain: who writes what of the items that the images of all ranks have.

What a rank holds alone is compared among the ranks: equal values are written once; of unequal ones
each is kept under a key of its own. Pure functions of plain data.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import xxhash
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from localckpt.errors import MismatchError
from localckpt.state_dict.boxes import RankSet


@dataclass
class RankPlan:
    """Items that one rank's image has.

    Attributes:
        plan: The items, as DCP's planner would list them.
        digests: Digests of the values that other ranks may have under the same name.
        ranks: Ranks on which the image says that a part of a global tensor is equal.
        names_ranks: Whether values that differ get a key for each rank, too. A training loop finds
            them in the images.
    """

    plan: SavePlan
    digests: dict[MetadataIndex, str] = field(default_factory=dict)
    ranks: dict[MetadataIndex, RankSet] = field(default_factory=dict)
    names_ranks: bool = True


class Merged(NamedTuple):
    """Plans of all ranks, in which each value is written once.

    Attributes:
        plans: What each rank writes.
        metadata: Description of the checkpoint, without the places of the items.
    """

    plans: list[SavePlan]
    metadata: Metadata
    unequal: list[str]


def choose_readers(
    lacking: Sequence[int], readable: Sequence[Collection[int]]
) -> dict[int, list[int]]:
    """Choose ranks to read the shards that the nodes of their own ranks lack.

    Those that nobody can read are left out.
    """
    # The others have a shard of their own to read.
    loads = [int(rank not in lacking) for rank in range(len(readable))]
    chosen: dict[int, list[int]] = {}
    for owner in lacking:
        able = [rank for rank, shards in enumerate(readable) if owner in shards]
        if able:
            reader = min(able, key=lambda rank: (loads[rank], rank))
            loads[reader] += 1
            chosen.setdefault(reader, []).append(owner)
    return chosen


def own_key(key: str, rank: int) -> str:
    """Key of one rank's value, where the values of ranks differ."""
    return f"{key}.of_rank_{rank}"


def unsettled(parts: Sequence[RankPlan]) -> dict[int, list[MetadataIndex]]:
    """Find parts of global tensors that ranks have which do not say that theirs are equal.

    Ranks that shard a tensor over meshes of their own have such parts, as those of tensor
    parallelism where a layer is left out of it.

    Returns the parts whose digests are lacking, for one rank of each set that says it is equal.
    """
    lacking: dict[int, list[MetadataIndex]] = {}
    for index, ranks in _tellers(parts).items():
        for rank in ranks:
            if index not in parts[rank].digests:
                lacking.setdefault(rank, []).append(index)
    return lacking


def merge_plans(parts: Sequence[RankPlan]) -> Merged:
    """Merge the plans of all ranks, in rank order; a pure function."""
    _require_one_value(parts)
    unequal, firsts = _unequal(parts)
    plans = [_with_own_keys(part, rank, unequal, firsts) for rank, part in enumerate(parts)]
    if any(part.names_ranks for part in parts):
        _require_free(parts, unequal)
    try:
        finals, metadata = DefaultSavePlanner().create_global_plan(plans)
    except ValueError as error:
        raise MismatchError(
            f"the parts that ranks have of a tensor overlap, or do not make it up: {error}. "
            f"Nothing was drained"
        ) from error
    return Merged(finals, metadata, sorted({*unequal, *_diverged(parts)}))


def _tellers(parts: Sequence[RankPlan]) -> dict[MetadataIndex, list[int]]:
    """For each part that is in several sets of ranks, the first rank of each."""
    sets: dict[MetadataIndex, list[tuple[int, RankSet]]] = {}
    for rank, part in enumerate(parts):
        for index, ranks in part.ranks.items():
            known = sets.setdefault(index, [])
            if not any(rank in owners for _, owners in known):
                known.append((rank, ranks))
    return {index: [rank for rank, _ in known] for index, known in sets.items() if len(known) > 1}


def _require_one_value(parts: Sequence[RankPlan]) -> None:
    """Check that parts which are not said to be equal are so."""
    for index, (first, *others) in _tellers(parts).items():
        digest = parts[first].digests.get(index)
        for rank in others:
            if digest is None or parts[rank].digests.get(index) != digest:
                raise MismatchError(
                    f"{index.fqn} at {list(index.offset or ())} is on ranks {first} and {rank}, "
                    f"and their values differ: two global tensors have one name. Give one of them "
                    f"another key. Nothing was drained"
                )


def _unequal(parts: Sequence[RankPlan]) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Keys whose values differ, with the ranks that have them, and with the first of these.

    A value that another rank has under the key of a global tensor is none of its parts, and no rank
    is the first to have it.
    """
    found: dict[str, dict[int, tuple[Any, ...]]] = defaultdict(dict)
    sharded: set[str] = set()
    for rank, part in enumerate(parts):
        for item in part.plan.items:
            if item.type == WriteItemType.SHARD:
                sharded.add(item.index.fqn)
            else:
                found[item.index.fqn][rank] = (part.digests.get(item.index), item.type)
    unequal = {
        key: sorted(values)
        for key, values in found.items()
        if len(set(values.values())) > 1 or key in sharded
    }
    return unequal, {key: ranks[0] for key, ranks in unequal.items() if key not in sharded}


def _diverged(parts: Sequence[RankPlan]) -> set[str]:
    """Keys of global tensors that ranks have otherwise where the image says they are equal."""
    seen: dict[MetadataIndex, str | None] = {}
    return {
        index.fqn
        for part in parts
        for index in part.ranks
        if seen.setdefault(index, part.digests.get(index)) != part.digests.get(index)
    }


def _with_own_keys(
    part: RankPlan, rank: int, unequal: Mapping[str, Sequence[int]], firsts: Mapping[str, int]
) -> SavePlan:
    """Add each value that differs under its rank's key, if the part names ranks.

    Of each key the rank among ``firsts`` has the plain key, too.
    """
    items: list[WriteItem] = []
    plan = part.plan
    paths = dict(plan.planner_data)
    for item in plan.items:
        key = item.index.fqn
        if key not in unequal or item.type == WriteItemType.SHARD:
            items.append(item)
            continue
        if rank == firsts.get(key):
            items.append(item)
        if not part.names_ranks:
            continue
        renamed = own_key(key, rank)
        items.append(dataclasses.replace(item, index=dataclasses.replace(item.index, fqn=renamed)))
        paths[renamed] = (renamed,)
    return dataclasses.replace(plan, items=items, planner_data=paths)


def _require_free(parts: Sequence[RankPlan], unequal: Mapping[str, Sequence[int]]) -> None:
    taken = {item.index.fqn for part in parts for item in part.plan.items}
    for key, ranks in unequal.items():
        for rank in ranks:
            if own_key(key, rank) in taken:
                raise MismatchError(
                    f"{key} differs between ranks, and {own_key(key, rank)} is the key of another "
                    f"value: give one of them another name. Nothing was drained"
                )


def fingerprint(merged: Merged) -> str:
    """Digest of what is written where, the same for the same images."""
    rows = [
        [
            (
                item.index.fqn,
                None if item.index.offset is None else tuple(item.index.offset),
                item.type.name,
                None if item.tensor_data is None else tuple(item.tensor_data.chunk.sizes),
                None if item.tensor_data is None else str(item.tensor_data.properties.dtype),
            )
            for item in plan.items
        ]
        for plan in merged.plans
    ]
    return xxhash.xxh3_128_hexdigest(repr(rows).encode())
