"""Plan of a save, made once, and not again while no rank's structure changes.

torch's own cache of plans (``enable_plan_caching``) is kept by the name of the planner's class, so
two managers mix theirs up; it does not look at dtypes, so a model that was converted is described
as before; and after a plan that was refused only the coordinator goes on from it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.tensor import DTensor

from localckpt.availability.divergence import Divergence, judge_differences
from localckpt.errors import CheckpointingException, MismatchError
from localckpt.failure_texts import ranks_named
from localckpt.global_tier.drain_items import why_misdescribed
from localckpt.global_tier.metadata import CommonItems, pack, pickled_metadata, unpack
from localckpt.memory.tensor_bytes import flat_bytes
from localckpt.ranks.ranks import PerRank, Ranks, shaped
from localckpt.ranks.values import Message
from localckpt.state_dict.boxes import RankSet
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.sharded import is_sharded
from localckpt.state_dict.values import digest_of

_SHOWN = 8
MOST_COMPARED = 1024
"""Sets of ranks, and groups of a set that differ, of which each says what it has."""


class PlanCache:
    """Plans of a job's last save, as this rank knows them.

    Attributes:
        bytes_gathered: Bytes of the plans and results that the ranks sent to the coordinator for
            the last save; 0 elsewhere.
        common: This rank's items that other ranks plan, too, by the number of a set of ranks.
    """

    def __init__(self, allowed: SafeGlobals | None = None) -> None:
        self.allowed = allowed or SafeGlobals()
        self.bytes_gathered = 0
        self.local: SavePlan | None = None
        self.final: SavePlan | None = None
        self.metadata: Metadata | None = None
        self.common: dict[int, CommonItems] = {}
        # The metadata of the last checkpoint, its pickle, and its files.
        self._pickled: tuple[Metadata, bytes, dict[str, int]] | None = None
        self._last_report: list[WriteResult] | None = None
        self._last_reports: list[list[WriteResult]] | None = None

    @property
    def plan(self) -> SavePlan:
        """What this rank writes; for the planner's ``finish_plan``."""
        assert self.final is not None, "the save is planned"
        return self.final

    def clear(self) -> None:
        """Plan anew at the next save. All ranks do it after a save that failed on any."""
        self.local = self.final = self.metadata = self._pickled = None
        self._last_report = self._last_reports = None

    @contextmanager
    def kept_if_all_is_well(self) -> Iterator[None]:
        """Clear the plans if what is inside fails."""
        try:
            yield
        except BaseException:
            self.clear()
            raise

    def report_written(self, results: list[WriteResult], record: Any = None) -> Message:
        """Report of this rank to the coordinator: a record, and what it wrote unless as before."""
        before, self._last_report = self._last_report, results
        return Message(record, b"" if results == before else pack(results))

    def merge_written(self, reports: list[Message]) -> list[list[WriteResult]]:
        parts = [message.data for message in reports]
        self.bytes_gathered += sum(map(len, parts))
        if any(parts):
            self._pickled = None
        if self._last_reports is None:
            if not all(parts):
                raise MismatchError(
                    "some ranks count on what the coordinator has forgotten: save again, and "
                    "everything is planned anew"
                )
            self._last_reports = [[] for _ in parts]
        self._last_reports = [
            unpack(part, list, self.allowed) if part else last
            for part, last in zip(parts, self._last_reports, strict=True)
        ]
        return self._last_reports

    def pickled(self, reports: list[Message]) -> tuple[bytes, dict[str, int]]:
        """Pickle the metadata on the coordinator, unless it is that of the save before."""
        written, metadata = self.merge_written(reports), self.metadata
        assert metadata is not None, "the coordinator has planned"
        if self._pickled is None or self._pickled[0] is not metadata:
            pickled = pickled_metadata(metadata, chain.from_iterable(written))
            self._pickled = metadata, *pickled
        return self._pickled[1:]


