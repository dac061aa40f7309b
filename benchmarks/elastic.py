"""A load on three ranks of what four have saved, beside a load of what three have saved.

The state is a GPT-2 with AdamW whose tensors are sharded over all ranks. All ranks share one node's
disk, so each reads what it wants from there, and nothing is sent. Files are in the page cache in
one half of the rounds, and on the disk only in the other.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import localckpt
from benchmarks.limits import drop_from_page_cache
from benchmarks.ranks import run_ranks
from benchmarks.report import Report
from benchmarks.setup import Options
from benchmarks.state import parameter_shapes
from localckpt.replication.progress import Progress
from localckpt.state_dict.source import ReadProgress

__all__ = ["measure"]

_TIMEOUT_S = 600.0
_BEFORE, _AFTER = 4, 3
_GOAL, _READ_GOAL = 2.0, 1.35
_WHERE = "cached", "on disk"


def measure(options: Options) -> Report:
    """Save with both numbers of ranks; then load both by turns, A B B A, on the lower number."""
    report = Report("elastic")
    _run(options, _BEFORE, "save", "other")
    _run(options, _AFTER, "save", "same")
    ranks = _run(options, _AFTER, "load", "other", "same")
    nbytes = sum(rank["needed"] for rank in ranks)
    for where in _WHERE:
        comparison = report.compared(
            f"load(into=), {_BEFORE} ranks to {_AFTER}, {where}",
            f"{_AFTER} to {_AFTER}, {where}",
            nbytes,
            _GOAL,
        )
        loads = [rank[where] for rank in ranks]
        pairs = zip(
            *(_slowest(rank["same"] for rank in loads), _slowest(rank["other"] for rank in loads)),
            strict=True,
        )
        for same_s, other_s in pairs:
            comparison.add(same_s, other_s)
    for what, goal in (("read", _READ_GOAL), ("sent", 0.0)):
        moved = sum(median(rank[what]) for rank in ranks)
        report.fact(f"bytes {what}", moved / nbytes, "x needed", f"{moved / 1e9:.3f} GB", goal)
    return report


def _slowest(of_ranks: Any) -> list[float]:
    return [max(those) for those in zip(*of_ranks, strict=True)]


def _run(options: Options, world_size: int, *what: str) -> list[Any]:
    command = [
        *(sys.executable, "-m", "benchmarks.elastic", str(options.directory)),
        *(str(options.rounds), str(options.width), *what),
    ]
    return [json.loads(output) for output in run_ranks(command, world_size, _TIMEOUT_S)]


def _state(width: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        part: {name: _sharded(shape, mesh) for name, shape in parameter_shapes(width)}
        for part in ("model", "exp_avg", "exp_avg_sq")
    } | {"step": {name: torch.tensor(100.0) for name, _ in parameter_shapes(width)}}


def _sharded(shape: tuple[int, ...], mesh: DeviceMesh) -> DTensor:
    rows, size = shape[0], -(-shape[0] // mesh.size())
    low = min(rows, mesh.get_rank() * size)
    local = torch.rand(min(size, rows - low), *shape[1:])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(0)], shape=torch.Size(shape), stride=stride)


class _Counted:
    """Bytes that this process has read from files, and sent to other ranks."""

    def __init__(self) -> None:
        self.read = self.sent = 0
        add, count = ReadProgress.add, Progress.count

        # From outside, since nobody else asks for these numbers.
        def count_read(progress: ReadProgress, nbytes: int) -> None:
            self.read += nbytes
            add(progress, nbytes)

        def count_sent(progress: Progress, peer: int, *, received: int = 0, sent: int = 0) -> None:
            self.sent += sent
            count(progress, peer, received=received, sent=sent)

        ReadProgress.add = count_read  # type: ignore[assignment, method-assign]
        Progress.count = count_sent  # type: ignore[assignment, method-assign]


def _load_s(root: Path, where: str, state: dict[str, Any]) -> float:
    with localckpt.LocalCheckpointManager(root, elastic=True) as manager:
        manager.find_latest()
        if dist.get_rank() == 0:
            for path in root.rglob("*.safetensors"):
                drop_from_page_cache(path)
                if where == "cached":
                    path.read_bytes()
        dist.barrier()
        began = time.perf_counter()
        manager.load(into=state)
        dist.barrier()
        return time.perf_counter() - began


def _measure_loads(directory: Path, rounds: int, width: int) -> dict[str, Any]:
    state, counted = _state(width), _Counted()
    needed = sum(
        tensor.to_local().nbytes for part in state.values() for tensor in part.values()
        if hasattr(tensor, "to_local")
    )  # fmt: skip
    found: dict[str, Any] = {"needed": needed, "read": [], "sent": []}
    found |= {where: {"same": [], "other": []} for where in _WHERE}
    for number in range(rounds + 1):
        for where, which in product(_WHERE, ("same", "other") if number % 2 else ("other", "same")):
            read, sent = counted.read, counted.sent
            seconds = _load_s(directory / f"elastic-{which}", where, state)
            # The first loads find memory that was never touched.
            if not number:
                continue
            found[where][which].append(seconds)
            if which == "other":
                found["read"].append(counted.read - read)
                found["sent"].append(counted.sent - sent)
    return found


def _run_rank(directory: Path, rounds: int, width: int, what: list[str]) -> None:
    dist.init_process_group("gloo")
    result: dict[str, Any] = {}
    if what[0] == "save":
        with localckpt.LocalCheckpointManager(directory / f"elastic-{what[1]}") as manager:
            manager.save(_state(width), 1)
    else:
        result = _measure_loads(directory, rounds, width)
    dist.destroy_process_group()
    print(json.dumps(result))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("rounds", type=int)
    parser.add_argument("width", type=int)
    parser.add_argument("what", nargs="+")
    asked = parser.parse_args()
    _run_rank(asked.directory, asked.rounds, asked.width, asked.what)
