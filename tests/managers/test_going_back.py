"""Both tiers have one shape: what they save and load, and how a job goes back on purpose."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import localckpt
from localckpt import CheckpointingException, CkptID, NoReplicasAvailableError
from tests.managers.jobs import assert_same, damage, make_manager, state_of
from tests.scenarios import Job


def test_a_job_goes_back_and_what_it_left_behind_does_not_overrule_it(
    job: Callable[..., Job],
) -> None:
    running = job(nodes=2, redundancy=(1, 2), keep_last=4).save(1, 2, 3, 4)

    # Nobody asked what there is.
    running.restart().expect(2, asked=True).expect_complete(4, 3, 2, 1)
    running.save(3, value=30).expect(3, value=30).expect_complete(3, 2, 1, 4)
    # And again, from what this manager itself has saved.
    running.save(5, value=50).expect(3, value=30, asked=True).save(4, value=40)

    running.restart().expect(4, value=40).run()


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
