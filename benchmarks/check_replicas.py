"""Cost of a save that compares replicas, beside one that does not.

Two ranks of one node, whose states are equal, save by turns with and without, in shared memory.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import localckpt
from benchmarks.ranks import run_ranks
from benchmarks.report import Report
from benchmarks.setup import Options
from benchmarks.state import build_state, state_nbytes
from localckpt.ids import Generation, ShardIdentity
from localckpt.state_dict.global_view import Job
from localckpt.state_dict.image import ImagePlanner, pack
from localckpt.state_dict.replica_digests import replica_digests

__all__ = ["measure"]

_RANKS = 2
_TIMEOUT_S = 900.0
_WHAT = "stall", "complete, from the call", "processor time of the save"


def measure(options: Options) -> Report:
    """Both kinds of saves, and the digests alone, on the first of the ranks."""
    report = Report("check-replicas")
    command = [sys.executable, "-m", "benchmarks.check_replicas", str(options.directory)]
    lines = run_ranks([*command, str(options.width), str(options.rounds)], _RANKS, _TIMEOUT_S)
    told = json.loads(lines[0])
    nbytes, digests_s = told["nbytes"], told["digests_s"]
    for what, pairs in told["seconds"].items():
        comparison = report.compared(f"{what}, checked", "not checked", nbytes)
        for unchecked_s, checked_s in pairs:
            comparison.add(unchecked_s, checked_s)
    rate = f"{nbytes / digests_s / 1e9:.1f} GB/s"
    report.fact("digests alone", 1000 * digests_s, "ms of a processor", rate)
    return report


def _run_rank(root: Path, width: int, rounds: int) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    plain = build_state(width)
    state = {"all": localckpt.replicated(plain)}
    samples: dict[str, list[list[float]]] = {name: [] for name in _WHAT}
    managers = [
        localckpt.InMemoryCheckpointManager(name, root=root / name, check_replicas=every)
        for name, every in (("unchecked", None), ("checked", 1))
    ]
    with localckpt.AsyncCallsQueue() as queue:
        for iteration in range(rounds + 1):
            pairs = [_save(manager, state, iteration, queue) for manager in managers]
            # The first save of each makes its memory.
            if iteration:
                for name, pair in zip(_WHAT, zip(*pairs, strict=True), strict=True):
                    samples[name].append(list(pair))
    for manager in managers:
        manager.close()
    told = {
        "nbytes": state_nbytes(plain),
        "seconds": samples,
        "digests_s": _digests_s(state, rank),
    }
    print(json.dumps(told), flush=True)
    dist.destroy_process_group()


def _save(
    manager: localckpt.InMemoryCheckpointManager,
    state: object,
    iteration: int,
    queue: localckpt.AsyncCallsQueue,
) -> tuple[float, float, float]:
    dist.barrier()
    began, cpu = time.perf_counter(), time.process_time()
    request = manager.save(state, iteration, is_async=True)
    stall_s = time.perf_counter() - began
    queue.schedule_async_request(request)
    queue.maybe_finalize_async_calls(blocking=True)
    return stall_s, time.perf_counter() - began, time.process_time() - cpu


def _digests_s(state: object, rank: int) -> float:
    planner = ImagePlanner(job=Job(rank, range(_RANKS)))
    image = pack(state, ShardIdentity("", Generation(1, 1), 1, rank, _RANKS), planner).view
    seconds = []
    for _ in range(5):
        began = time.thread_time()
        replica_digests(image)
        seconds.append(time.thread_time() - began)
    return statistics.median(seconds)


if __name__ == "__main__":
    _run_rank(Path(sys.argv[1]), *map(int, sys.argv[2:]))
