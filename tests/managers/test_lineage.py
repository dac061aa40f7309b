"""Only what a job went back from on purpose is overruled, and how it goes back."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

import localckpt
from localckpt import CheckpointingException, NoReplicasAvailableError
from localckpt.errors import MismatchError
from tests.managers.jobs import (
    Dirs,
    assert_same,
    damage,
    error_of,
    iterations_on,
    make_manager,
    resume,
    state_of,
)
from tests.ranks import node_store, run_ranks
from tests.scenarios import Begin


def _begin(manager: Any, iteration: int) -> None:
    manager.begin(from_iteration=iteration)


@pytest.mark.fault("old-files")
@pytest.mark.parametrize("begins_at", [None, 5000])
def test_a_repaired_node_does_not_bring_back_an_older_checkpoint_of_more_restarts(
    begins_at: int | None, job: Begin
) -> None:
    running = job(nodes=4, ranks=2, redundancy=(1, 2), keep_last=1)
    # The job runs on nodes 0 and 1, and is restarted three times.
    running.restart(on=[0, 1]).save(3)
    for iteration in (3, 8, 13):
        running.restart(on=[0, 1]).expect(iteration).save(iteration + 5)
    # Both go to repair; it goes on from shared storage on two others, and is restarted once.
    running.restart(on=[2, 3])
    if begins_at is not None:
        running.call(_begin, begins_at)
    running.save(5001, 5006).restart(on=[2, 3]).expect(5006).save(5011, 5012)

    # Node 2 dies; node 0 is back, and takes its place.
    running.restart(on=[0, 3]).expect(5012, {0: "peer rank 1"}).repaired()
    running.restart(on=[0, 3]).expect(5012).save(5013).run()

    assert iterations_on(running.nodes[0], running.nodes[3]) == {5013}


def _go_back_in_one_job(rank: int, world_size: int) -> None:
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


def test_a_job_that_says_it_goes_back_overrules_what_it_left_on_all_ranks(node_dirs: Dirs) -> None:
    run_ranks(_go_back_in_one_job, 2, store_per_node=node_dirs(2))


def test_a_job_that_asks_for_nothing_removes_what_is_ahead_of_it_only_when_it_has_passed_it(
    tmp_path: Path,
) -> None:
    def start() -> Any:
        return make_manager("disk", tmp_path, "job", keep_last=1)

    with start() as manager:
        manager.save(state_of(0, 20), 20)
    # Another training under the same name: it does not know that there is something.
    with start() as manager:
        manager.save(state_of(0, 3), 3)
        manager.save(state_of(0, 4), 4)
        assert iterations_on(tmp_path) == {4, 20}
        assert resume(manager, 0, 4) == "own node"
    with start() as manager:
        assert resume(manager, 0, 4) == "own node"
        manager.save(state_of(0, 5), 5)

    assert iterations_on(tmp_path) == {5}


def test_what_is_saved_after_an_older_one_was_loaded_is_newer_than_what_could_not_be_had(
    tmp_path: Path,
) -> None:
    with make_manager("disk", tmp_path, "job", keep_last=3) as manager:
        for iteration in (10, 20):
            manager.save(state_of(0, iteration, 3 << 20), iteration)
    (newest,) = tmp_path.rglob("*20.0.*.safetensors")
    whole = newest.read_bytes()
    # Its header is good.
    damage(newest, 0.7)
    with make_manager("disk", tmp_path, "job", keep_last=3) as manager:
        assert manager.find_latest() == 20
        assert manager.load()[1].iteration == 10
        manager.save(state_of(0, 11), 11)
    # A good copy of it comes back.
    newest.write_bytes(whole)

    with make_manager("disk", tmp_path, "job", keep_last=3) as manager:
        assert resume(manager, 0, 11) == "own node"


def test_a_job_goes_back_and_what_it_left_behind_does_not_overrule_it(
    job: Begin,
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
