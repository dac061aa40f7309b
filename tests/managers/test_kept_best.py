"""The best checkpoints by a metric stay on the nodes, beside the last ones."""

from __future__ import annotations

import math
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import localckpt
from localckpt import Best, CheckpointingException, Retention
from localckpt.storage.notes import read_notes
from tests.cli.commands import call
from tests.managers.jobs import (
    KINDS,
    MAX_S,
    assert_same,
    cliques,
    error_of,
    make_manager,
    state_of,
)
from tests.ranks import node_store, run_ranks

_LEAST = Retention(last=2, best=Best("loss"))


def _save(manager: Any, values: dict[int, Any], rank: int = 0) -> list[int]:
    """Save iterations with a loss each, ``None`` for none; what is there then."""
    for iteration, value in values.items():
        metrics = {"rank": rank} if value is None else {"loss": value, "rank": rank}
        manager.save(state_of(rank, iteration), iteration, metrics=metrics)
    return list(manager.all_iterations())


@pytest.mark.parametrize("kind", KINDS)
def test_the_best_stays_beside_the_last_also_after_restarts(kind: str, tmp_path: Path) -> None:
    with make_manager(kind, tmp_path, "job", retention=_LEAST) as manager:
        there = _save(manager, {1: 3.0, 2: torch.tensor(0.5), 3: math.nan, 4: None, 5: 2, 6: 1.0})
        assert there == [6, 5, 2]
    with make_manager(kind, tmp_path, "job", retention=_LEAST) as manager:
        manager.load()
        assert _save(manager, {7: 4.0, 8: 5.0, 9: 6.0}) == [9, 8, 2]
        assert_same(manager.load(iteration=2)[0], state_of(0, 2))
    assert (
        "Iteration 2 was saved with loss 0.5, by which the job keeps"
        in call("explain", tmp_path).out
    )
    with make_manager(kind, tmp_path, "job", retention=_LEAST) as manager:
        manager.load()
        assert _save(manager, {10: 0.25, 11: 7.0, 12: 8.0}) == [12, 11, 10]
    # Notes of checkpoints that are gone are gone.
    assert [_noted(folder) for folder in tmp_path.glob("session-job/*")] == [[10, 11, 12]]


def _noted(folder: Path) -> list[int]:
    """Iterations of which a rank's folder notes a metric."""
    return sorted(c.iteration for c, trust in read_notes(folder).noted.items() if trust.metric)


@pytest.mark.parametrize("kind", KINDS)
def test_several_of_the_greatest_stay_and_infinity_is_a_value(kind: str, tmp_path: Path) -> None:
    retention = Retention(last=1, best=Best("loss", mode="max", count=2))

    for values, expected in (
        ({1: 1.0, 2: math.inf, 3: 2.0, 4: -math.inf, 5: 0.0}, [5, 3, 2]),
        ({6: 9.0, 7: 0.0}, [7, 6, 2]),
    ):
        with make_manager(kind, tmp_path, "job", retention=retention) as manager:
            manager.find_latest()
            assert _save(manager, values) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_behind_training_the_best_stays_as_well(kind: str, tmp_path: Path) -> None:
    options = {"retention": _LEAST}
    with (
        make_manager(kind, tmp_path, "job", **options) as manager,
        localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue,
    ):
        for iteration, loss in enumerate([3.0, 1.0, 2.0, 4.0, 5.0]):
            value, state = torch.tensor(loss), state_of(0, iteration)
            request = manager.save(state, iteration, is_async=True, metrics={"loss": value})
            # The value at the call counts.
            value.fill_(-1.0)
            queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)

        assert manager.all_iterations() == [4, 3, 1]
    with make_manager(kind, tmp_path, "job", **options) as manager:
        manager.load()
        assert _save(manager, {5: 6.0, 6: 7.0}) == [6, 5, 1]


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


def test_a_job_that_is_killed_after_a_save_has_noted_its_metric(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys, torch, localckpt\n"
        "best = localckpt.Best('loss')\n"
        "retention = localckpt.Retention(last=2, best=best)\n"
        "manager = localckpt.LocalCheckpointManager(sys.argv[1], 'job', retention=retention)\n"
        "for iteration, loss in ((1, 2.0), (2, 1.0)):\n"
        "    manager.save({'w': torch.ones(9)}, iteration, metrics={'loss': loss})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL

    with make_manager("disk", tmp_path, "job", retention=_LEAST) as manager:
        manager.load()
        assert _save(manager, {3: 7.0, 4: 8.0, 5: 9.0}) == [5, 4, 2]


def _on_rank(rank: int, world_size: int, kind: str, values: dict[int, Any]) -> list[int]:
    replicas = cliques(1, 2)
    with make_manager(kind, node_store(), "job", replicas, retention=_LEAST) as manager:
        if manager.find_latest() != -1:
            manager.load()
        # Those of the first rank count.
        there = _save(manager, {i: v if rank == 0 else -i for i, v in values.items()}, rank)
        state, _ = manager.load(iteration=there[-1])
        assert_same(state, state_of(rank, there[-1]))
    replicas.close()
    return there


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lost", [0, 1])
def test_the_first_rank_says_which_is_best_and_either_node_knows_after_the_other_is_replaced(
    kind: str, lost: int, tmp_path: Path
) -> None:
    nodes = [tmp_path / name for name in ("a", "b")]
    for node in nodes:
        node.mkdir()
    first = {1: math.inf, 2: 0.5, 3: 2.0, 4: 4.0}
    assert run_ranks(_on_rank, 2, kind, first, store_per_node=nodes) == [[4, 3, 2]] * 2

    shutil.rmtree(nodes[lost])
    nodes[lost].mkdir()

    second = {5: 5.0, 6: 6.0, 7: 7.0}
    assert run_ranks(_on_rank, 2, kind, second, store_per_node=nodes) == [[7, 6, 2]] * 2
    # The node that was replaced has been told.
    shutil.rmtree(nodes[1 - lost])
    nodes[1 - lost].mkdir()
    assert all(2 in _noted(folder) for folder in nodes[lost].glob("session-job/*"))


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


@pytest.mark.parametrize("kind", KINDS)
def test_rules_that_the_nodes_cannot_follow_make_no_manager(kind: str, tmp_path: Path) -> None:
    root = tmp_path / "store"
    for options in (
        {"keep_last": 2, "retention": Retention(last=2)},
        {"retention": Retention(best=Best("loss"))},
        {"retention": Retention(last=2, every=10)},
    ):
        with pytest.raises(CheckpointingException, match="retention="):
            make_manager(kind, root, "job", **options)

    assert not root.exists()


def test_memory_is_planned_for_the_best_as_well(tmp_path: Path) -> None:
    for retention in (Retention(last=3), Retention(last=1, best=Best("loss", count=2))):
        with make_manager("memory", tmp_path, "job", retention=retention) as manager:
            assert manager.store.memory_needs(1).kept == 3
