"""Saves and loads of a state that all ranks have equal: said to be so and divided, and whole.

Four ranks save both in each round, in shared memory, of which only one is there at a time: four
ranks with 1.49 GB each take 18 GiB. Which is first changes with each round, and of the loads after
a save the median counts: the host of a virtual machine takes processor time at about the same
moment of every round, and so from the same one of the loads. The ranks are on one node; then two
are on either of two nodes, which keep replicas of each other's shards, with half the width of
model.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import localckpt
from benchmarks.ranks import run_ranks
from benchmarks.report import Report
from benchmarks.setup import Options
from benchmarks.state import Training, build_state, state_nbytes

__all__ = ["measure"]

_RANKS = 4
_LOADS = 5
_TIMEOUT_S = 900.0
# The greatest ratio that is good on one node, of what one round gives.
_GOALS = {
    "stall": 0.35,
    "save, until complete": None,
    "processor time of the save": None,
    "load in place": 1.2,
    "processor time of the load": None,
}
# Headers and tables are not divided. Of two ranks of a node each sends half.
_WRITTEN_GOAL, _SENT_GOAL = 1.01, 0.51


def measure(options: Options) -> Report:
    """Times on one node and on two, and what is written and sent there."""
    report = Report("save-once")
    _measure_nodes(report, options, 1, options.width)
    _measure_nodes(report, options, 2, options.width // 2)
    return report


def _measure_nodes(report: Report, options: Options, nodes: int, width: int) -> None:
    command = [sys.executable, "-m", "benchmarks.save_once", str(options.directory)]
    lines = run_ranks([*command, *map(str, (width, options.rounds, nodes))], _RANKS, _TIMEOUT_S)
    told = json.loads(lines[0])
    nbytes = told["nbytes"]
    where = f"{_RANKS} ranks on {nodes} node{'s' if nodes > 1 else ''}"
    for what, goal in _GOALS.items():
        name = f"{what}, divided, {where}"
        comparison = report.compared(name, "whole", nbytes, goal if nodes == 1 else None)
        for whole_s, divided_s in told["seconds"][what]:
            comparison.add(whole_s, divided_s)
    for what, goal in (("written", nodes * _WRITTEN_GOAL), ("sent", _SENT_GOAL)):
        whole, divided = (count / nbytes for count in told[what])
        if whole:
            note = f"whole {whole:.3f}"
            report.fact(f"bytes {what}, divided, {where}", divided, "x the state", note, goal)


def _run_rank(root: Path, width: int, rounds: int, nodes: int) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    plain = build_state(width)
    training = Training(plain)
    # What is not said to be equal is private.
    states = plain, localckpt.replicated(plain)
    samples: dict[str, list[list[float]]] = {name: [] for name in _GOALS}
    written, sent = [0, 0], [0, 0]
    for number in range(rounds):
        pairs: list[list[float]] = [[], []]
        for which in (0, 1) if number % 2 else (1, 0):
            state = {"all": states[which]}
            with _manager(root, nodes, divided=bool(which)) as manager:
                # The first two saves make the memory, and the first two loads touch it.
                for iteration in range(3):
                    training.step()
                    save_times = _save(manager, state, iteration)
                    manager.find_latest()
                    loads = [_load(manager, state)]
                loads += [_load(manager, state) for _ in range(_LOADS - 1)]
                load_times = [median(times) for times in zip(*loads, strict=True)]
                report = manager.last_save
                assert report is not None, "it has saved"
                written[which] = int(_over_ranks(report.nbytes, dist.ReduceOp.SUM))
                sent[which] = int(_over_ranks(report.sent_nbytes or 0, dist.ReduceOp.SUM))
            pairs[which] = [*save_times, *load_times]
            # Both at a time, for four ranks of 1.49 GB, are more than 24 GiB.
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(root / "shards")
            dist.barrier()
        for name, pair in zip(_GOALS, zip(*pairs, strict=True), strict=True):
            samples[name].append(list(pair))
    told = {"nbytes": state_nbytes(plain), "seconds": samples, "written": written, "sent": sent}
    print(json.dumps(told), flush=True)
    dist.destroy_process_group()


def _manager(root: Path, nodes: int, *, divided: bool) -> localckpt.InMemoryCheckpointManager:
    strategy = localckpt.CliqueReplicationStrategy(replication_factor=nodes) if nodes > 1 else None
    node = dist.get_rank() * nodes // _RANKS
    return localckpt.InMemoryCheckpointManager(
        "bench", strategy, root=root / "shards" / str(node), divide_replicated=divided
    )


def _save(manager: Any, state: Any, iteration: int) -> list[float]:
    """Save once; the seconds of the slowest rank."""
    dist.barrier()
    with localckpt.AsyncCallsQueue() as queue:
        began, cpu = time.perf_counter(), time.process_time()
        request = manager.save(state, iteration, is_async=True)
        stall_s = time.perf_counter() - began
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)
    times = stall_s, time.perf_counter() - began, time.process_time() - cpu
    return [_over_ranks(s, dist.ReduceOp.MAX) for s in times]


def _load(manager: Any, state: Any) -> list[float]:
    """Load once, in place; the seconds of the slowest rank."""
    dist.barrier()
    began, cpu = time.perf_counter(), time.process_time()
    manager.load(into=state)
    times = time.perf_counter() - began, time.process_time() - cpu
    return [_over_ranks(s, dist.ReduceOp.MAX) for s in times]


def _over_ranks(value: float, operation: Any) -> float:
    tensor = torch.tensor(float(value), dtype=torch.float64)
    dist.all_reduce(tensor, operation)
    return float(tensor)


if __name__ == "__main__":
    _run_rank(Path(sys.argv[1]), *map(int, sys.argv[2:]))
