"""Time that a save takes to see that the parts of global tensors are still those of the last save.

It is measured in a world of one, for 1,000 DTensors and for 1,000 marked tensors.
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
from benchmarks.report import Report
from benchmarks.setup import Options
from benchmarks.stores import serve_store
from localckpt.state_dict.global_view import Job
from localckpt.state_dict.image import ImagePlanner

__all__ = ["measure"]

_TENSORS = 1000
_GOAL_MS = 2.0
_ROUNDS = 60


def measure(_: Options) -> Report:
    """Median of the differences in processor time of captures with and without boxes, in turn."""
    report = Report("global-view")
    dist.init_process_group("gloo", store=serve_store(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    plain = {f"layers.{n}.weight": torch.rand(8, 4) for n in range(_TENSORS)}
    sharded = {name: distribute_tensor(t, mesh, [Shard(0)]) for name, t in plain.items()}
    for what, state, bare in (
        ("DTensors", sharded, sharded),
        ("marked tensors", localckpt.replicated(plain), plain),
    ):
        told, untold = ImagePlanner(job=Job(0, [0])), ImagePlanner()
        extra_s = [_capture_s(told, state) - _capture_s(untold, bare) for _ in range(_ROUNDS)]
        more_ms = 1000 * statistics.median(extra_s[1:])
        report.fact(f"{_TENSORS} {what}", more_ms, "ms more for a save", target=_GOAL_MS)
    dist.destroy_process_group()
    return report


def _capture_s(planner: ImagePlanner, state: Any) -> float:
    began = time.thread_time()
    planner.capture(state)
    return time.thread_time() - began
