"""Cost of a save that compares replicas, beside one that does not.

``python -m benchmarks.check_replicas`` prints it for two ranks of one node, whose states are equal,
in shared memory. ``--width`` makes the GPT-2 smaller (768 is 1.49 GB a rank).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import localckpt
from benchmarks.ranks import run_ranks
from benchmarks.state import build_state, state_nbytes
from localckpt.ids import Generation, ShardIdentity
from localckpt.state_dict.global_view import Job
from localckpt.state_dict.image import ImagePlanner, pack
from localckpt.state_dict.replica_digests import replica_digests

__all__ = ["main"]

_RANKS = 2
_TIMEOUT_S = 900.0


def main(arguments: list[str]) -> None:
    """Start the ranks, and print what the first one measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="localckpt-bench-") as root:
        command = [sys.executable, "-m", "benchmarks.check_replicas", "rank"]
        lines = run_ranks([*command, root, str(given.width), str(given.rounds)], _RANKS, _TIMEOUT_S)
    told = json.loads(lines[0])
    nbytes = told.pop("nbytes")
    print(f"{_RANKS} ranks, {nbytes / 1e9:.2f} GB each, medians of {given.rounds} saves")
    for what, (unchecked_s, checked_s) in told["pairs"].items():
        print(
            f"{what}: {1000 * unchecked_s:.1f} ms, with the comparison {1000 * checked_s:.1f} ms "
            f"({checked_s / unchecked_s:.2f} x)"
        )
    rate = nbytes / told["digests_s"] / 1e9
    print(f"digests alone: {1000 * told['digests_s']:.1f} ms of a processor, {rate:.1f} GB/s")


def _measure(root: Path, width: int, rounds: int) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    plain = build_state(width)
    state = {"all": localckpt.replicated(plain)}
    what = ("stall", "complete, from the call", "processor time of the save")
    samples: dict[str, list[list[float]]] = {name: [[], []] for name in what}
    managers = [
        localckpt.InMemoryCheckpointManager(name, root=root / name, check_replicas=every)
        for name, every in (("unchecked", None), ("checked", 1))
    ]
    with localckpt.AsyncCallsQueue() as queue:
        for iteration in range(rounds + 1):
            for which, manager in enumerate(managers):
                dist.barrier()
                began, cpu = time.perf_counter(), time.process_time()
                request = manager.save(state, iteration, is_async=True)
                stall_s = time.perf_counter() - began
                queue.schedule_async_request(request)
                queue.maybe_finalize_async_calls(blocking=True)
                complete_s = time.perf_counter() - began
                # The first save of each makes its memory.
                if iteration:
                    times = stall_s, complete_s, time.process_time() - cpu
                    for name, seconds in zip(what, times, strict=True):
                        samples[name][which].append(seconds)
    for manager in managers:
        manager.close()
    told = {
        "nbytes": state_nbytes(plain),
        "pairs": {what: [statistics.median(of) for of in pair] for what, pair in samples.items()},
        "digests_s": _digests_s(state, rank),
    }
    print(json.dumps(told), flush=True)
    dist.destroy_process_group()


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
    if sys.argv[1:2] == ["rank"]:
        _measure(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    else:
        main(sys.argv[1:])
