"""Two ranks that keep each other's replicas, beside a raw exchange and a copy of as many bytes.

In the foreground ``save`` waits for the replicas, and the exchange is the limit. Behind training it
waits until the state is copied; what the replicas then cost is what a training loop loses.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from statistics import median

import psutil
import torch
import torch.distributed as dist

import localckpt
from benchmarks.limits import HugeBuffer, RecycledFile
from benchmarks.loops import LOOPS, Lost, lost_in, running
from benchmarks.ranks import run_ranks
from benchmarks.report import Report
from benchmarks.setup import Options, Saver, closing_all, largest_file
from benchmarks.state import build_state, expected_nbytes

__all__ = ["measure", "measure_into"]

_TIMEOUT_S = 1500.0
# Per rank: the state, an image staged and one received by either manager, and the two buffers of
# the raw exchange.
_COPIES_PER_RANK = 7
_LOOP = "matmul, 1 core"
_WRITE = "O_DIRECT write of both images"
_FOREGROUND, _BEHIND = "in the foreground", "behind training"

Samples = dict[str, list[float]]


def measure(options: Options) -> Report:
    """Over gloo, from host memory: both ways, and what a training loop loses by either."""
    report = Report("replicate")
    _measure_into(report, options, "cpu")
    return report


def measure_into(report: Report, options: Options) -> None:
    """Both ranks share one GPU; NCCL carries replicas from device memory, in the foreground."""
    _measure_into(report, options, "cuda")


def _measure_into(report: Report, options: Options, device: str) -> None:
    command = [
        *(sys.executable, "-m", "benchmarks.replicate", str(options.directory)),
        *(str(options.rounds), str(_width_that_fits(options.width)), device),
    ]
    ranks = [json.loads(output) for output in run_ranks(command, 2, _TIMEOUT_S)]
    nbytes = ranks[0].pop("nbytes")
    # Of each sample that of the slower rank, for which the other waits.
    samples: Samples = {
        name: [max(pair) for pair in zip(*(rank[name] for rank in ranks), strict=True)]
        for name in ranks[0]
    }
    exchange, copy = f"{'gloo' if device == 'cpu' else 'NCCL'} isend/irecv", "memcpy, 1 thread"
    for what, limit, ours, limits, goal in (
        (f"replicate, each way, {device}", exchange, "replicate", "exchange", 1.3),
        (f"stall, replicas {_FOREGROUND}, {device}", exchange, "stall", "exchange", None),
        (f"stall, replicas {_BEHIND}, {device}", copy, "stall behind", "copy", 1.3),
        ("save called to finalized", f"{copy} + {exchange} + {_WRITE}", "finalized", "all", 1.15),
    ):
        if ours in samples:
            comparison = report.compared(what, limit, nbytes, goal)
            for limit_s, ours_s in zip(samples[limits], samples[ours], strict=True):
                comparison.add(limit_s, ours_s)
    for where in (_BEHIND, _FOREGROUND):
        if lost := samples.get(f"lost, {where}"):
            stall_ms = median(samples[f"loop stalled, {where}"]) * 1e3
            report.fact(
                f"lost per save, {_LOOP} a rank, replicas {where}",
                median(lost) * 1e3,
                "ms",
                f"{min(lost) * 1e3:.0f} to {max(lost) * 1e3:.0f} over {len(lost)} pairs; of it "
                f"stall {stall_ms:.0f} ms",
            )


class _Replicating(Saver):
    """Saves a state of which the other rank keeps a replica; also behind a loop."""

    def __init__(self, root: Path, state: dict[str, object], background: bool | None) -> None:
        self.strategy = localckpt.CliqueReplicationStrategy.from_replication_params()
        # Saves follow each other, and memory and disk are short; a lost peer is no sample.
        manager = localckpt.LocalCheckpointManager(
            root,
            repl_strategy=self.strategy,
            background=background,
            num_buffers=1,
            keep_last=1,
            strict=True,
        )
        super().__init__(manager, state)

    def done(self) -> bool:
        self.queue.maybe_finalize_async_calls()
        return not self.queue.get_num_unfinalized_calls()

    def close(self) -> None:
        super().close()
        self.strategy.close()


class _Limits:
    """The raw exchange with the other rank, one copy of as many bytes, and two writes."""

    def __init__(self, nbytes: int, rank: int, device: str, path: Path) -> None:
        self._peer = 1 - rank
        self._copied = HugeBuffer(nbytes) if device == "cpu" else None
        self._file = None if self._copied is None else RecycledFile(path, self._copied)
        self._sent = torch.full((nbytes,), rank, dtype=torch.uint8, device=device)
        if self._copied is None:
            self._received = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        else:
            self._received = torch.frombuffer(self._copied.view, dtype=torch.uint8, count=nbytes)

    def exchange_s(self) -> float:
        """Seconds to send one flat buffer and receive another, at once."""
        sent, received = self._sent, self._received
        dist.barrier()
        began = time.perf_counter()
        both_ways = [
            dist.P2POp(dist.isend, sent, self._peer),
            dist.P2POp(dist.irecv, received, self._peer),
        ]
        for work in dist.batch_isend_irecv(both_ways):
            work.wait()
        if sent.is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        if int(received[-1]) != self._peer:
            raise RuntimeError("the raw exchange did not bring the peer's bytes")
        return seconds

    def copy_s(self) -> float:
        """Seconds of a copy in host memory, while the other rank makes one too."""
        if self._copied is None:
            raise RuntimeError("there is no buffer in host memory to copy to")
        dist.barrier()
        return self._copied.copy_from_s([self._sent])

    def write_s(self) -> float:
        """Seconds to write as much as two images, while the other rank does so too."""
        if self._file is None:
            raise RuntimeError("there is no buffer in host memory to write")
        dist.barrier()
        return self._file.write_s() + self._file.write_s()


def _run_rank(directory: Path, rounds: int, width: int, device: str) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=120))
    state = build_state(width, rank, device)
    root = directory / f"node{rank}"
    foreground = _Replicating(root / "foreground", state, background=False)
    savers = {_FOREGROUND: foreground}
    if device == "cpu":
        savers[_BEHIND] = _Replicating(root / "behind", state, background=None)
    with closing_all(list(savers.values())):
        for saver in savers.values():
            saver.warm_up()
        nbytes = largest_file(root).stat().st_size
        limits = _Limits(nbytes, rank, device, root / "limit")
        limits.exchange_s()
        samples: Samples = {}
        for _ in range(rounds):
            _add(samples, _in_foreground(foreground, limits))
            if _BEHIND in savers:
                _add(samples, _behind_training(savers[_BEHIND], limits))
        if _BEHIND in savers:
            for where, lost in _behind_a_loop(savers, rounds, rank):
                _add(
                    samples,
                    {f"lost, {where}": lost.lost_s, f"loop stalled, {where}": lost.stall_s},
                )
    dist.destroy_process_group()
    print(json.dumps({"nbytes": nbytes, **samples}))


def _in_foreground(saver: _Replicating, limits: _Limits) -> dict[str, float]:
    exchange_s = limits.exchange_s()
    dist.barrier()
    stall_s = saver.start()
    saver.finish()
    replicate_s = saver.last_save.replicate_s
    return {
        "exchange": exchange_s,
        "stall": stall_s,
        "replicate": math.nan if replicate_s is None else replicate_s,
    }


def _behind_training(saver: _Replicating, limits: _Limits) -> dict[str, float]:
    exchange_s = limits.exchange_s()
    copy_s, write_s = limits.copy_s(), limits.write_s()
    dist.barrier()
    began = time.perf_counter()
    stall_s = saver.start()
    saver.finish()
    return {
        "copy": copy_s,
        "all": copy_s + exchange_s + write_s,
        "stall behind": stall_s,
        "finalized": time.perf_counter() - began,
    }


def _behind_a_loop(
    savers: dict[str, _Replicating], rounds: int, rank: int
) -> Iterator[tuple[str, Lost]]:
    """What a loop on one core of each rank loses; its ranks wait for each other at every step."""
    with running(LOOPS[_LOOP], core=rank) as (step, steps_alone):
        word = torch.tensor([steps_alone])
        dist.all_reduce(word, dist.ReduceOp.MAX)
        steps = int(word)

        def step_together() -> None:
            step()
            dist.all_reduce(word)

        for _ in range(rounds):
            for where, saver in savers.items():
                yield where, lost_in(step_together, steps, saver)


def _add(samples: Samples, more: dict[str, float]) -> None:
    for name, seconds in more.items():
        samples.setdefault(name, []).append(seconds)


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
