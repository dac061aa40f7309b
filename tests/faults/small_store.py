"""A store with two small checkpoints of one rank, and processes with little memory to read it."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import numpy
import torch

from tests.managers.jobs import make_manager

__all__ = ["NEWEST", "OLDER", "Growth", "limit_memory", "small_state", "write_store"]

OLDER, NEWEST = 7, 8
_ROOM_NBYTES = 2 << 30


def small_state(iteration: int) -> dict[str, Any]:
    """A state of a few pages."""
    weight = torch.arange(600.0) * iteration
    return {
        "weight": weight.view(20, 30),
        "rows": weight[30:90],
        "half": torch.arange(7).to(torch.bfloat16),
        "step": torch.tensor(float(iteration)),
        "parameter": torch.nn.Parameter(torch.arange(5.0)),
        "array": numpy.arange(4),
        "iteration": iteration,
    }


def write_store(root: Path) -> tuple[Path, bytes]:
    """A store with two checkpoints; the file of the newer one, and what is in it."""
    with make_manager("disk", root, "job", keep_last=2) as manager:
        for iteration in (OLDER, NEWEST):
            manager.save(small_state(iteration), iteration)
    _, path = sorted(root.rglob("*.safetensors"))
    return path, path.read_bytes()


def limit_memory() -> None:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + _ROOM_NBYTES, resource.RLIM_INFINITY))


class Growth:
    """By how many bytes this process has grown at most since this was made."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self._before = self._peak()

    def __call__(self) -> int:
        return self._peak() - self._before

    @staticmethod
    def _peak() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
