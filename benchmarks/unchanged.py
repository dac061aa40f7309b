"""Saves of two ranks that keep each other's replicas, of which all changes, and of which little.

Both are done in turns by the library as it is and with its comparison of blocks taken out, beside
which the time until a save is complete is shown; and what is written and sent.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import localckpt
from benchmarks.limits import settle
from benchmarks.ranks import run_ranks
from benchmarks.report import Report
from benchmarks.setup import Options
from benchmarks.state import Training, build_state, flat_tensors, state_nbytes
from localckpt.memory.digests import LEAST_COMPARED_NBYTES
from localckpt.replication import strategies
from localckpt.storage import directory, write

__all__ = ["measure"]

_TIMEOUT_S = 1500.0
_ALL, _LITTLE = "all changes", "5 % changes"
# The greatest ratio, and the greatest part of the state that is written or sent.
_GOALS = {_ALL: (1.02, 1.01), _LITTLE: (None, 0.08)}
_COMPARING = (directory, strategies, write)


def measure(options: Options) -> Report:
    report = Report("unchanged")
    command = [sys.executable, "-m", "benchmarks.unchanged", str(options.directory)]
    command += [str(options.rounds), str(options.width)]
    ranks = [json.loads(output) for output in run_ranks(command, 2, _TIMEOUT_S)]
    nbytes = ranks[0]["nbytes"]
    for what, (slowest, most) in _GOALS.items():
        comparison = report.compared(f"save until complete, {what}", "all sent", nbytes, slowest)
        for pair in zip(*(rank[what]["seconds"] for rank in ranks), strict=True):
            comparison.add(*map(max, zip(*pair, strict=True)))
        for place in ("written", "sent"):
            part = max(max(rank[what][place]) for rank in ranks) / nbytes
            report.fact(f"bytes {place}, {what}", part, "x the state", "the most of all", most)
    return report


@contextmanager
def _whole() -> Iterator[None]:
    """All blocks are written and sent."""
    for module in _COMPARING:
        module.LEAST_COMPARED_NBYTES = 1 << 62  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in _COMPARING:
            module.LEAST_COMPARED_NBYTES = LEAST_COMPARED_NBYTES  # type: ignore[attr-defined]


def _run_rank(root: Path, rounds: int, width: int) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    state = build_state(width, rank)
    tensors, nbytes = flat_tensors(state), state_nbytes(state)
    part: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if sum(t.nbytes for t in part.values()) + tensor.nbytes <= nbytes // 20:
            part[name] = tensor
    steps = {_ALL: Training(state), _LITTLE: Training({"model": part, "optimizer": {"state": {}}})}
    told: dict[str, Any] = {"nbytes": nbytes}
    node = root / f"node{rank}"
    node = root / f"node{rank}"
    with (
        localckpt.CliqueReplicationStrategy.from_replication_params() as strategy,
        localckpt.LocalCheckpointManager(node, "", strategy, strict=True) as manager,
    ):
        iteration = 0

        def save_s(training: Training) -> float:
            nonlocal iteration
            training.step()
            iteration += 1
            settle(1.0)
            dist.barrier()
            began = time.perf_counter()
            manager.save(state, iteration)
            return time.perf_counter() - began

        for what, training in steps.items():
            # Until what is overwritten is of a state that changed as this one does.
            for _ in range(4):
                save_s(training)
            seconds, written, sent = [], [], []
            for _ in range(rounds):
                with _whole():
                    whole_s = save_s(training)
                seconds.append((whole_s, save_s(training)))
                report = manager.last_save
                assert report is not None, "it has saved"
                written.append(report.written_nbytes)
                sent.append(report.sent_nbytes)
            told[what] = {"seconds": seconds, "written": written, "sent": sent}
    dist.destroy_process_group()
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("rounds", type=int)
    parser.add_argument("width", type=int)
    asked = parser.parse_args()
    _run_rank(asked.directory, asked.rounds, asked.width)
