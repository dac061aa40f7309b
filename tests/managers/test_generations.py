"""Attempts of a job are told apart: what one abandoned neither overrules nor completes another."""

from __future__ import annotations

import pytest

from tests.managers.jobs import files, iterations_on
from tests.scenarios import Begin, Job


def _epochs_on(job: Job) -> list[list[str]]:
    job.run()
    return [[name.split(".")[2] for name in files(node)] for node in job.nodes]


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


@pytest.mark.fault("old-files")
def test_halves_of_two_attempts_never_make_a_checkpoint(job: Begin) -> None:
    saved = job(nodes=2, redundancy=(1, 2), keep_last=9).save(90, 100)
    # The same iteration anew, with other values.
    saved.restart().save(100, value=101)
    saved.restart(redundancy=None).expect(100, value=101)

    # Rank 0 only has its shard of the second attempt, rank 1 only that of the first.
    saved.remove("000000000100.1.2.*.safetensors", count=2)
    saved.remove("000000000100.0.1.*.safetensors", count=2).expect(90)
    saved.remove("000000000090.1.1.*.safetensors", count=2)

    saved.expect_none(
        "iteration 100 (generation 2.1, 2 ranks) lacks the shards of ranks 1",
        "iteration 100 (generation 1.2, 2 ranks) lacks the shards of ranks 0",
        "iteration 90 (generation 1.1, 2 ranks) lacks the shards of ranks 1",
    ).run()


@pytest.mark.fault("late-writer")
def test_what_is_left_of_an_unfinished_save_is_neither_found_nor_kept(job: Begin) -> None:
    # As if rank 1 had died before its write, after that of rank 0.
    running = job(nodes=2, keep_last=9).save(90, 100).remove("000000000100.1.1.*.safetensors")

    # The attempt goes another way, and comes to the same iteration.
    running.restart(keep_last=2).expect(90).save(100, value=102).expect(100, value=102).save(101)

    # What never was complete is not kept for ever.
    assert _epochs_on(running) == [["2", "2"]] * 2


def test_the_attempt_is_numbered_after_the_highest_that_any_node_holds(job: Begin) -> None:
    running = job(nodes=2, keep_last=9)
    for _ in range(2):
        running.restart(ranks=1, on=[1]).save(5)

    running.restart(ranks=2).save(5)

    assert _epochs_on(running)[0] == ["3"]
    assert [name for name in files(running.nodes[1]) if "000000000005.1.3." in name]


@pytest.mark.fault("old-files")
def test_attempts_on_nodes_that_have_none_in_common_never_mix(job: Begin) -> None:
    running = job(nodes=4, ranks=2)

    for pair in ([0, 1], [2, 3]):
        running.restart(on=pair).save(5)

    running.restart(on=[0, 3]).expect_none().run()


@pytest.mark.fault("old-files")
def test_a_node_that_was_away_never_completes_the_checkpoint_of_a_later_attempt(job: Begin) -> None:
    running = job(nodes=3, ranks=2, keep_last=9).restart(on=[0, 1]).save(5)
    # An attempt that got no further than rank 0's shard of 10: rank 1 died before its own.
    running.restart(on=[0, 1]).save(10, value=11).remove("000000000010.1.2.*.safetensors")
    # Node 0 is away, so nobody sees that shard; the next attempt comes to 10, too, and dies.
    running.restart(on=[2, 1]).expect_none().save(10, value=12)

    # Now node 0 is back.
    running.restart(on=[0, 1]).expect(5).run()


@pytest.mark.fault("old-files")
def test_an_attempt_that_kept_nothing_does_not_share_its_number_with_the_next(job: Begin) -> None:
    """A late writer of the one must not be taken for the other."""
    running = job(nodes=2)

    for _ in range(3):
        running.restart().expect_none()
    running.restart().save(1)

    assert _epochs_on(running) == [["4"]] * 2
