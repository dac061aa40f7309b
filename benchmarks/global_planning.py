"""What planning a global save costs: the first time, and the next, when nothing has changed.

On one rank, on 8 ranks over gloo, and on 1,024 that one process stands for: rank 0 plans with what
the others would send, made from its own plan. Beside ours torch's planner with its cache of plans.
"""

from __future__ import annotations

import gc
import json
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map

from benchmarks.ranks import run_ranks
from benchmarks.report import Report
from benchmarks.setup import Options
from benchmarks.state import build_state
from localckpt.global_tier.save_plan import plan_save
from localckpt.global_tier.storage_writer import FileSystemWriterAsync
from localckpt.ranks.ranks import PerRank, Ranks
from localckpt.ranks.values import Message

__all__ = ["measure"]

T = TypeVar("T")
R = TypeVar("R")

_REAL, _SIMULATED = (1, 8), 1024
_GOAL = 0.05
_TIMEOUT_S = 1500.0
# A first plan of 1,024 ranks takes a minute, ours and torch's.
_SIMULATED_ROUNDS = 2
# Plans hold shapes and no values, so a narrow model does; every rank has rows of every tensor.
_WIDTH, _ROWS, _REPLICATED = 8, _SIMULATED, 8
_NOWHERE = "nothing-is-written"


def measure(options: Options) -> Report:
    """Each number of ranks in processes of its own; of the ranks the slowest counts."""
    report = Report("global-planning")
    for ranks in _REAL:
        samples = _run(ranks, [str(options.rounds)])
        _tell(report, f"{ranks} rank{'s' * (ranks > 1)}", samples)
    samples = _run(1, [str(min(options.rounds, _SIMULATED_ROUNDS)), str(_SIMULATED)])
    _tell(report, f"{_SIMULATED:,} ranks simulated", samples, _GOAL)
    return report


class _Planned(NamedTuple):
    """One save."""

    total_s: float
    local_s: float
    """What of it each rank does for itself; 0 where that is not told apart."""
    nbytes: float
    """What a rank sends to the coordinator."""


# For ours and for torch: the first saves, and the second ones.
_Samples = dict[str, list[list[_Planned]]]


def _run(ranks: int, arguments: list[str]) -> _Samples:
    command = [sys.executable, "-m", "benchmarks.global_planning", *arguments]
    outputs = [json.loads(output) for output in run_ranks(command, ranks, _TIMEOUT_S)]
    slowest: _Samples = {}
    for way in outputs[0]:
        slowest[way] = [
            [
                _Planned(*map(max, zip(*of_ranks, strict=True)))
                for of_ranks in zip(*saves, strict=True)
            ]
            for saves in zip(*(output[way] for output in outputs), strict=True)
        ]
    return slowest


def _tell(report: Report, name: str, samples: _Samples, goal: float | None = None) -> None:
    ours, torchs = samples["ours"], samples["torch"]
    for save, mine, other in zip(("first", "second"), ours, torchs, strict=True):
        seconds = [planned.total_s * 1e3 for planned in mine]
        spread = f"{min(seconds):.1f} to {max(seconds):.1f} over {len(mine)}"
        other_ms = median(planned.total_s for planned in other) * 1e3
        ratio = median(m.total_s / o.total_s for m, o in zip(mine, other, strict=True))
        note = f"{spread}; torch: {other_ms:.1f}, ours {ratio:.2f} of it"
        report.fact(f"{save} plan, {name}", median(seconds), "ms", note)
        local_ms, other_ms = (median(p.local_s for p in way) * 1e3 for way in (mine, other))
        if local_ms:
            note = f"plan, compare, pickle; torch: {other_ms:.1f}"
            report.fact("of it one rank's own part", local_ms, "ms", note)
        note = f"torch: {other[0].nbytes / 1e3:.4g}"
        report.fact("gathered from each rank", mine[0].nbytes / 1e3, "kB", note)
    ratio, other_ratio = (
        median(second.total_s / first.total_s for first, second in zip(*way, strict=True))
        for way in (ours, torchs)
    )
    note = f"torch: {other_ratio:.4f}"
    report.fact(f"second plan, of the first, {name}", ratio, "", note, goal)


# What follows runs on the ranks.


def _run_rank(rounds: int, simulated: int) -> None:
    torch.set_num_threads(1)
    if simulated:
        # It knows how many ranks there are, and reaches none of them.
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=simulated)
    else:
        dist.init_process_group("gloo", timeout=timedelta(seconds=_TIMEOUT_S))
    state = _sharded_state(init_device_mesh("cpu", (dist.get_world_size(),)))
    others = _plans_of_others(state, simulated)
    samples: _Samples = {"ours": [[], []], "torch": [[], []]}
    for _ in range(rounds):
        for way, plan_twice in (("ours", _plan_ours), ("torch", _plan_torchs)):
            for saves, planned in zip(samples[way], plan_twice(state, others), strict=True):
                saves.append(planned)
    dist.destroy_process_group()
    print(json.dumps(samples))


