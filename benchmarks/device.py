"""With a GPU: saves and loads beside the bus and a raw read, and two NCCL ranks that replicate."""

from __future__ import annotations

import time
from functools import partial

import torch

import localckpt
from benchmarks import replicate
from benchmarks.limits import HugeBuffer, drop_from_page_cache, read_direct_s, read_warm_s
from benchmarks.report import Comparison, Report, compare
from benchmarks.setup import Options, Saver, closing_all, largest_file
from benchmarks.state import expected_nbytes, parameter_shapes

__all__ = ["measure"]


def measure(options: Options) -> Report:
    """Without a GPU the report is empty, and says why."""
    report = Report("gpu")
    if not torch.cuda.is_available():
        report.fact("GPUs", 0, "", "nothing was measured here")
        return report
    _measure_staging(report, options)
    _measure_loading(report, options)
    torch.cuda.empty_cache()
    replicate.measure_into(report, options)
    return report


class _Training:
    """A GPT-2's parameters on the GPU, and AdamW with its moments there."""

    def __init__(self, width: int) -> None:
        shapes = dict(parameter_shapes(width))
        self.model = torch.nn.ParameterList(torch.rand(s, device="cuda") for s in shapes.values())
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, object]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


class _Bus:
    """A flat buffer on the GPU, and one in page-locked memory, of the size of a state."""

    def __init__(self, nbytes: int) -> None:
        self._on_device = torch.ones(nbytes, dtype=torch.uint8, device="cuda")
        self._pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def to_host_s(self) -> float:
        return self._copy_s(self._pinned, self._on_device)

    def to_device_s(self) -> float:
        return self._copy_s(self._on_device, self._pinned)

    def _copy_s(self, target: torch.Tensor, source: torch.Tensor) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - began


def _measure_staging(report: Report, options: Options) -> None:
    nbytes = expected_nbytes(options.width)
    training, bus = _Training(options.width), _Bus(nbytes)
    state = training.state()
    alone = localckpt.LocalCheckpointManager(options.directory / "alone")
    guarded = localckpt.LocalCheckpointManager(
        options.directory / "guarded", guard=training.optimizer
    )
    savers = [Saver(alone, state), Saver(guarded, state)]
    names = ("stall of save from the GPU", "the same, guarded: copies beside training")
    with closing_all(savers):
        for saver, name, goal in zip(savers, names, (1.3, None), strict=True):
            saver.warm_up()
            stall = report.compared(name, "one pinned copy", nbytes, goal)
            for _ in range(options.rounds):
                limit_s = bus.to_host_s()
                stall.add(limit_s, saver.start())
                saver.finish()


def _measure_loading(report: Report, options: Options) -> None:
    """Into the tensors of a program that has just started, every block verified."""
    root = options.directory / "loaded"
    training = _Training(options.width)
    state = training.state()
    with localckpt.LocalCheckpointManager(root) as manager:
        manager.save(state, 0)
    shard = largest_file(root)
    nbytes = shard.stat().st_size
    bus, buffer = _Bus(nbytes), HugeBuffer(nbytes)

    def load_s() -> float:
        with localckpt.LocalCheckpointManager(root) as manager:
            if manager.find_latest() != 0:
                raise RuntimeError(f"the checkpoint in {root} was not found")
            torch.cuda.synchronize()
            began = time.perf_counter()
            manager.load(into=state)
            torch.cuda.synchronize()
            return time.perf_counter() - began

    def cold(measured: partial[float]) -> float:
        drop_from_page_cache(shard)
        return measured()

    warm = report.compared("warm: load onto the GPU", "preadv + pinned copy", nbytes, None)
    read_warm = partial(read_warm_s, shard, buffer)
    read_warm()
    load_s()
    _add_pairs(warm, options.rounds, bus, read_warm, partial(load_s))
    direct = report.compared("cold: load onto the GPU", "O_DIRECT + pinned copy", nbytes, None)
    read_cold = partial(cold, partial(read_direct_s, shard, buffer))
    _add_pairs(direct, options.rounds, bus, read_cold, partial(cold, partial(load_s)))


def _add_pairs(
    comparison: Comparison, rounds: int, bus: _Bus, read: partial[float], load: partial[float]
) -> None:
    def limit_s() -> float:
        return read() + bus.to_device_s()

    compare(rounds, limit_s, [(comparison, load)])
