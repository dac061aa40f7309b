"""Both tiers have one shape: what they save and load, and how a job goes back on purpose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import localckpt
from localckpt import CheckpointingException, CkptID, NoReplicasAvailableError
from tests.managers.jobs import assert_same, cliques, damage, make_manager, state_of
from tests.ranks import node_store, run_ranks


def _go_back(rank: int, world_size: int) -> None:
    replicas = cliques(1, 2)
    options: dict[str, Any] = {"keep_last": 4}
    with make_manager("disk", node_store(), "job", replicas, **options) as manager:
        for iteration in (1, 2, 3, 4):
            manager.save(state_of(rank, iteration), iteration)
    with make_manager("disk", node_store(), "job", replicas, **options) as manager:
        # Nobody asked what there is.
        state, ckpt_id = manager.load(iteration=2)
        assert_same(state, state_of(rank, 2))
        assert ckpt_id == CkptID(2, rank, "job")
        assert manager.all_iterations() == [4, 3, 2, 1]
        manager.save(state_of(rank, 30), 3)
        assert manager.find_latest() == 3
        assert manager.all_iterations() == [3, 2, 1, 4]
        # And again, from what this manager itself has saved.
        manager.save(state_of(rank, 50), 5)
        assert_same(manager.load(iteration=3)[0], state_of(rank, 30))
        manager.save(state_of(rank, 40), 4)
    with make_manager("disk", node_store(), "job", replicas, **options) as manager:
        assert manager.find_latest() == 4
        assert_same(manager.load()[0], state_of(rank, 40))
    replicas.close()


def test_a_job_goes_back_and_what_it_left_behind_does_not_overrule_it(tmp_path: Path) -> None:
    nodes = [tmp_path / name for name in ("a", "b")]
    for node in nodes:
        node.mkdir()

    run_ranks(_go_back, 2, store_per_node=nodes)


def test_an_iteration_that_is_not_there_is_an_error_that_says_which_are(tmp_path: Path) -> None:
    with make_manager("disk", tmp_path, "job", keep_last=3) as manager:
        for iteration in (1, 2, 3):
            manager.save(state_of(0, iteration), iteration)

        with pytest.raises(
            NoReplicasAvailableError, match=r"iteration 7 .* Complete are: 3, 2, 1\."
        ):
            manager.load(iteration=7)

        assert manager.find_latest() == 3
        assert_same(manager.load()[0], state_of(0, 3))


def test_an_iteration_that_was_asked_for_is_not_replaced_by_an_older_one(tmp_path: Path) -> None:
    with make_manager("disk", tmp_path, "job", keep_last=3) as manager:
        for iteration in (1, 2, 3):
            manager.save(state_of(0, iteration), iteration)
        (path,) = tmp_path.rglob("*2.0.*.safetensors")
        damage(path, 0.5)

        with pytest.raises(NoReplicasAvailableError, match=r"iteration 2 is not complete"):
            manager.load(iteration=2)

        assert manager.all_iterations() == [3, 1]


def test_a_job_does_not_go_back_while_saves_are_in_flight(tmp_path: Path) -> None:
    with (
        make_manager("disk", tmp_path, "job", keep_last=3) as manager,
        localckpt.AsyncCallsQueue() as queue,
    ):
        manager.save(state_of(0, 1), 1)
        queue.schedule_async_request(manager.save(state_of(0, 2), 2, is_async=True))

        for go_back in (lambda: manager.load(iteration=1), lambda: manager.begin(1)):
            with pytest.raises(CheckpointingException, match=r"iterations \[2\] are in flight"):
                go_back()

        queue.maybe_finalize_async_calls(blocking=True)
        assert_same(manager.load(iteration=1)[0], state_of(0, 1))


@pytest.mark.parametrize("tier", ["disk", "memory", "shared"])
def test_both_tiers_save_and_load_in_the_same_words(tier: str, tmp_path: Path) -> None:
    if tier == "shared":
        manager: Any = localckpt.GlobalCheckpointManager(tmp_path, "job", timeout=20.0)
    else:
        manager = make_manager(tier, tmp_path, "job", keep_last=3)

    with manager:
        for iteration in (1, 2, 3):
            manager.save({"w": torch.full((9,), float(iteration)), "at": iteration}, iteration)
        with pytest.raises(NoReplicasAvailableError, match="iteration 7"):
            manager.load(into={"w": torch.zeros(9), "at": 0}, iteration=7)
        target = {"w": torch.zeros(9), "at": 0}
        state, ckpt_id = manager.load(into=target, iteration=2)

        assert manager.all_iterations() == [3, 2, 1]
        assert manager.find_latest() == 3
        assert ckpt_id == CkptID(2, 0, "job")
        assert_same(state, {"w": torch.full((9,), 2.0), "at": 2})
        assert state["w"] is target["w"]
        manager.save({"w": torch.full((9,), 5.0), "at": 5}, 3)
        assert manager.find_latest() == 3
        assert_same(manager.load(into=target)[0], {"w": torch.full((9,), 5.0), "at": 5})
