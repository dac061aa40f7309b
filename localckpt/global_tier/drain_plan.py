"""Plan of a drain: who writes what of the items that the images of all ranks have.

What a rank holds alone is compared among the ranks: equal values are written once, and of unequal
ones the first rank's; the image of each rank has its own. Pure functions of plain data.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
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
    firsts = _firsts_of_unequal(parts)
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
    return Merged(finals, metadata, sorted({*firsts, *_diverged(parts)}))


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
    """Keys of global tensors that ranks have otherwise where the image says they are equal."""
    seen: dict[MetadataIndex, str | None] = {}
    return {
        index.fqn
        for part in parts
        for index in part.ranks
        if seen.setdefault(index, part.digests.get(index)) != part.digests.get(index)
    }


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
