"""Shared storage of the tests of faults: its managers, its states, and what may lie there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from localckpt.global_tier import staging
from localckpt.global_tier.folders import CommitRecord
from localckpt.global_tier.places import FilePlace
from tests.global_tier.models import Job
from tests.managers.jobs import assert_same
from tests.ranks import node_store

__all__ = ["NUMEL", "Drains", "assert_nothing_else", "iterations_on", "state_of"]

NUMEL = 600_000
_ADMINISTRATION = {".localckpt.lock", ".localckpt.owner"}


def state_of(iteration: int, numel: int = NUMEL, part: int | None = None) -> dict[str, Any]:
    """A state of which every value tells the iteration; or what one rank of two has of it."""
    random = torch.Generator().manual_seed(iteration)
    halves = torch.randn(numel, generator=random).chunk(2)
    return {
        "weights": {f"{i}": half for i, half in enumerate(halves) if part in (None, i)},
        "bias": torch.randn(numel, generator=random),
        "optimizer": {"step": torch.tensor(float(iteration))},
        "losses": [1.5, iteration],
    }


def iterations_on(root: Path) -> list[int]:
    """Of all directories that are committed."""
    return [
        CommitRecord.read(FilePlace(path)).iteration for path in root.glob("iteration_*/*.json")
    ]


def assert_nothing_else(root: Path) -> None:
    """There are committed checkpoints, and the files of a root's administration."""
    folders = {path for path in root.iterdir() if path.name not in _ADMINISTRATION}
    for folder in folders:
        record = CommitRecord.read(FilePlace(folder, "localckpt.json"))
        assert record is not None, sorted(root.rglob("*"))
        names = {path.name for path in folder.iterdir()}
        assert names == {*record.files, ".metadata", "localckpt.json"}


class Drains(Job):
    """A rank whose node is drained to shared storage, in files so small that there are several."""

    def __init__(self, root: Path, rank: int) -> None:
        staging.FILE_NBYTES = 1 << 20  # type: ignore[misc]
        self._rank = rank
        super().__init__(root, {"root": root}, node_store())

    def __enter__(self) -> Drains:
        return self

    def state(self, iteration: int) -> dict[str, Any]:
        own = torch.Generator().manual_seed(1000 * iteration + self._rank)
        common = torch.Generator().manual_seed(iteration)
        return {
            "common": {f"{n}": torch.randn(200_000, generator=common) for n in range(4)},
            f"of {self._rank}": torch.randn(300_000, generator=own),
            "losses": [1.5, iteration],
        }

    def save(self, iteration: int) -> None:
        self.nodes.save(self.state(iteration), iteration)

    def assert_drained(self, iteration: int) -> None:
        into = self.state(0)
        self.shared.load(into=into, iteration=iteration)
        assert_same(into, self.state(iteration))
