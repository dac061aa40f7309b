"""What a training step pays to ask whether a save is over, while one is under way.

On one rank, and on 8 ranks over gloo; a call that only waits stands for the save.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from statistics import median, quantiles

import torch
import torch.distributed as dist

import localckpt
from benchmarks.ranks import run_ranks
from benchmarks.report import Report
from benchmarks.setup import Options
from localckpt.async_save.request import runs_in_trainer

__all__ = ["measure"]

_RANKS = 8
_CALL_S = 6.0
_POLLS = 500
# A training step between two polls, in which the ranks do not wait for each other.
_STEP_S = 0.005
_TIMEOUT_S = 120.0
_GOAL_US = {1: 100.0, _RANKS: 1000.0}


def measure(options: Options) -> Report:
    """Median and the slowest tenth, of all polls of all ranks."""
    report = Report("poll", options.state)
    for ranks, goal in _GOAL_US.items():
        for worker in _CALLS:
            command = [sys.executable, "-m", "benchmarks.poll", worker]
            outputs = run_ranks(command, ranks, _TIMEOUT_S)
            polls = [seconds * 1e6 for output in outputs for seconds in json.loads(output)]
            note = f"slowest tenth from {quantiles(polls, n=10)[-1]:.0f} us, {len(polls)} polls"
            name = f"poll during a call, {worker}, {ranks} rank{'s' * (ranks > 1)}"
            report.fact(name, median(polls), "us", note, goal)
    return report


@runs_in_trainer
def _wait_in_thread(seconds: float) -> None:
    time.sleep(seconds)


# A call that is not marked goes to the worker process.
_CALLS = {"thread": _wait_in_thread, "process": time.sleep}


def _run_rank(worker: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=_TIMEOUT_S))
    polls: list[float] = []
    with localckpt.AsyncCallsQueue() as queue:
        dist.barrier()
        queue.schedule_async_request(localckpt.AsyncRequest(_CALLS[worker], (_CALL_S,), []))
        # As many on each rank: who polls more often waits for the others.
        for _ in range(_POLLS):
            time.sleep(_STEP_S)
            began = time.perf_counter()
            finalized = queue.maybe_finalize_async_calls(blocking=False)
            polls.append(time.perf_counter() - began)
            if finalized:
                raise RuntimeError("the call was over before the polls were")
        queue.maybe_finalize_async_calls(blocking=True)
    dist.destroy_process_group()
    print(json.dumps(polls))


if __name__ == "__main__":
    _run_rank(sys.argv[1])
