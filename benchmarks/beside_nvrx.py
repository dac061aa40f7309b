"""Two ranks that keep each other's replicas: our manager beside NVRx's, each in its own queue.

Both save the same state in turn, in the same processes, over gloo. NVRx replicates while training
waits and does not flush; its files are flushed here before they count as durable. Its CUDA calls
are replaced from outside. NVRx's seconds stand where other tables have the limit: a ratio below 1
is a shorter time of ours.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

import localckpt
from benchmarks.peers.nvrx import replace_cuda, without_gpu
from benchmarks.peers.section import INSTALLED
from benchmarks.ranks import run_ranks
from benchmarks.report import Report
from benchmarks.setup import Options
from benchmarks.state import Training, build_state, expected_nbytes

__all__ = ["measure"]

_TIMEOUT_S = 1500.0
_FIGURES = {
    "stall": "training waits for save()",
    "replicated": "each shard is on both nodes, not all of it flushed",
    "durable": "the same, flushed",
}
_PACKAGE = "nvidia_resiliency_ext.checkpointing"

Samples = dict[str, list[float]]


def measure(options: Options) -> Report:
    """Stall, and seconds from the call of save() until a save is replicated, and durable."""
    command = [
        *(sys.executable, "-m", "benchmarks.beside_nvrx", str(options.directory)),
        *(str(options.rounds), str(options.width)),
    ]
    ranks: list[Samples] = [json.loads(output) for output in run_ranks(command, 2, _TIMEOUT_S)]
    report = Report("beside-nvrx")
    for figure, meaning in _FIGURES.items():
        comparison = report.compared(f"{figure}: {meaning}", "NVRx", expected_nbytes(options.width))
        theirs, ours = (
            # Of each sample that of the slower rank.
            [max(pair) for pair in zip(*(rank[f"{who}, {figure}"] for rank in ranks), strict=True)]
            for who in ("NVRx", "localckpt")
        )
        for their_s, our_s in zip(theirs, ours, strict=True):
            comparison.add(their_s, our_s)
    return report


class _Library(ABC):
    """A manager with replicas on the other rank, and its queue."""

    manager: Any
    queue: Any

    @abstractmethod
    def request(self, state: dict[str, Any], iteration: int) -> Any:
        """Begin a save."""

    @abstractmethod
    def files(self, iteration: int) -> Iterable[Path]:
        """What this rank has to flush before the save is durable."""

    def save(self, state: dict[str, Any], iteration: int) -> dict[str, float]:
        """One save; the seconds of each figure."""
        dist.barrier()
        began = time.perf_counter()
        self.queue.schedule_async_request(self.request(state, iteration))
        stall_s = time.perf_counter() - began
        self.queue.maybe_finalize_async_calls(blocking=True)
        replicated_s = time.perf_counter() - began
        for path in self.files(iteration):
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
        durable_s = time.perf_counter() - began
        return {"stall": stall_s, "replicated": replicated_s, "durable": durable_s}

    def close(self) -> None:
        self.queue.close()


class _Ours(_Library):
    def __init__(self, root: Path) -> None:
        self._strategy = localckpt.CliqueReplicationStrategy.from_replication_params(1, 2)
        self.manager = localckpt.LocalCheckpointManager(
            root, repl_strategy=self._strategy, keep_last=1
        )
        self.queue = localckpt.AsyncCallsQueue()

    def request(self, state: dict[str, Any], iteration: int) -> Any:
        return self.manager.save(state, iteration, is_async=True)

    def files(self, iteration: int) -> Iterable[Path]:
        """Everything is flushed when a save is finalized."""
        return ()

    def close(self) -> None:
        super().close()
        self.manager.close()
        self._strategy.close()


class _Nvrx(_Library):
    def __init__(self, root: Path) -> None:
        managers = import_module(f"{_PACKAGE}.local.ckpt_managers.local_manager")
        strategies = import_module(f"{_PACKAGE}.local.replication.strategies")
        basic = import_module(f"{_PACKAGE}.local.basic_state_dict")
        self._aware = without_gpu(basic.BasicTensorAwareStateDict, basic.dict_list_map_inplace)
        self.manager = managers.LocalCheckpointManager(
            root,
            repl_strategy=strategies.CliqueReplicationStrategy.from_replication_params(1, 2),
        )
        core = import_module(f"{_PACKAGE}.async_ckpt.core")
        # A manager with replicas cannot be pickled for the persistent worker.
        self.queue = core.AsyncCallsQueue(persistent=False)

    def request(self, state: dict[str, Any], iteration: int) -> Any:
        # It takes the tensors out of what it is given, so it is given containers of its own.
        return self.manager.save(
            self._aware(tree_map(lambda leaf: leaf, state)), iteration, is_async=True
        )

    def files(self, iteration: int) -> Iterable[Path]:
        return list(Path(self.manager.local_ckpt_dir).glob(f"iter_{iteration:07d}_*.pt"))


def _run_rank(directory: Path, rounds: int, width: int) -> None:
    rank = int(os.environ["RANK"])
    sys.path.append(str(INSTALLED))
    replace_cuda()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    state = build_state(width, rank)
    training = Training(state)
    root = directory / f"node{rank}"
    libraries = {"NVRx": _Nvrx(root / "nvrx"), "localckpt": _Ours(root / "localckpt")}
    samples: Samples = {}
    try:
        # The first save makes buffers and starts workers.
        for iteration in range(rounds + 1):
            for name, library in libraries.items():
                training.step()
                for figure, seconds in library.save(state, iteration).items():
                    if iteration:
                        samples.setdefault(f"{name}, {figure}", []).append(seconds)
    finally:
        for library in libraries.values():
            library.close()
    dist.destroy_process_group()
    print(json.dumps(samples))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("rounds", type=int)
    parser.add_argument("width", type=int)
    asked = parser.parse_args()
    _run_rank(asked.directory, asked.rounds, asked.width)
