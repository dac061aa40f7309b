"""How far a running job is, and what is safe where, from its events."""

from __future__ import annotations

import pytest

from localckpt.cli.starts import starts_of
from localckpt.cli.status import Status, status_of
from tests.cli.jobs import STEP_S, PaperJob


def status(job: PaperJob) -> Status:
    (starts,) = starts_of(job.events).values()
    return status_of(starts)


def test_the_newest_checkpoint_of_each_place_is_told() -> None:
    job = PaperJob(ranks=2)
    job.start()
    job.train(3)
    job.save(0.5, tier="replicated")
    job.train(1)
    job.save(0.5, tier="local")
    job.train(2)
    job.save(0.5, outcome="failed", error_class="StorageError")
    job.train(1)
    job.save(0.25, outcome=None)

    told = status(job)

    assert told.number == 1
    assert told.start.ending == "open"
    assert told.start.last_step == 6
    newest = (told.on_nodes, told.on_other_nodes, told.on_shared)
    assert [save and save.step for save in newest] == [3, 2, None]
    assert [save.outcome for save in told.saves] == ["ok", "ok", "failed", "unfinished"]
    assert [save.step for save in told.failed] == [5]
    assert told.failed[0].error.startswith("StorageError")
    first = told.saves[0]
    assert (first.nbytes, first.blocking_s, first.throughput) == (200, 0.5, pytest.approx(400))
    assert told.saves[-1].ended is None


def test_the_speed_is_that_of_the_last_minute() -> None:
    job = PaperJob()
    job.start()
    for _ in range(20):
        job.train(1)
        job.at += 100
    job.train(40)

    assert status(job).steps_per_s == pytest.approx(1 / STEP_S)


def test_a_job_that_has_done_no_step_has_no_speed() -> None:
    job = PaperJob()
    job.fail_to_start(3)
    before = status(job)
    job.start()

    told = status(job)

    assert (before.start.last_step, before.steps_per_s) == (None, None)
    assert (told.number, told.start.last_step, told.steps_per_s) == (2, -1, None)
