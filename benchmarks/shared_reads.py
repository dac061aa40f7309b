"""Loads by four ranks that want the same, from storage that gives each so many bytes a second.

Each round loads with teams, which read once what all want, and without; the page cache holds the
files, and reads wait as long as the storage would take.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import localckpt
from benchmarks.ranks import run_ranks
from benchmarks.report import Report
from benchmarks.setup import Options
from benchmarks.state import build_state, flat_tensors
from localckpt.global_tier import shared_reads

__all__ = ["measure"]

_RANKS = 4
# Bytes a second for each rank, and the greatest ratio that is good.
_RATES = {300e6: None, 30e6: 1 / 3}
_TIMEOUT_S = 900.0


def measure(options: Options) -> Report:
    report = Report("shared-reads")
    command = [sys.executable, "-m", "benchmarks.shared_reads", str(options.directory)]
    command += [str(options.rounds), str(options.width // 2)]
    ranks = [json.loads(output) for output in run_ranks(command, _RANKS, _TIMEOUT_S)]
    nbytes = ranks[0]["nbytes"]
    for number, (rate, goal) in enumerate(_RATES.items()):
        name = f"load of {_RANKS} ranks, {rate / 1e6:.0f} MB/s each"
        comparison = report.compared(name, "each reads all", nbytes, goal)
        for pairs in zip(*(rank["seconds"][number] for rank in ranks), strict=True):
            comparison.add(*map(max, zip(*pairs, strict=True)))
    read = [sum(round_) / nbytes for round_ in zip(*(rank["read"] for rank in ranks), strict=True)]
    report.fact("bytes read by all", max(read), "x the state", "the most of all", 1.05)
    return report


class _SlowReads:
    """Every positioned read of this process, which waits as storage of some rate would."""

    def __init__(self) -> None:
        self.nbytes, self.rate = 0, math.inf
        self._preadv, self._lock = os.preadv, threading.Lock()
        self._free_at = 0.0
        os.preadv = self._read

    def _read(self, fd: int, parts: Any, *where: Any) -> int:
        count = self._preadv(fd, parts, *where)
        with self._lock:
            self.nbytes += count
            self._free_at = max(self._free_at, time.perf_counter()) + count / self.rate
            free_at = self._free_at
        time.sleep(max(0.0, free_at - time.perf_counter()))
        return count


def _run_rank(root: Path, rounds: int, width: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    state: dict[str, Any] = dict(flat_tensors(build_state(width)))
    told: dict[str, Any] = {"nbytes": sum(t.nbytes for t in state.values())}
    told |= {"seconds": [], "read": []}
    least = shared_reads._LEAST_NBYTES
    with localckpt.GlobalCheckpointManager(root) as manager:
        manager.save(state, 1, is_async=False)
        slow = _SlowReads()

        def load_s() -> float:
            for tensor in state.values():
                tensor.zero_()
            dist.barrier()
            slow.nbytes = 0
            began = time.perf_counter()
            manager.load(into=state)
            return time.perf_counter() - began

        for slow.rate in _RATES:
            pairs = []
            for _ in range(rounds):
                shared_reads._LEAST_NBYTES = 1 << 62
                alone_s = load_s()
                shared_reads._LEAST_NBYTES = least
                pairs.append((alone_s, load_s()))
                told["read"].append(slow.nbytes)
            told["seconds"].append(pairs)
    dist.destroy_process_group()
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("rounds", type=int)
    parser.add_argument("width", type=int)
    asked = parser.parse_args()
    _run_rank(asked.directory, asked.rounds, asked.width)
