"""Plan of a drain: who writes what of the items that the images of all ranks have.

What a rank holds alone is compared among the ranks: equal values are written once, and of unequal
ones the first rank's; the image of each rank has its own. Pure functions of plain data.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import xxhash
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType

from localckpt.errors import MismatchError
from localckpt.state_dict.boxes import RankSet


@dataclass
class RankPlan:
    """Items that one rank's image has.

    Attributes:
        plan: The items, as DCP's planner would list them.
        digests: Digests of the values that other ranks may have under the same name.
        ranks: Ranks on which the image says that a part of a global tensor is equal.
    """

    plan: SavePlan
    digests: dict[MetadataIndex, str] = field(default_factory=dict)
    ranks: dict[MetadataIndex, RankSet] = field(default_factory=dict)


class Merged(NamedTuple):
    """Plans of all ranks, in which each value is written once.

    Attributes:
        plans: What each rank writes.
        metadata: Description of the checkpoint, without the places of the items.
        unequal: Keys whose values differ between ranks.
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


def merge_plans(parts: Sequence[RankPlan]) -> Merged:
    """Merge the plans of all ranks, in rank order; a pure function."""
    firsts, diverged = _firsts_of_unequal(parts), _diverged(parts)
    plans = [
        dataclasses.replace(
            part.plan,
            items=[
                item
                for item in part.plan.items
                if item.type == WriteItemType.SHARD or firsts.get(item.index.fqn, rank) == rank
            ],
        )
        for rank, part in enumerate(parts)
    ]
    try:
        finals, metadata = DefaultSavePlanner().create_global_plan(plans)
    except ValueError as error:
        raise MismatchError(
            f"the parts that ranks have of a tensor overlap, or do not make it up: {error}. "
            f"Nothing was drained"
        ) from error
    return Merged(finals, metadata, sorted({*firsts, *diverged}))


def _firsts_of_unequal(parts: Sequence[RankPlan]) -> dict[str, int | None]:
    """Find keys whose values differ, and the first rank that has each of them.

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
    return {
        key: None if key in sharded else min(values)
        for key, values in found.items()
        if len(set(values.values())) > 1 or key in sharded
    }


def _diverged(parts: Sequence[RankPlan]) -> set[str]:
    """Find keys of global tensors of which ranks differ that the image says are equal.

    Ranks that shard a tensor over meshes of their own do not say that their parts are equal, as
    those of tensor parallelism where a layer is left out of it. If these differ they are of two
    tensors, which is a MismatchError.
    """
    sets: dict[MetadataIndex, list[tuple[int, RankSet]]] = {}
    diverged: set[str] = set()
    for rank, part in enumerate(parts):
        for index, ranks in part.ranks.items():
            digest = part.digests.get(index)
            known = sets.setdefault(index, [])
            first = next((first for first, owners in known if rank in owners), None)
            if first is not None:
                if digest != parts[first].digests.get(index):
                    diverged.add(index.fqn)
                continue
            known.append((rank, ranks))
            first = known[0][0]
            if first != rank and (digest is None or digest != parts[first].digests.get(index)):
                raise MismatchError(
                    f"{index.fqn} at {list(index.offset or ())} is on ranks {first} and {rank}, "
                    f"and their values differ: two global tensors have one name. Give one of them "
                    f"another key. Nothing was drained"
                )
    return diverged


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
