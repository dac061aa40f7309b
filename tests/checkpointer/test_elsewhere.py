"""A checkpoint that the program loads by itself takes part when a job resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from localckpt import Checkpointer, Elsewhere, MismatchError
from tests.checkpointer.loops import Part, stores
from tests.ranks import node_store, run_ranks


class _Job(Part):
    """A value that tells which step was loaded, and from where."""

    def __init__(self) -> None:
        super().__init__(torch.zeros(1))

    def run(
        self, elsewhere: Elsewhere | None, to: int, places: dict[str, Any], *, shared: bool = False
    ) -> tuple[int, float]:
        """Resume and save up to a step; the first step, and the value that was loaded."""
        with Checkpointer({"job": self}, **places) as checkpointer:
            first, loaded = checkpointer.resume(elsewhere), float(self.value)
            for step in range(first, to):
                self.value.fill_(step)
                checkpointer.step(step)
                checkpointer.save(step, shared=shared)
        return first, loaded

    def elsewhere(self, step: int, *, goes_back: bool = False) -> Elsewhere:
        """A checkpoint whose values are those that no other has."""
        return Elsewhere(step, lambda: self.value.fill_(100 + step), goes_back)


@pytest.mark.parametrize(
    ("step", "first", "loaded"),
    [
        pytest.param(-1, 4, 3, id="none"),
        pytest.param(2, 4, 3, id="older"),
        pytest.param(3, 4, 3, id="of-the-same-step"),
        pytest.param(7, 8, 107, id="newer"),
    ],
)
def test_the_newer_one_is_taken(step: int, first: int, loaded: float, tmp_path: Path) -> None:
    _Job().run(None, 4, {"local": tmp_path})
    job = _Job()

    assert job.run(job.elsewhere(step), first + 2, {"local": tmp_path}) == (first, loaded)

    assert _Job().run(None, 0, {"local": tmp_path}) == (first + 2, first + 1)


@pytest.mark.parametrize("shared", [False, True], ids=["on the nodes", "on both tiers"])
def test_going_back_gives_up_what_is_newer(shared: bool, tmp_path: Path) -> None:
    places: dict[str, Any] = {"local": tmp_path / "nodes", "save_last": False}
    if shared:
        places["shared"] = tmp_path / "shared"
    _Job().run(None, 9, places, shared=shared)
    job = _Job()

    assert job.run(job.elsewhere(4, goes_back=True), 7, places) == (5, 104)

    assert _Job().run(None, 0, places) == (7, 6)


def test_it_is_compared_with_shared_storage_too(tmp_path: Path) -> None:
    shared = {"shared": tmp_path / "shared"}
    _Job().run(None, 4, {"local": tmp_path / "a", **shared}, shared=True)
    job = _Job()

    assert job.run(job.elsewhere(2), 0, {"local": tmp_path / "b", **shared}) == (4, 3)

    newer = (job.elsewhere(6), 9, {"local": tmp_path / "c", **shared})
    assert job.run(*newer, shared=True) == (7, 106)
    assert _Job().run(None, 0, {"local": tmp_path / "d", **shared}) == (9, 8)


def _resume(rank: int, world_size: int, step: int | None, to: int) -> tuple[int, float]:
    job = _Job()
    elsewhere = None if step is None else job.elsewhere(step)
    return job.run(elsewhere, to, {"local": node_store()})


def test_what_another_number_of_ranks_has_saved_on_the_nodes_is_compared_with_it(
    tmp_path: Path,
) -> None:
    nodes = stores(tmp_path, 1)
    run_ranks(_resume, 2, None, 6, store_per_node=nodes)

    assert run_ranks(_resume, 1, 3, 8, store_per_node=nodes) == [(6, 5)]

    assert run_ranks(_resume, 1, 12, 0, store_per_node=nodes) == [(13, 112)]


def _resume_differently(rank: int, world_size: int) -> str:
    job = _Job()
    with pytest.raises(MismatchError) as caught:
        job.run(job.elsewhere(rank), 0, {"local": node_store()})
    assert float(job.value) == 0
    return str(caught.value)


def test_ranks_that_know_of_different_ones_load_none(tmp_path: Path) -> None:
    first, second = run_ranks(_resume_differently, 2, store_per_node=stores(tmp_path, 1))

    assert first == second
    assert "rank 0 of step 0, rank 1 of step 1" in first
