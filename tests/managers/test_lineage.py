"""Attempts of a job are told apart; only what a job went back from on purpose is overruled."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

import localckpt
from localckpt import CheckpointingException, NoReplicasAvailableError
from localckpt.errors import MismatchError
from tests.managers.jobs import (
    assert_same,
    damage,
    error_of,
    iterations_on,
    make_manager,
    resume,
    state_of,
)
from tests.ranks import node_store, on_ranks
from tests.scenarios import Begin


@pytest.mark.fault("old-files")
def test_a_job_that_went_back_is_not_overruled_by_what_it_abandoned(job: Begin) -> None:
    running = job(nodes=2, kind="memory", redundancy=(1, 2), keep_last=9).save(80, 90, 100)

    # The first attempt is given up at 100; the second starts elsewhere, saves 95 and dies.
    running.restart().save(95).expect(95).run()
    for node in running.nodes:
        assert iterations_on(node) == {80, 90, 95, 100}

    # The third goes on from 95, and reaches 100 in its own way.
    running.restart().expect(95).save(100, value=101).expect(100, value=101)
    running.restart().expect(100, value=101)
    # What is kept are the newest, not the highest.
    running.restart(keep_last=2).find(100).save(96).find(96).save(97).expect(97).run()
    for node in running.nodes:
        assert iterations_on(node) == {96, 97}


@on_ranks(2, nodes=2)
def test_a_job_that_says_it_goes_back_overrules_what_it_left_on_all_ranks(rank: int) -> None:
    with make_manager("disk", node_store(), "job", keep_last=2) as manager:
        for iteration in (10, 20, 30):
            manager.save(state_of(rank, iteration), iteration)
        told = error_of(lambda: manager.begin(from_iteration=20 + rank), MismatchError)
        assert "20 on rank 0, 21 on rank 1" in told
        for wrong in (-2, 1.0):
            assert "the iteration to go on from is" in error_of(partial(manager.begin, wrong))
        manager.begin(from_iteration=20)
        assert "must be above it" in error_of(lambda: manager.save({}, 20))
        manager.save({"second": rank}, 25)
        assert manager.find_latest() == 25
        assert_same(manager.load()[0], {"second": rank})
        assert iterations_on(node_store()) == {20, 25}
        manager.save({"second": rank}, 30)
    with make_manager("disk", node_store(), "job", keep_last=2) as manager:
        assert manager.find_latest() == 30
        assert_same(manager.load()[0], {"second": rank})


def test_an_iteration_that_cannot_be_had_is_an_error_and_not_replaced_by_another_one(
    tmp_path: Path,
) -> None:
    with (
        make_manager("disk", tmp_path, "job", keep_last=3) as manager,
        localckpt.AsyncCallsQueue() as queue,
    ):
        for iteration in (1, 2):
            manager.save(state_of(0, iteration), iteration)
        queue.schedule_async_request(manager.save(state_of(0, 3), 3, is_async=True))
        for go_back in (lambda: manager.load(iteration=1), lambda: manager.begin(1)):
            with pytest.raises(CheckpointingException, match=r"iterations \[3\] are in flight"):
                go_back()
        queue.maybe_finalize_async_calls(blocking=True)

        with pytest.raises(
            NoReplicasAvailableError, match=r"iteration 7 .* Complete are: 3, 2, 1\."
        ):
            manager.load(iteration=7)
        (path,) = tmp_path.rglob("*2.0.*.safetensors")
        damage(path, 0.5)
        with pytest.raises(NoReplicasAvailableError, match=r"iteration 2 is not complete"):
            manager.load(iteration=2)

        assert manager.all_iterations() == [3, 1]
        assert_same(manager.load(iteration=1)[0], state_of(0, 1))


_YEAR_S = 365 * 86_400


@pytest.mark.fault("clock")
@pytest.mark.parametrize("years_a_save", [0, -1, 50])
def test_the_times_of_files_have_no_effect(years_a_save: int, tmp_path: Path) -> None:
    for iteration in (1, 2, 3):
        # Each in a life of its own, so that all of the next one's decisions are made from files.
        with make_manager("disk", tmp_path, keep_last=2) as manager:
            if iteration > 1:
                resume(manager, 0, iteration - 1)
            manager.save(state_of(0, iteration), iteration)
        seconds = 1_800_000_000 + iteration * years_a_save * _YEAR_S
        for path in tmp_path.rglob("*"):
            os.utime(path, (seconds, seconds))

    with make_manager("disk", tmp_path, keep_last=2) as manager:
        resume(manager, 0, 3)
    assert iterations_on(tmp_path) == {2, 3}
