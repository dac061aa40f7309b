"""Comparison of values that several ranks save under one name: shared storage keeps one for all.

Each rank hashes what it has in common with other ranks while it stages its part, and reports one
digest for each set of ranks with the outcome of the save. Only if digests differ do ranks send
those of single values. Parts of global tensors (DTensor, ShardedTensor) are compared where the
ranks are not all of one mesh or group, which keeps its own replicas equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.tensor import DTensor

from localckpt.errors import MismatchError
from localckpt.failure_texts import ranks_named
from localckpt.state_dict.boxes import RankSet
from localckpt.state_dict.values import digest_of

_SHOWN = 8


class CommonItems(NamedTuple):
    """Items of one rank's plan that a set of ranks has in common."""

    ranks: RankSet
    numbers: tuple[int, ...]


def common_items(plans: Sequence[SavePlan]) -> list[dict[int, CommonItems]]:
    """Group the items of each rank's plan that other ranks plan, too.

    Returns for each rank, by the number of a set of ranks, the items that these ranks have in
    common. Sets have the same numbers on all ranks.
    """
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
    """Digests of the values that this rank saves and other ranks save, too.

    ``plan`` is this rank's, before others were told to write some of its items.
    """

    def __init__(
        self,
        plan: SavePlan | None,
        common: Mapping[int, CommonItems],
        global_ranks: Sequence[int],
        planner: SavePlanner,
    ) -> None:
        assert plan is not None, "the save is planned"
        assert isinstance(planner, DefaultSavePlanner), "it is the manager's own"
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

    def told(self, asked: Mapping[str, Sequence[int]], rank: int) -> dict[str, dict[str, str]]:
        """Return the digests of single values for sets in which this rank is asked for them."""
        return {
            set_id: self._digests[int(set_id)] for set_id, ranks in asked.items() if rank in ranks
        }


def differing(reports: Sequence[Sequence[Sequence[Any]]]) -> dict[str, list[list[int]]]:
    """Find the sets of ranks whose values differ.

    Returns by the number of a set the ranks whose values are equal, in several lists.
    """
    by_digest: dict[int, dict[str, list[int]]] = {}
    for rank, pairs in enumerate(reports):
        for set_id, digest in pairs:
            by_digest.setdefault(set_id, {}).setdefault(digest, []).append(rank)
    return {
        str(set_id): list(groups.values())
        for set_id, groups in by_digest.items()
        if len(groups) > 1
    }


def judge_differing(
    iteration: int,
    groups: Mapping[str, Sequence[Sequence[int]]],
    told_by: Sequence[Mapping[str, Mapping[str, str]]],
) -> None:
    """Raise MismatchError that names the values that differ, and the ranks.

    ``told_by`` has what :meth:`CommonValues.told` returned where the first rank of each group was
    asked.
    """
    texts = []
    for set_id, equal in groups.items():
        firsts = [told_by[ranks[0]][set_id] for ranks in equal]
        for name in sorted(firsts[0].keys()):
            by_digest: dict[str | None, list[int]] = {}
            for ranks, told in zip(equal, firsts, strict=True):
                by_digest.setdefault(told.get(name), []).extend(ranks)
            if len(by_digest) > 1:
                of = " differs from ".join(ranks_named(ranks) for ranks in by_digest.values())
                texts.append(f"{name} ({of})")
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
