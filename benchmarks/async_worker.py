"""Training time that one save costs, by who writes behind training: a thread or a process.

Two loops stand for training: one that keeps a core busy outside the interpreter, and one of many
small operations, which any other thread that wants the interpreter slows down.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

import localckpt
from benchmarks.report import Report
from benchmarks.setup import Options, Saver, closing_all, make_setting

__all__ = ["measure"]

_LOOP_S = 1.0


def measure(options: Options) -> Report:
    """Each loop alone and with a save behind it, in turn, for both async workers."""
    report = Report("async")
    torch.set_num_threads(1)
    setting = make_setting(options)
    savers = {
        worker: Saver(
            localckpt.LocalCheckpointManager(options.directory / worker, async_worker=worker),
            setting.state,
        )
        for worker in ("thread", "process")
    }
    with closing_all(list(savers.values())):
        for saver in savers.values():
            saver.warm_up()
        for name, step in (("matmul", _matmul_step()), ("small operations", _small_step())):
            steps = _steps_for(step, _LOOP_S)
            lost: dict[str, list[float]] = {worker: [] for worker in savers}
            stalls: dict[str, list[float]] = {worker: [] for worker in savers}
            for _ in range(2 * options.rounds):
                for worker, saver in savers.items():
                    alone = _loop_s(step, steps, saver)
                    stall, behind = _loop_with_save_s(step, steps, saver)
                    lost[worker].append(behind - alone)
                    stalls[worker].append(stall)
            for worker in savers:
                times = lost[worker]
                spread = f"{min(times) * 1e3:.0f} to {max(times) * 1e3:.0f} over {len(times)} pairs"
                note = f"{spread}; of it stall {median(stalls[worker]) * 1e3:.0f} ms"
                report.fact(f"lost per save, {name}, {worker}", 1e3 * median(times), "ms", note)
    return report


def _loop_s(step: Callable[[], None], steps: int, saver: Saver) -> float:
    began = time.perf_counter()
    for _ in range(steps):
        step()
        saver.queue.maybe_finalize_async_calls(blocking=False)
    return time.perf_counter() - began


def _loop_with_save_s(step: Callable[[], None], steps: int, saver: Saver) -> tuple[float, float]:
    """Seconds of stall, and seconds of the loop with its save, which ends inside the loop."""
    began = time.perf_counter()
    stall = saver.start()
    _loop_s(step, steps, saver)
    saver.finish()
    return stall, time.perf_counter() - began


def _steps_for(step: Callable[[], None], seconds: float) -> int:
    step()
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < 0.5:
        step()
        steps += 1
    return max(1, round(steps * seconds / (time.perf_counter() - began)))


def _matmul_step() -> Callable[[], None]:
    a, b = torch.rand(768, 768), torch.rand(768, 768)
    out = torch.empty(768, 768)

    def step() -> None:
        torch.mm(a, b, out=out)

    return step


def _small_step() -> Callable[[], None]:
    x = torch.zeros(8)

    def step() -> None:
        for _ in range(200):
            x.add_(1.0)

    return step
