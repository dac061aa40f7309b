"""The best checkpoints by a metric stay on the nodes, beside the last ones."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from localckpt import Best, Retention
from localckpt.storage.notes import read_notes
from tests.cli.commands import call
from tests.managers.jobs import assert_same, error_of, make_manager, state_of
from tests.ranks import node_store, run_ranks

_LEAST = Retention(last=2, best=Best("loss"))


def _save(manager: Any, values: dict[int, Any], rank: int = 0) -> list[int]:
    """Save iterations with a loss each, ``None`` for none; what is there then."""
    for iteration, value in values.items():
        metrics = {"rank": rank} if value is None else {"loss": value, "rank": rank}
        manager.save(state_of(rank, iteration), iteration, metrics=metrics)
    return list(manager.all_iterations())


def test_the_best_stays_beside_the_last_also_after_restarts(tmp_path: Path) -> None:
    with make_manager("disk", tmp_path, "job", retention=_LEAST) as manager:
        there = _save(manager, {1: 3.0, 2: torch.tensor(0.5), 3: math.nan, 4: None, 5: 2, 6: 1.0})
        assert there == [6, 5, 2]
    with make_manager("disk", tmp_path, "job", retention=_LEAST) as manager:
        manager.load()
        assert _save(manager, {7: 4.0, 8: 5.0, 9: 6.0}) == [9, 8, 2]
        assert_same(manager.load(iteration=2)[0], state_of(0, 2))
    assert (
        "Iteration 2 was saved with loss 0.5, by which the job keeps"
        in call("explain", tmp_path).out
    )
    with make_manager("disk", tmp_path, "job", retention=_LEAST) as manager:
        manager.load()
        assert _save(manager, {10: 0.25, 11: 7.0, 12: 8.0}) == [12, 11, 10]
    # Notes of checkpoints that are gone are gone.
    assert [_noted(folder) for folder in tmp_path.glob("session-job/*")] == [[10, 11, 12]]


def _noted(folder: Path) -> list[int]:
    """Iterations of which a rank's folder notes a metric."""
    return sorted(c.iteration for c, trust in read_notes(folder).noted.items() if trust.metric)


def test_one_that_is_marked_bad_is_never_the_best(tmp_path: Path) -> None:
    def check(tensors: Any) -> str | None:
        return "too small" if tensors["w"].max() < 1 else None

    with make_manager("disk", tmp_path, "job", retention=_LEAST, check=check) as manager:
        for iteration, value in ((1, 3.0), (2, 2.0), (3, 0.0), (4, 4.0), (5, 5.0), (6, 6.0)):
            state = {"w": torch.full((9,), value)}
            manager.save(state, iteration, metrics={"loss": value})

        assert manager.all_iterations() == [6, 5, 2]


def test_the_best_before_the_point_that_the_job_goes_back_to_stays(tmp_path: Path) -> None:
    everything = Retention(last=9, best=Best("loss"))
    with make_manager("disk", tmp_path, "job", retention=everything) as manager:
        _save(manager, {1: 1.0, 2: 5.0, 3: 0.5, 4: 6.0})
    with make_manager("disk", tmp_path, "job", retention=_LEAST) as manager:
        # What comes after iteration 2 is given up, and the least loss with it.
        manager.load(iteration=2)
        assert _save(manager, {3: 7.0, 4: 8.0, 5: 9.0}) == [5, 4, 1]
    with make_manager("disk", tmp_path, "job", retention=_LEAST) as manager:
        # To the best itself, which then is the best so far.
        manager.load(iteration=1)
        assert _save(manager, {2: 7.0, 3: 8.0, 4: 9.0}) == [4, 3, 1]


def _with_bad_metric(rank: int, world_size: int) -> list[str]:
    told = []
    with make_manager("disk", node_store(), "job", retention=_LEAST) as manager:
        _save(manager, {1: 1.0})
        for iteration, metrics in ((2, {"loss": torch.ones(2)}), (3, 0.5)):
            given: Any = metrics if rank == 0 else None
            told.append(
                error_of(
                    lambda it=iteration, m=given: manager.save(  # type: ignore[misc]
                        state_of(rank, it), it, metrics=m
                    )
                )
            )
        assert manager.find_latest() == 1
        assert _save(manager, {4: 4.0, 5: 5.0, 6: 6.0}) == [6, 5, 1]
    return told


def test_a_metric_that_is_no_number_is_an_error_on_all_ranks_and_saving_goes_on(
    tmp_path: Path,
) -> None:
    first, second = run_ranks(_with_bad_metric, 2, store_per_node=[tmp_path])

    assert first == second
    assert all("failed: rank 0: CheckpointingException: " in told for told in first)
    assert "the metric 'loss' is a Tensor, and must be a number" in first[0]
    assert "metrics is a float: give numbers by name, as {'loss': 0.5}" in first[1]
