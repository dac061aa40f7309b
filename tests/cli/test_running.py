"""What is said of a job that runs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.cli.commands import call
from tests.cli.jobs import PaperJob
from tests.cli.test_reporting import write


def running_job() -> PaperJob:
    """In its second start, just now."""
    job = PaperJob(ranks=2, at=time.time() - 100)
    job.start()
    job.train(3)
    job.save(0.5, tier="replicated")
    job.start(split=(1, 1, 1, 1, 1))
    job.train(4)
    job.save(0.5, tier="replicated")
    job.train(2)
    job.save(0.25, outcome="failed", error_class="StorageError", error="it is full")
    return job


@pytest.fixture
def store(tmp_path: Path) -> Path:
    write(running_job().events, tmp_path / "events")
    return tmp_path


def test_what_is_safe_where_is_shown_and_told_to_programs(store: Path) -> None:
    answer = call("report", store)

    assert (answer.status, answer.err) == (0, "")
    rows = [line.split() for line in answer.out.splitlines()]
    assert "Start 2 is at step 8, " in answer.out
    levels = [row for row in rows if row[:2] in (["the", "nodes"], ["other", "nodes"])]
    assert [row[2] for row in levels] == ["6", "6"]
    assert [row[-2:] for row in levels] == [["2", "steps"]] * 2
    assert ["shared", "storage", "-", "-", "-"] in rows
    assert [row[0] for row in rows if row[-1:] in (["failed"], ["replicated"])] == ["8", "6"]
    assert "1 save failed, the last of step 8: StorageError: it is full" in answer.out
    (told,) = call("report", store, "--json").json()["sessions"]
    assert (told["session"], told["starts"][1]["last_step"]) == ("run", 8)
    assert told["status"]["newest"]["other_nodes"]["step"] == 6
    assert told["status"]["newest"]["shared"] is None
    assert [save["outcome"] for save in told["status"]["saves"]] == ["ok", "failed"]


def test_ranks_that_are_not_heard_of_and_ranks_without_a_record_are_named(tmp_path: Path) -> None:
    job = running_job()
    silent_since = job.at
    job.train(30)
    job.events = [e for e in job.events if e.rank == 0 or e.start <= silent_since]
    write(job.events, tmp_path / "both")
    write([e for e in job.events if e.rank == 0], tmp_path / "one")

    both, one = (
        call("report", tmp_path / "both"),
        call("report", tmp_path / "one"),
    )

    assert "rank 1 not heard of for up to" in both.out
    assert "Of start 1 the records of rank 1 are missing: give the stores of all nodes" in one.out
