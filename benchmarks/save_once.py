"""Saves and loads of a state that all ranks have equal: said to be so and divided, and whole.

``python -m benchmarks.save_once`` prints both for four ranks of one node, one after the other in
each round, in shared memory, of which only one is there at a time: four ranks with 1.49 GB each
take 18 GiB. With ``--nodes 2`` two ranks are on either of two nodes, which keep replicas of each
other's shards. ``--width`` is that of the GPT-2.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import localckpt
from benchmarks.ranks import run_ranks
from benchmarks.state import build_state, state_nbytes

__all__ = ["main"]

_RANKS = 4
_TIMEOUT_S = 900.0
_WHAT = (
    *("stall", "save, until complete", "processor time of the save"),
    *("load in place", "processor time of the load"),
)


def main(arguments: list[str]) -> None:
    """Start the ranks, and print the medians of the slowest rank of each round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--nodes", type=int, default=1, choices=(1, 2, 4))
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="localckpt-bench-") as root:
        command = [sys.executable, "-m", "benchmarks.save_once", "rank", root]
        numbers = map(str, (given.width, given.rounds, given.nodes))
        lines = run_ranks([*command, *numbers], _RANKS, _TIMEOUT_S)
    told = json.loads(lines[0])
    nbytes = told["nbytes"]
    print(
        f"{_RANKS} ranks, {_RANKS // given.nodes} on each node, {nbytes / 1e9:.2f} GB that all "
        f"have, medians of {given.rounds} rounds"
    )
    for what, (whole_s, divided_s) in told["seconds"].items():
        print(
            f"{what}: whole {1000 * whole_s:.1f} ms, divided {1000 * divided_s:.1f} ms "
            f"({divided_s / whole_s:.2f} x)"
        )
    whole, divided = (written / nbytes for written in told["written"])
    print(f"shards of all ranks: whole {whole:.3f} x the state, divided {divided:.3f} x")
    if given.nodes > 1:
        whole, divided = (sent / nbytes for sent in told["sent"])
        print(f"sent between nodes: whole {whole:.3f} x the state, divided {divided:.6f} x")


def _measure(root: Path, width: int, rounds: int, nodes: int) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    plain = build_state(width)
    # What is not said to be equal is private.
    states = plain, localckpt.replicated(plain)
    samples: dict[str, list[list[float]]] = {name: [[], []] for name in _WHAT}
    written, sent = [0, 0], [0, 0]
    for _ in range(rounds):
        for which, state in enumerate(states):
            with _manager(root, nodes, divided=bool(which)) as manager:
                # The first two saves make the memory.
                for iteration in range(3):
                    times = _round(manager, {"all": state}, iteration)
                report = manager.last_save
                assert report is not None, "it has saved"
                written[which] = int(_over_ranks(report.nbytes, dist.ReduceOp.SUM))
                sent[which] = int(_over_ranks(report.sent_nbytes or 0, dist.ReduceOp.SUM))
            for name, seconds in zip(_WHAT, times, strict=True):
                samples[name][which].append(seconds)
            # Both at a time, for four ranks of 1.49 GB, are more than 24 GiB.
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(root / "shards")
            dist.barrier()
    medians = {what: [statistics.median(of) for of in pair] for what, pair in samples.items()}
    told = {"nbytes": state_nbytes(plain), "seconds": medians, "written": written, "sent": sent}
    print(json.dumps(told), flush=True)
    dist.destroy_process_group()


def _manager(root: Path, nodes: int, *, divided: bool) -> localckpt.InMemoryCheckpointManager:
    strategy = localckpt.CliqueReplicationStrategy(replication_factor=nodes) if nodes > 1 else None
    node = dist.get_rank() * nodes // _RANKS
    return localckpt.InMemoryCheckpointManager(
        "bench", strategy, root=root / "shards" / str(node), divide_replicated=divided
    )


def _round(manager: Any, state: Any, iteration: int) -> list[float]:
    """Save and load once; the seconds of the slowest rank."""
    dist.barrier()
    with localckpt.AsyncCallsQueue() as queue:
        began, cpu = time.perf_counter(), time.process_time()
        request = manager.save(state, iteration, is_async=True)
        stall_s = time.perf_counter() - began
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)
    complete_s, save_cpu_s = time.perf_counter() - began, time.process_time() - cpu
    manager.find_latest()
    dist.barrier()
    began, cpu = time.perf_counter(), time.process_time()
    manager.load(into=state)
    load_s, load_cpu_s = time.perf_counter() - began, time.process_time() - cpu
    times = stall_s, complete_s, save_cpu_s, load_s, load_cpu_s
    return [_over_ranks(s, dist.ReduceOp.MAX) for s in times]


def _over_ranks(value: float, operation: Any) -> float:
    tensor = torch.tensor(float(value), dtype=torch.float64)
    dist.all_reduce(tensor, operation)
    return float(tensor)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        _measure(Path(sys.argv[2]), *map(int, sys.argv[3:6]))
    else:
        main(sys.argv[1:])
