"""Comparison of values that several ranks save under one name: shared storage keeps one for all.

Each rank hashes what it has in common with other ranks while it stages its part, and reports the
digests with the outcome of the save. Parts of global tensors (DTensor, ShardedTensor) are compared
where the ranks are not all of one mesh or group, which keeps its own replicas equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.tensor import DTensor

from localckpt.errors import MismatchError
from localckpt.failure_texts import ranks_named
from localckpt.state_dict.values import digest_of

_SHOWN = 8


class CommonItems(NamedTuple):
    """Items of one rank's plan that a set of ranks has in common."""

    ranks: tuple[int, ...]
    numbers: tuple[int, ...]


def common_items(plans: Sequence[SavePlan]) -> list[tuple[CommonItems, ...]]:
    """Group the items of each rank's plan that other ranks plan, too, by the ranks that do."""
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
    in_order = [*sets]
    found: list[tuple[CommonItems, ...]] = []
    for plan in plans:
        items: dict[int, list[int]] = {}
        for number, item in enumerate(plan.items):
            if (set_number := of_index.get(item.index)) is not None:
                items.setdefault(set_number, []).append(number)
        found.append(tuple(CommonItems(in_order[n], tuple(items[n])) for n in items))
    return found


def common_digests(
    plan: SavePlan | None,
    common: Sequence[CommonItems],
    global_ranks: Sequence[int],
    planner: SavePlanner,
) -> dict[str, str]:
    """Digests of the values that this rank saves and other ranks save, too, by their places.

    ``plan`` is this rank's, before others were told to write some of its items.
    """
    assert plan is not None, "the save is planned"
    assert isinstance(planner, DefaultSavePlanner), "it is the manager's own"
    digests = {}
    for ranks, numbers in common:
        owners = {global_ranks[rank] for rank in ranks}
        for number in numbers:
            index = plan.items[number].index
            if not owners <= _kept_equal_on(planner.state_dict[index.fqn]):
                place = f"{[*(index.offset or ())]}{index.fqn}"
                digests[place] = _digest(planner.lookup_object(index))
    return digests


def require_equal(iteration: int, digests_of: Sequence[Mapping[str, str]]) -> None:
    """Raise MismatchError that names the values that differ, and the ranks.

    ``digests_of`` has what :func:`common_digests` returned, by rank.
    """
    owners: dict[str, dict[str, list[int]]] = {}
    for rank, digests in enumerate(digests_of):
        for place, digest in digests.items():
            owners.setdefault(place, {}).setdefault(digest, []).append(rank)
    texts = sorted(
        f"{place.partition(']')[2]} ({' differs from '.join(map(ranks_named, equal.values()))})"
        for place, equal in owners.items()
        if len(equal) > 1
    )
    if not texts:
        return
    shown = "; ".join(texts[:_SHOWN]) + f"; and {len(texts) - _SHOWN} more" * (len(texts) > _SHOWN)
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
    """Reduce a tensor to integers where it is, so that other bytes give other integers.

    Each eight bytes are mixed, as hash tables do it, and added up with odd weights.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    content = flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)
    whole = content.numel() // 8 * 8
    totals = []
    for start in range(0, whole, _REDUCED_NBYTES):
        words = content[start : min(start + _REDUCED_NBYTES, whole)].view(torch.int64)
        weights = torch.arange(1, 2 * len(words), 2, device=words.device)
        mixed = (words ^ (words >> 32)) * -0x61C8864680B583EB
        totals.append(((mixed ^ (mixed >> 29)) * weights).sum())
    rest = content[whole:].tolist()
    return [*(int(total) for total in totals), *rest]
