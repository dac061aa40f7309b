"""Two ranks that replicate to each other, beside a raw gloo exchange of as many bytes."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

import localckpt
from benchmarks.ranks import run_ranks
from benchmarks.report import Report
from benchmarks.setup import Options, Saver, closing_all, largest_file
from benchmarks.state import build_state, expected_nbytes

__all__ = ["measure", "measure_into"]

_TIMEOUT_S = 900.0
# Per rank: the state, an image staged, one received, and the two buffers of the raw exchange.
_COPIES_PER_RANK = 5


def measure(options: Options) -> Report:
    """Over gloo, from host memory."""
    report = Report("replicate")
    measure_into(report, options, device="cpu")
    return report


def measure_into(report: Report, options: Options, device: str) -> None:
    """Start both ranks and put their samples together; the slower rank counts.

    With ``cuda`` both ranks share one GPU and NCCL carries the bytes, from and to device memory.
    """
    width = _width_that_fits(options.width)
    command = [
        *(sys.executable, "-m", "benchmarks.replicate", str(options.directory)),
        *(str(options.rounds), str(width), device),
    ]
    samples = [json.loads(output) for output in run_ranks(command, 2, _TIMEOUT_S)]
    nbytes = samples[0]["nbytes"]
    limit = f"{'gloo' if device == 'cpu' else 'NCCL'} isend/irecv"
    replicated = report.compared(f"replicate, each way, {device}", limit, nbytes, 1.3)
    stalled = report.compared(f"stall, replication included, {device}", limit, nbytes)
    for kind, comparison in (("replicate", replicated), ("stall", stalled)):
        raw = [max(pair) for pair in zip(*(s["raw"] for s in samples), strict=True)]
        ours = [max(pair) for pair in zip(*(s[kind] for s in samples), strict=True)]
        for raw_s, ours_s in zip(raw, ours, strict=True):
            comparison.add(raw_s, ours_s)


def _run_rank(directory: Path, rounds: int, width: int, device: str) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=120))
    root = directory / f"node{rank}"
    strategy = localckpt.CliqueReplicationStrategy.from_replication_params(
        replication_jump=1, replication_factor=2
    )
    manager = localckpt.LocalCheckpointManager(root, repl_strategy=strategy)
    saver = Saver(manager, build_state(width, rank, device))
    raw: list[float] = []
    replicate: list[float] = []
    stall: list[float] = []
    with closing_all([saver]):
        saver.warm_up()
        nbytes = largest_file(root).stat().st_size
        sent = torch.full((nbytes,), rank, dtype=torch.uint8, device=device)
        received = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        _exchange_s(sent, received, 1 - rank)
        for _ in range(rounds):
            raw.append(_exchange_s(sent, received, 1 - rank))
            dist.barrier()
            stall.append(saver.start())
            saver.finish()
            replicate.append(saver.last_save.replicate_s or math.nan)
            dist.barrier()
    dist.destroy_process_group()
    print(json.dumps({"nbytes": nbytes, "raw": raw, "replicate": replicate, "stall": stall}))


def _exchange_s(sent: torch.Tensor, received: torch.Tensor, peer: int) -> float:
    """Seconds to send one flat buffer and receive another, at once."""
    dist.barrier()
    began = time.perf_counter()
    both_ways = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
    for work in dist.batch_isend_irecv(both_ways):
        work.wait()
    if sent.is_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    if int(received[-1]) != peer:
        raise RuntimeError("the raw exchange did not bring the peer's bytes")
    return seconds


def _width_that_fits(width: int) -> int:
    available = psutil.virtual_memory().available
    if 2 * _COPIES_PER_RANK * expected_nbytes(width) < 0.9 * available:
        return width
    print(f"replicate: {available / 1e9:.0f} GB free, so half the width is measured")
    return width // 2


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("rounds", type=int)
    parser.add_argument("width", type=int)
    parser.add_argument("device")
    asked = parser.parse_args()
    _run_rank(asked.directory, asked.rounds, asked.width, asked.device)
