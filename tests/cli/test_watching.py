"""A running job in the terminal."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from localckpt.events.event import Event
from tests.cli.commands import call
from tests.cli.jobs import PaperJob
from tests.cli.test_reporting import write

_MAX_S = 60


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


def test_what_is_safe_where_is_shown(store: Path) -> None:
    answer = call("watch", store, "--once")

    assert (answer.status, answer.err) == (0, "")
    rows = [line.split() for line in answer.out.splitlines()]
    head = "session 'run', start 2: 2 ranks, at step 8, "
    assert answer.out.startswith(head)
    assert "resumed after step 2 in 5.00 s" in answer.out
    levels = [row for row in rows if row[:2] in (["the", "nodes"], ["other", "nodes"])]
    assert [row[2] for row in levels] == ["6", "6"]
    assert [row[-2:] for row in levels] == [["2", "steps"]] * 2
    assert ["shared", "storage", "-", "-", "-"] in rows
    assert [row[0] for row in rows if row[-1:] in (["failed"], ["replicated"])] == ["8", "6"]
    assert "1 save failed, the last of step 8: StorageError: it is full" in answer.out


def test_programs_get_the_same(store: Path) -> None:
    (told,) = call("watch", store, "--json").json()["sessions"]

    assert (told["session"], told["start"], told["last_step"]) == ("run", 2, 8)
    assert told["newest"]["other_nodes"]["step"] == 6
    assert told["newest"]["shared"] is None
    assert [save["outcome"] for save in told["saves"]] == ["ok", "failed"]


def test_ranks_that_are_not_heard_of_and_ranks_without_a_record_are_named(tmp_path: Path) -> None:
    job = running_job()
    silent_since = job.at
    job.train(30)
    job.events = [e for e in job.events if e.rank == 0 or e.start <= silent_since]
    write(job.events, tmp_path / "both")
    write([e for e in job.events if e.rank == 0], tmp_path / "one")

    both, one = (
        call("watch", tmp_path / "both", "--once"),
        call("watch", tmp_path / "one", "--once"),
    )

    assert "rank 1 not heard of for up to" in both.out
    assert "no record of rank 1: give the stores of all nodes" in one.out


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    write([Event("save", 5.0, 0, "node", "of a manager", 0, step=3)], tmp_path / "alone")
    (tmp_path / "empty").mkdir()

    alone, empty = call("watch", tmp_path / "alone"), call("watch", tmp_path / "empty")

    assert (alone.status, empty.status) == (2, 2)
    assert "no Checkpointer has begun these records" in alone.err
    assert "no rank has left a record" in empty.err


def test_it_follows_a_job_until_that_ends(store: Path) -> None:
    job = running_job()
    primary, secondary = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "localckpt.cli", "watch", str(store), "--interval", "0.1"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
        stdout=secondary,
        stderr=secondary,
    )
    try:
        os.close(secondary)
        _await_text(primary, "at step 8")
        before = len(job.events)
        job.train(5)
        _append(job.events[before:], store)
        _await_text(primary, "at step 13")
        before = len(job.events)
        job.end()
        _append(job.events[before:], store)
        _await_text(primary, "ended after step 13: ok")
        assert process.wait(_MAX_S) == 0
    finally:
        process.kill()
        process.wait(_MAX_S)
        os.close(primary)


def _append(events: list[Event], store: Path) -> None:
    """As the running ranks would."""
    (store / "more").mkdir(exist_ok=True)
    write(events, store / "more")


def _await_text(terminal: int, text: str) -> None:
    """Read what is shown until it has this in it."""
    shown, deadline = "", time.monotonic() + _MAX_S
    while text not in shown:
        left = deadline - time.monotonic()
        assert left > 0, shown
        assert select.select([terminal], [], [], left)[0], shown
        shown += os.read(terminal, 65536).decode(errors="replace")
