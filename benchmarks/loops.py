"""Three loops that stand for training, and the time that a save behind them takes from each.

A matmul on one core outside the interpreter; many small operations, which any other thread that
wants the interpreter slows down; a matmul on two cores, which leaves none for the save.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["LOOPS", "Loop", "Lost", "Saving", "lost_in", "running"]

_ALONE_S = 0.7
_CORES = os.sched_getaffinity(0)
_SAVE_TIMEOUT_S = 120.0


class Saving(Protocol):
    """A way to save behind training; what starting and finishing give back is not looked at."""

    def start(self) -> object: ...
    def done(self) -> bool: ...
    def finish(self) -> object: ...


@dataclass(frozen=True, slots=True)
class Loop:
    """Training on some cores."""

    threads: int
    pinned: bool
    make_step: Callable[[], Callable[[], None]]


@dataclass(frozen=True, slots=True)
class Lost:
    """One save behind one loop."""

    stall_s: float
    lost_s: float
    """Longer than the same steps take alone, stall included."""


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


LOOPS = {
    "matmul, 1 core": Loop(1, True, _matmul_step),
    "small operations": Loop(1, False, _small_step),
    "matmul, 2 threads": Loop(2, False, _matmul_step),
}


@contextmanager
def running(loop: Loop, core: int = -1) -> Iterator[tuple[Callable[[], None], int]]:
    """A step of the loop, and how many of them to take alone; the threads are as the loop asks.

    Args:
        loop: Which.
        core: Where it runs, if it is pinned: which of the cores of this process.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(loop.threads)
    try:
        step = loop.make_step()
        step()
        with _on_cores({sorted(_CORES)[core % len(_CORES)]} if loop.pinned else _CORES):
            began, steps = time.perf_counter(), 0
            while time.perf_counter() - began < 0.3:
                step()
                steps += 1
            yield step, max(1, round(steps * _ALONE_S / (time.perf_counter() - began)))
    finally:
        torch.set_num_threads(threads)


def lost_in(step: Callable[[], None], steps: int, saving: Saving) -> Lost:
    """The loop with a save behind it, at least until the save is over; alone before and after."""
    alone_s = _alone_s(step, steps)
    began = time.perf_counter()
    # Threads and processes that a save starts inherit the cores, and should have all of them.
    with _on_cores(_CORES):
        saving.start()
    stall_s = time.perf_counter() - began
    taken = 0
    while not saving.done() or taken < steps:
        step()
        taken += 1
        if time.perf_counter() - began > _SAVE_TIMEOUT_S:
            raise TimeoutError(f"a save was not over after {_SAVE_TIMEOUT_S:.0f} s")
    saving.finish()
    took_s = time.perf_counter() - began
    step_s = (alone_s + _alone_s(step, steps)) / 2 / steps
    return Lost(stall_s, took_s - taken * step_s)


def _alone_s(step: Callable[[], None], steps: int) -> float:
    began = time.perf_counter()
    for _ in range(steps):
        step()
    return time.perf_counter() - began


@contextmanager
def _on_cores(cores: set[int]) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
