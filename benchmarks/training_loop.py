"""What a training loop pays for the front door: a step, its saves, and how long it resumes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

import localckpt
from benchmarks.footprint import family_bytes, sampled_peak
from benchmarks.limits import settle
from benchmarks.report import Report, compare
from benchmarks.setup import Options
from benchmarks.state import build_state, state_nbytes

__all__ = ["measure"]

_STEPS = 200_000
_STEP_GOAL_US = 5.0
_RESUME_GOAL = 1.1
_EXTRA_GOAL_MIB = 64.0
_SHARE, _SHARE_GOAL = 0.01, 1.2
_STEP_S, _LOOP_STEPS = 0.05, 1500


class _Model(torch.nn.Module):
    """The parameters of the state that other sections save, as a module has them."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name.replace(".", "_"), torch.nn.Parameter(tensor))


def measure(options: Options) -> Report:
    """Costs of one rank, whose state is that of the other sections."""
    report = Report("training-loop", options.state)
    state = build_state(options.width, kind=options.state)
    model = _Model(state["model"])
    optimizer = torch.optim.AdamW(model.parameters())
    for number, parameter in enumerate(model.parameters()):
        optimizer.state[parameter] = dict(state["optimizer"]["state"].get(number, {}))
    parts = {"model": model, "optimizer": optimizer}
    _measure_steps(report, parts, options.directory / "steps")
    _measure_resume(report, parts, options, state_nbytes(state))
    _measure_overhead(report, parts, options.directory / "overhead")
    return report


def _measure_steps(report: Report, parts: dict[str, Any], root: Path) -> None:
    every = localckpt.Every(steps=10 * _STEPS)
    with localckpt.Checkpointer(parts, local=root, every=every) as checkpointer:
        first = checkpointer.resume()
        samples = []
        for step in range(first, first + _STEPS):
            began = time.perf_counter()
            checkpointer.step(step)
            samples.append(time.perf_counter() - began)
    note = f"median of {_STEPS:,} calls; slowest hundredth from {_slowest_us(samples):.0f} us"
    report.fact(
        "step() when no save is due", 1e6 * median(samples), "us", note, target=_STEP_GOAL_US
    )


def _slowest_us(samples: list[float]) -> float:
    """What one call in a hundred takes at least: those that begin a pulse, or follow one."""
    return 1e6 * sorted(samples)[-len(samples) // 100]


def _measure_resume(report: Report, parts: dict[str, Any], options: Options, nbytes: int) -> None:
    root = options.directory / "resume"
    with localckpt.Checkpointer(parts, local=root) as checkpointer:
        first = checkpointer.resume()
        checkpointer.save(first)
    peaks: list[int] = []

    def resume_s() -> float:
        with localckpt.Checkpointer(parts, local=root) as checkpointer:
            before = family_bytes()
            with sampled_peak() as peak:
                began = time.monotonic()
                checkpointer.resume()
                took_s = time.monotonic() - began
            peaks.append(peak[0] - before)
        return took_s

    def load_s() -> float:
        into = {name: part.state_dict() for name, part in parts.items()}
        with localckpt.LocalCheckpointManager(root) as manager:
            began = time.monotonic()
            manager.find_latest()
            manager.load(into=into, partial=True)
            return time.monotonic() - began

    settle()
    load_s()
    comparison = report.compared("resume()", "find_latest(), load(into=)", nbytes, _RESUME_GOAL)
    arms: list[tuple[Any, Callable[[], float]]] = [(comparison, resume_s)]
    compare(options.rounds, load_s, arms)
    report.fact(
        "most memory that resume() takes beside the state",
        median(peaks) / (1 << 20),
        "MiB",
        "median",
        target=_EXTRA_GOAL_MIB,
    )


def _measure_overhead(report: Report, parts: dict[str, Any], root: Path) -> None:
    """Time of a loop with the default cadence beside that of the same loop without saves."""

    def loop_s(checkpointer: localckpt.Checkpointer | None, first: int) -> float:
        began = time.monotonic()
        for step in range(first, first + _LOOP_STEPS):
            time.sleep(_STEP_S)
            if checkpointer is not None:
                checkpointer.step(step)
        return time.monotonic() - began

    every = localckpt.Every(overhead=_SHARE)
    with localckpt.Checkpointer(parts, local=root, every=every) as checkpointer:
        first = checkpointer.resume()
        # The first save, of buffers that are made for it, is what the cadence begins with.
        loop_s(checkpointer, first)
        saving_s = loop_s(checkpointer, first + _LOOP_STEPS)
        saved = checkpointer.manager.last_save
    plain_s = loop_s(None, 0)
    assert saved is not None
    note = f"{_LOOP_STEPS} steps of {_STEP_S * 1e3:.0f} ms; a save stalls {saved.stall_s:.3f} s"
    share = 100 * (saving_s - plain_s) / plain_s
    report.fact(f"overhead of Every(overhead={_SHARE})", share, "%", note, target=_SHARE_GOAL)
