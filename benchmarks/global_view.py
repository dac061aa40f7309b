"""Time that a save takes to see that the parts of global tensors are still those of the last save.

``python -m benchmarks.global_view`` prints it, for 1,000 DTensors and for 1,000 marked tensors.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import localckpt
from benchmarks.stores import serve_store
from localckpt.state_dict.global_view import Job
from localckpt.state_dict.image import ImagePlanner

__all__ = ["main"]

_TENSORS = 1000
_ROUNDS = 60


def main() -> None:
    """Measure in a world of one."""
    dist.init_process_group("gloo", store=serve_store(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    plain = {f"layers.{n}.weight": torch.rand(8, 4) for n in range(_TENSORS)}
    sharded = {name: distribute_tensor(t, mesh, [Shard(0)]) for name, t in plain.items()}
    for what, state, bare in (
        ("DTensors", sharded, sharded),
        ("marked tensors", localckpt.replicated(plain), plain),
    ):
        print(f"{_TENSORS} {what}: {1000 * _extra_s(state, bare):.2f} ms more for a save")
    dist.destroy_process_group()


def _extra_s(state: Any, bare: Any) -> float:
    """Median of the differences in processor time of captures with and without boxes, in turn."""
    told, untold = ImagePlanner(job=Job(0, [0])), ImagePlanner()
    pairs = [(_capture_s(told, state), _capture_s(untold, bare)) for _ in range(_ROUNDS)]
    return statistics.median(a - b for a, b in pairs[1:])


def _capture_s(planner: ImagePlanner, state: Any) -> float:
    began = time.thread_time()
    planner.capture(state)
    return time.thread_time() - began


if __name__ == "__main__":
    main()
