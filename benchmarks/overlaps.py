"""What it takes to plan the reads of one tensor that was saved in another sharding than is wanted.

Ours beside torch's function of the same name, on the same chunks in turn, or on fewer where torch's
would take half a minute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from statistics import median

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import (
    create_read_items_for_chunk_list as torch_create_read_items,
)

from benchmarks.report import Report
from benchmarks.setup import Options
from localckpt.global_tier.load_planner import create_read_items_for_chunk_list

__all__ = ["measure"]

_GOAL_MS = 1000.0
_Parts = tuple[int, ...]
_Create = Callable[[str, TensorStorageMetadata, list[ChunkStorageMetadata]], list[ReadItem]]


@dataclass(frozen=True, slots=True)
class _Case:
    """A tensor in nearly equal parts along each dimension, as saved and as wanted."""

    name: str
    shape: _Parts
    saved: _Parts
    wanted: _Parts
    torchs: tuple[_Parts, _Parts] | None = None
    """As saved and as wanted for torch's, where that would take too long."""
    calls: int = 1
    """Of one sample."""
    goal_ms: float | None = _GOAL_MS


_CASES = [
    _Case("rows of 100000 x 64", (100000, 64), (10000, 1), (9999, 1)),
    _Case(
        name="rows of 10000 x 50000",
        shape=(10000, 50000),
        saved=(10000, 1),
        wanted=(9999, 1),
        torchs=((2000, 1), (1999, 1)),
    ),
    _Case(
        name="columns of 50000 x 10000",
        shape=(50000, 10000),
        saved=(1, 10000),
        wanted=(1, 9999),
        torchs=((1, 2000), (1, 1999)),
    ),
    _Case("grid", (100000, 100000), (100, 100), (101, 99)),
    _Case("blocks in 3 dimensions", (1000, 1000, 1000), (22, 22, 21), (21, 22, 22)),
    _Case("rows to columns", (10000, 10000), (100, 1), (1, 100)),
    _Case("rows to the whole", (100000, 64), (10000, 1), (1, 1)),
    _Case("8 rows to the whole", (4096, 4096), (8, 1), (1, 1), None, 1000, None),
]


def measure(options: Options) -> Report:
    """Medians of both, sample by sample in turn."""
    report = Report("overlaps", options.state)
    for case in _CASES:
        ours = _Arm(create_read_items_for_chunk_list, case, (case.saved, case.wanted))
        torchs = _Arm(torch_create_read_items, case, case.torchs or (case.saved, case.wanted))
        for _ in range(options.rounds):
            ours.sample()
            torchs.sample()
        report.fact(f"{case.name}, ours", median(ours.ms), "ms", ours.note, case.goal_ms)
        fewer = "; all take over 20 s" if case.torchs else ""
        report.fact(f"{case.name}, torch's", median(torchs.ms), "ms", torchs.note + fewer)
    return report


class _Arm:
    """One of the two functions, its chunks, and the milliseconds that a call took."""

    def __init__(self, create: _Create, case: _Case, parts: tuple[_Parts, _Parts]) -> None:
        saved, self._wanted = (_tiling(case.shape, counts) for counts in parts)
        self._saved = TensorStorageMetadata(TensorProperties(), torch.Size(case.shape), saved)
        self._create = create
        self._calls = case.calls
        self.ms: list[float] = []
        self._items = len(create("tensor", self._saved, self._wanted))

    def sample(self) -> None:
        began = time.perf_counter()
        for _ in range(self._calls):
            items = self._create("tensor", self._saved, self._wanted)
        self.ms.append((time.perf_counter() - began) / self._calls * 1e3)
        if len(items) != self._items:
            raise RuntimeError("the same chunks gave other items")

    @property
    def note(self) -> str:
        return (
            f"{len(self._saved.chunks)} saved, {len(self._wanted)} wanted, {self._items} items, "
            f"{min(self.ms):.4g} to {max(self.ms):.4g} ms"
        )


def _tiling(shape: Sequence[int], parts: Sequence[int]) -> list[ChunkStorageMetadata]:
    along = [
        list(pairwise(size * i // count for i in range(count + 1)))
        for size, count in zip(shape, parts, strict=True)
    ]
    return [
        ChunkStorageMetadata(
            torch.Size([start for start, _ in box]), torch.Size([end - start for start, end in box])
        )
        for box in product(*along)
    ]