def plan_save(
    ranks: Ranks,
    state_dict: dict[str, Any],
    planner: SavePlanner,
    writer: StorageWriter,
    cache: PlanCache,
    *,
    what: str,
    order: int | None = None,
    tag: Any,
    begin: Callable[[], Any],
    begun: Any = object,
    prepare: Callable[[SavePlan], SavePlan] = lambda plan: plan,
) -> Any:
    """Agree on who writes what; all ranks call it, with the same ``tag``.

    A rank whose structure is that of its last save sends none; if that holds for all, nobody plans.
    Each rank calls ``prepare`` with its plan, and the coordinator ``begin`` when all have planned;
    all ranks raise what they raise, and return what ``begin`` gives, of the shape ``begun``.
    """
    local: SavePlan | None = None
    metadata: Metadata | None = None

    def local_step() -> Message:
        nonlocal local
        planner.set_up_planner(
            state_dict={
                k: v.state_dict() if isinstance(v, Stateful) else v for k, v in state_dict.items()
            },
            storage_meta=writer.storage_meta(),
            is_coordinator=ranks.is_root,
        )
        _require_described(planner)
        local = prepare(planner.create_local_plan())
        if not local.usable:
            raise CheckpointingException(
                "the planner keeps plans itself: make it with enable_plan_caching=False; they are "
                "kept here"
            )
        return report()

    def report() -> Message:
        return Message(tag, b"" if local == cache.local else pack(local))

    def global_step(reports: list[Message]) -> PerRank | None:
        nonlocal metadata
        sent = [message.data for message in reports]
        cache.bytes_gathered = sum(map(len, sent))
        require_same([message.record for message in reports], ranks.global_ranks)
        if cache.metadata is not None and not any(sent):
            metadata = cache.metadata
            return PerRank(begin(), {})
        if not all(sent):
            return None
        plans = [unpack(plan, SavePlan, cache.allowed) for plan in sent]
        final, metadata = planner.create_global_plan(plans)
        parts = zip(writer.prepare_global_plan(final), common_items(plans), strict=True)
        packed = {rank: Message(None, pack(part)) for rank, part in enumerate(parts)}
        return PerRank(begin(), packed)

    def read(verdict: Any) -> Any:
        return verdict if verdict is None else shaped((begun, Message | None))(verdict)

    with cache.kept_if_all_is_well():
        planned: Any = ranks.commit(
            *(f"plan {what}", local_step, global_step),
            kind="plan the save",
            order=order,
            read=read,
        )
        if planned is None:
            # Some ranks have changed, or the coordinator has forgotten: all send their plans.
            cache.clear()
            planned = ranks.commit(
                f"plan {what} anew", report, global_step, kind="plan anew", read=read
            )
        told, changed = planned
    cache.local, cache.metadata = local, metadata
    if changed is not None:
        cache.final, cache.common = unpack(changed.data, tuple, cache.allowed)
    if cache.final is None:
        raise MismatchError(
            f"{what} has no plan for rank {ranks.rank} in the job's store, though it was told of "
            f"one. Does another program write to that store? Nothing was saved"
        )
    return told


def _require_described(planner: SavePlanner) -> None:
    """Refuse DTensors whose parts would be described as other ones, and nested tensors."""
    state = planner.state_dict if isinstance(planner, DefaultSavePlanner) else {}
    for key, value in state.items():
        # A ShardedTensor refuses to be asked.
        if isinstance(value, torch.Tensor) and not is_sharded(value) and value.is_nested:
            raise CheckpointingException(
                f"{key} is a nested tensor, whose parts cannot be loaded: save the list that its "
                f"unbind() gives. Nothing was saved, and older checkpoints stand"
            )
        if isinstance(value, DTensor) and (why := why_misdescribed(value)) is not None:
            raise MismatchError(
                f"{key} is a DTensor of which torch.distributed.checkpoint would describe another "
                f"part than this rank has: {why}. Save what its redistribute() or full_tensor() "
                f"gives. Nothing was saved, and older checkpoints stand"
            )


def require_same(tags: Sequence[Any], ranks: Sequence[int]) -> None:
    """Raise MismatchError if the ranks do not speak of the same checkpoint."""
    if any(tag != tags[0] for tag in tags):
        at = ", ".join(f"rank {r}: {json.dumps(t)}" for r, t in zip(ranks, tags, strict=True))
        raise MismatchError(
            f"the ranks do not speak of the same checkpoint ({at}). All ranks must make the same "
            f"calls in the same order. What was saved before stands"
        )


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


def common_digests(
    plan: SavePlan | None,
    common: Mapping[int, CommonItems],
    global_ranks: Sequence[int],
    planner: DefaultSavePlanner,
) -> dict[int, dict[str, str]]:
    """Digest the values that this rank and others save, by the number of their set, and by name."""
    assert plan is not None, "the save is planned"
    found: dict[int, dict[str, str]] = {}
    for set_id, (ranks, numbers) in common.items():
        owners = {global_ranks[rank] for rank in ranks}
        for number in numbers:
            index = plan.items[number].index
            part = planner.lookup_object(index)
            if owners <= _kept_equal_on(planner.state_dict[index.fqn]):
                continue
            digests = found.setdefault(set_id, {})
            # A rank may have several parts of one tensor.
            digests[index.fqn] = digests.get(index.fqn, "") + _digest(part)
    return found


def folded(digests: Mapping[int, Mapping[str, str]]) -> list[list[Any]]:
    """Return pairs of the number of a set of ranks and one digest of all its values."""
    return [
        [set_id, xxhash.xxh3_64_hexdigest(repr(sorted(of_set.items())).encode())]
        for set_id, of_set in digests.items()
    ]


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
