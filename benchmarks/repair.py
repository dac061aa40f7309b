"""What a training loop loses while pieces that a node has lost are made again beside it.

Two ranks on two nodes keep each other's replicas. The folder of one is removed, and the next save,
which is small, begins the repair: a shard and a replica come to the node that lost them.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from datetime import timedelta
from itertools import count, product
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist

import localckpt
from benchmarks.loops import LOOPS, lost_in, running
from benchmarks.ranks import run_ranks
from benchmarks.report import Report
from benchmarks.setup import Options
from benchmarks.state import build_state, state_nbytes
from localckpt.events.event import Event
from localckpt.events.stream import EventStream

__all__ = ["measure"]

_TIMEOUT_S = 900.0


def measure(options: Options) -> Report:
    """Each loop in turn; of both ranks the one that loses more."""
    report = Report("repair", options.state)
    command = [sys.executable, "-m", "benchmarks.repair", str(options.directory)]
    command += [str(options.rounds), str(options.width)]
    ranks = [json.loads(output) for output in run_ranks(command, 2, _TIMEOUT_S)]
    gigabytes = ranks[0].pop("nbytes") / 1e9
    for what in ranks[0]:
        samples = [max(pair) for pair in zip(*(rank[what] for rank in ranks), strict=True)]
        note = f"{1e3 * min(samples):.0f} to {1e3 * max(samples):.0f}; shards of {gigabytes:.2f} GB"
        report.fact(what, 1e3 * median(samples), "ms", note)
    return report


class _Repairing:
    """A small save and, where something was lost, the repair that it begins."""

    def __init__(
        self, manager: localckpt.LocalCheckpointManager, iteration: int, repaired: _Repaired
    ) -> None:
        self._manager, self._iteration, self._repaired = manager, iteration, repaired

    def start(self) -> None:
        self._manager.save({"iteration": self._iteration}, self._iteration)

    def done(self) -> bool:
        return not self._repaired.is_awaited

    def finish(self) -> None:
        """Have nothing to finish."""


class _Repaired:
    """Sink of events: whether a repair is awaited, and the seconds of the last one."""

    is_awaited, took_s = False, 0.0

    def write(self, event: Event) -> None:
        if event.name == "reprotected":
            if event.outcome != "ok":
                raise RuntimeError(f"a repair failed: {event.details}")
            self.is_awaited, self.took_s = False, event.duration

    def flush(self) -> None:
        """Have nothing to flush."""

    def close(self) -> None:
        """Have nothing to close."""


def _run_rank(root: Path, rounds: int, width: int) -> None:
    rank, repaired = int(os.environ["RANK"]), _Repaired()
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    state: Any = build_state(width, rank)
    samples: dict[str, list[float]] = {}
    strategy = localckpt.CliqueReplicationStrategy.from_replication_params()
    events = EventStream([repaired])
    manager = localckpt.LocalCheckpointManager(root / f"node{rank}", "", strategy, events=events)
    with strategy, manager:
        iterations = count(step=2)
        for (name, loop), is_lost, _ in product(LOOPS.items(), (False, True), range(rounds)):
            manager.save(state, iteration := next(iterations))
            dist.barrier()
            if rank == 1 and is_lost:
                shutil.rmtree(manager.local_ckpt_dir)
            with running(loop, core=rank) as (step, steps):
                dist.barrier()
                repaired.is_awaited = is_lost
                lost = lost_in(step, steps, _Repairing(manager, iteration + 1, repaired))
            what = f"{name}, {'with' if is_lost else 'without'} a loss"
            samples.setdefault(f"lost by a save, {what}", []).append(lost.lost_s)
            samples.setdefault(f"its stall, {what}", []).append(lost.stall_s)
            if is_lost:
                samples.setdefault(f"repair, {name}", []).append(repaired.took_s)
            dist.barrier()
    events.close()
    dist.destroy_process_group()
    print(json.dumps({"nbytes": state_nbytes(state), **samples}))


if __name__ == "__main__":
    _run_rank(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