def _sharded_state(mesh: DeviceMesh) -> dict[str, Any]:
    """As FSDP2 has it: each of the 592 tensors in rows, beside a few that all ranks have whole."""

    def sharded(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        rows = torch.empty(_ROWS // mesh.size(), *leaf.shape[1:])
        return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False)

    state: dict[str, Any] = tree_map(sharded, build_state(_WIDTH))
    return state | {"replicated": [torch.empty(_WIDTH) for _ in range(_REPLICATED)]}


def _plans_of_others(state: dict[str, Any], simulated: int) -> list[bytes]:
    """What the ranks that are not there would send: the plan of rank 0, with their own rows."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state)
    plan = planner.create_local_plan()
    return [
        pickle.dumps(replace(plan, items=[_of_rank(rank, item) for item in plan.items]))
        for rank in range(1, simulated)
    ]


def _of_rank(rank: int, item: WriteItem) -> WriteItem:
    if item.type != WriteItemType.SHARD or item.tensor_data is None:
        return item
    chunk = item.tensor_data.chunk
    offsets = torch.Size((rank * chunk.sizes[0], *chunk.offsets[1:]))
    return replace(
        item,
        index=replace(item.index, offset=offsets),
        tensor_data=replace(item.tensor_data, chunk=replace(chunk, offsets=offsets)),
    )


def _plan_ours(state: dict[str, Any], others: Sequence[bytes]) -> list[_Planned]:
    writer = FileSystemWriterAsync(_NOWHERE)
    ranks = _SimulatedRanks(others) if others else Ranks("planning")

    def plan() -> None:
        planner = DefaultSavePlanner()
        plan_save(
            *(ranks, state, planner, writer, writer.plans),
            what="a save",
            tag="benchmark",
            begin=lambda: None,
        )

    planned = []
    for _ in range(2):
        total_s = _timed_s(plan)
        local_s = ranks.local_s if isinstance(ranks, _SimulatedRanks) else 0.0
        nbytes = writer.plans.bytes_gathered / ranks.world_size
        planned.append(_Planned(total_s, local_s, nbytes))
    writer.close()
    return planned


def _plan_torchs(state: dict[str, Any], others: Sequence[bytes]) -> list[_Planned]:
    """As ``dcp.save`` plans."""
    # It is kept for the whole process.
    for cache in vars(SavePlanner).values():
        if isinstance(cache, dict):
            cache.clear()
    writer = FileSystemWriter(_NOWHERE)
    ranks = _SimulatedCollectives(others) if others else _DistWrapper(None, True, 0)
    sent: list[SavePlan] = []

    def plan() -> None:
        planner = DefaultSavePlanner(enable_plan_caching=True)

        def local_step() -> SavePlan:
            planner.set_up_planner(state, writer.storage_meta(), ranks.is_coordinator)
            sent.append(planner.create_local_plan())
            return sent[-1]

        def global_step(plans: list[SavePlan]) -> list[SavePlan]:
            return writer.prepare_global_plan(planner.create_global_plan(plans)[0])

        planner.finish_plan(ranks.reduce_scatter("plan", local_step, global_step))

    planned = []
    for _ in range(2):
        total_s = _timed_s(plan)
        local_s = ranks.local_s if isinstance(ranks, _SimulatedCollectives) else 0.0
        planned.append(_Planned(total_s, local_s, len(pickle.dumps(sent[-1]))))
    return planned


def _timed_s(plan: Callable[[], None]) -> float:
    gc.collect()
    dist.barrier()
    began = time.perf_counter()
    plan()
    return time.perf_counter() - began


class _SimulatedRanks(Ranks):
    """Rank 0 among others that say what rank 0 says: their plan, or that nothing has changed."""

    def __init__(self, others: Sequence[bytes]) -> None:
        self.rank, self.root, self.world_size = 0, 0, 1 + len(others)
        self.global_ranks = list(range(self.world_size))
        self.local_s = 0.0
        self.is_root = True
        self._others = others

    def commit(
        self,
        what: str,
        work: Callable[[], Any],
        commit: Callable[[list[Any]], Any],
        *,
        kind: str = "",
        order: int | None = None,
        timeout_s: float | None = None,
        on_failure: Callable[[], None] | None = None,
        read: Callable[[Any], Any] | None = None,
    ) -> Any:
        began = time.perf_counter()
        said: Message = work()
        self.local_s = time.perf_counter() - began
        others = (Message(said.record, other) if said.data else said for other in self._others)
        planned: PerRank = commit([said, *others])
        return planned.common, planned.parts.get(0)


class _SimulatedCollectives:
    """The same for torch: what it does between the ranks, without sending anything."""

    is_coordinator = True

    def __init__(self, others: Sequence[bytes]) -> None:
        self.local_s = 0.0
        self._others = others

    @property
    def is_root(self) -> bool:
        return True

    def reduce_scatter(
        self, step: str, map_fun: Callable[[], T], reduce_fun: Callable[[list[T]], list[R]]
    ) -> R:
        began = time.perf_counter()
        plan: Any = map_fun()
        said = pickle.dumps(plan)
        self.local_s = time.perf_counter() - began
        others = (other if plan.usable else said for other in self._others)
        gathered = [pickle.loads(each) for each in (said, *others)]
        scattered = [pickle.dumps(answer) for answer in reduce_fun(gathered)]
        answer: R = pickle.loads(scattered[0])
        return answer


if __name__ == "__main__":
    _run_rank(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
