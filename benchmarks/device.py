"""With a GPU: staging from device memory beside the bus, and two NCCL ranks that replicate."""

from __future__ import annotations

import time

import torch

import localckpt
from benchmarks import replicate
from benchmarks.report import Comparison, Report
from benchmarks.setup import Options, Saver, closing_all
from benchmarks.state import build_state, expected_nbytes

__all__ = ["measure"]


def measure(options: Options) -> Report:
    """Without a GPU the report is empty, and says why."""
    report = Report("gpu")
    if not torch.cuda.is_available():
        report.fact("GPUs", 0, "", "nothing was measured here")
        return report
    nbytes = expected_nbytes(options.width)
    stall = report.compared("stall of save from the GPU", "one pinned copy", nbytes, 1.3)
    _measure_staging(stall, options)
    torch.cuda.empty_cache()
    replicate.measure_into(report, options)
    return report


def _measure_staging(comparison: Comparison, options: Options) -> None:
    state = build_state(options.width, device="cuda")
    on_device = torch.ones(comparison.nbytes, dtype=torch.uint8, device="cuda")
    pinned = torch.empty(comparison.nbytes, dtype=torch.uint8, pin_memory=True)
    manager = localckpt.LocalCheckpointManager(options.directory / "staging")
    saver = Saver(manager, state)
    with closing_all([saver]):
        saver.warm_up()
        for _ in range(options.rounds):
            limit_s = _copy_to_host_s(on_device, pinned)
            comparison.add(limit_s, saver.start())
            saver.finish()


def _copy_to_host_s(on_device: torch.Tensor, pinned: torch.Tensor) -> float:
    """Seconds of one large copy over the bus."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    pinned.copy_(on_device, non_blocking=True)
    torch.cuda.synchronize()
    return time.perf_counter() - began
