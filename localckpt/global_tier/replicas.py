"""Values that several ranks have under one name: compared, since shared storage keeps one for all.

In a save each rank hashes what it has in common with other ranks while it stages its part, and
reports one digest for each set of ranks. Only if these differ do ranks send those of single values.
In a drain the digests of single values are part of the plan, and where they differ the first rank's
value is written; the image of each rank has its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from localckpt.availability.divergence import Divergence, judge_differences
from localckpt.errors import MismatchError
from localckpt.failure_texts import ranks_named
from localckpt.memory.tensor_bytes import flat_bytes
from localckpt.state_dict.boxes import RankSet
from localckpt.state_dict.values import digest_of

_SHOWN = 8
MOST_COMPARED = 1024
"""Sets of ranks, and groups of a set that differ, of which each says what it has."""


class CommonItems(NamedTuple):
    """Items of one rank's plan that a set of ranks has in common."""

    ranks: RankSet
    numbers: tuple[int, ...]


def common_items(plans: Sequence[SavePlan]) -> list[dict[int, CommonItems]]:
    """Group the items of each rank's plan that others plan, too, by the number of their set."""
    owners: dict[MetadataIndex, list[int]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            owners.setdefault(item.index, []).append(rank)
    sets: dict[tuple[int, ...], int] = {}
    of_index = {
        index: sets.setdefault(tuple(ranks), len(sets))
        for index, ranks in owners.items()
        if len(ranks) > 1
    }
    of_set = [RankSet.of(ranks) for ranks in sets]
    found: list[dict[int, CommonItems]] = []
    for plan in plans:
        items: dict[int, list[int]] = {}
        for number, item in enumerate(plan.items):
            if (set_id := of_index.get(item.index)) is not None:
                items.setdefault(set_id, []).append(number)
        found.append({n: CommonItems(of_set[n], tuple(numbers)) for n, numbers in items.items()})
    return found


class CommonValues:
    """Digests of the values that this rank saves and other ranks save, too, by its own plan."""

    def __init__(
        self,
        plan: SavePlan | None,
        common: Mapping[int, CommonItems],
        global_ranks: Sequence[int],
        planner: DefaultSavePlanner,
    ) -> None:
        assert plan is not None, "the save is planned"
        self._digests: dict[int, dict[str, str]] = {}
        for set_id, (ranks, numbers) in common.items():
            owners = {global_ranks[rank] for rank in ranks}
            for number in numbers:
                index = plan.items[number].index
                part = planner.lookup_object(index)
                if owners <= _kept_equal_on(planner.state_dict[index.fqn]):
                    continue
                digests = self._digests.setdefault(set_id, {})
                # A rank may have several parts of one tensor.
                digests[index.fqn] = digests.get(index.fqn, "") + _digest(part)

    def folded(self) -> list[list[Any]]:
        """Return pairs of the number of a set of ranks and the digest of all values in common."""
        return [
            [set_id, xxhash.xxh3_64_hexdigest(repr(sorted(digests.items())).encode())]
            for set_id, digests in self._digests.items()
        ]

    def told(self, divergence: Divergence, rank: int) -> list[Any]:
        """Return the digests of single values for sets in which this rank is asked for them."""
        asked = [of.set_id for of in divergence.sets if rank in of.asked]
        return ["", {str(set_id): self._digests[set_id] for set_id in asked}]


def judge_differing(iteration: int, divergence: Divergence, told_by: Sequence[Any]) -> None:
    """Raise MismatchError that names the values that differ, and the ranks."""
    found = judge_differences(divergence, told_by)
    texts = [
        f"{one.key} ({' differs from '.join(map(ranks_named, sorted(one.groups)))})"
        for one in found.differences
    ]
    more = len(texts[_SHOWN:]) + found.more_tensors
    shown = "; ".join(texts[:_SHOWN]) + f"; and {more} more" * (more > 0)
    if others := sorted({rank for of in divergence.sets for rank in of.others}):
        shown += f"; {ranks_named(others)} differ too, nobody asked where"
    raise MismatchError(
        f"iteration {iteration} is not saved: ranks have different values under one name, of which "
        f"shared storage would keep one rank's for all: {shown}. Older checkpoints are as they "
        f"were. Give each of them a name of its own, such as f'stage{{rank}}' for the stages of a "
        f"pipeline, or have Checkpointer save one for each rank: private={{name: 'keep'}}. If they "
        f"are meant to be equal, the ranks have diverged: see check_replicas"
    )


def _kept_equal_on(value: Any) -> set[int]:
    """Return the ranks of the job that shard a global tensor together, and keep replicas equal."""
    if isinstance(value, DTensor):
        return set(value.device_mesh.mesh.flatten().tolist())
    if isinstance(value, ShardedTensor):
        return set(dist.get_process_group_ranks(value._process_group))
    return set()


def _digest(value: Any) -> str:
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.is_cpu:
        return digest_of(value, str)
    return f"{value.dtype}{tuple(value.shape)}{_device_digest(value)}"


# Bytes of a tensor that are reduced at once: what is made meanwhile is eight times as large.
_REDUCED_NBYTES = 64 << 20


def _device_digest(tensor: torch.Tensor) -> list[int]:
    """Reduce a tensor to integers where it is: its bytes, mixed as hash tables do, with weights."""
    content = flat_bytes(tensor.detach().resolve_conj().resolve_neg().contiguous())
    whole = content.numel() // 8 * 8
    totals = []
    for start in range(0, whole, _REDUCED_NBYTES):
        part = content[start : min(start + _REDUCED_NBYTES, whole)]
        # Bytes that begin within a word cannot be viewed as words.
        words = (part.clone() if part.storage_offset() % 8 else part).view(torch.int64)
        weights = torch.arange(1, 2 * len(words), 2, device=words.device)
        mixed = (words ^ (words >> 32)) * -0x61C8864680B583EB
        totals.append(((mixed ^ (mixed >> 29)) * weights).sum())
    rest = content[whole:].tolist()
    return [*(int(total) for total in totals), *rest]


@dataclass
class RankPlan:
    """Items that one rank's image has, with digests of values that other ranks may have, too.

    ``ranks`` are those on which the image says that a part of a global tensor is equal.
    """

    plan: SavePlan
    digests: dict[MetadataIndex, str] = field(default_factory=dict)
    ranks: dict[MetadataIndex, RankSet] = field(default_factory=dict)


class Merged(NamedTuple):
    """Plans of all ranks, in which each value is written once; ``unequal`` keys differ on ranks."""

    plans: list[SavePlan]
    metadata: Metadata
    unequal: list[str]


def choose_readers(
    lacking: Sequence[int], readable: Sequence[Collection[int]]
) -> dict[int, list[int]]:
    """Choose ranks to read the shards that the nodes of their own ranks lack, where any can."""
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
        replace(
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

    No rank is the first to have a value that is under the key of a global tensor of others.
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

    If parts of one name differ that are on meshes of their own, they are of two tensors, which is a
    MismatchError.
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

    def row(item: WriteItem) -> tuple[Any, ...]:
        name, data = (item.index.fqn, item.index.offset, item.type.name), item.tensor_data
        return name if data is None else (*name, data.chunk.sizes, data.properties.dtype)

    rows = [[row(item) for item in plan.items] for plan in merged.plans]
    return xxhash.xxh3_128_hexdigest(repr(rows).encode())
