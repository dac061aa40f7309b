"""What the records of a job's ranks tell, on the command line."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from localckpt.events.event import Event
from localckpt.events.jsonl import JsonLines
from tests.cli.commands import call
from tests.cli.jobs import STEP_S, PaperJob


def write(events: list[Event], folder: Path) -> None:
    """Leave the record that each start of each rank would have left."""
    for name in dict.fromkeys(event.run for event in events):
        sink = JsonLines(folder)
        for event in events:
            if event.run == name:
                sink.write(event)
        sink.close()


def job_of_three_starts() -> PaperJob:
    """Of which one is killed, one fails, and the last one runs."""
    job = PaperJob(ranks=4)
    job.start()
    job.train(100)
    job.save(0.5, tier="replicated")
    job.train(7)
    job.start(down_s=41, split=(3, 1, 0, 1, 2))
    job.train(20)
    job.save(0.5, tier="replicated")
    job.save(0.25, outcome="failed")
    job.train(13)
    job.end("failed", error_class="PeerLostError")
    job.start(down_s=11)
    job.train(4)
    return job


@pytest.fixture
def store(tmp_path: Path) -> Path:
    write(job_of_three_starts().events, tmp_path / "events")
    return tmp_path


def test_what_failures_have_cost_is_said(store: Path) -> None:
    answer = call("report", store)

    assert (answer.status, answer.err) == (0, "")
    # What is too wide for a line goes on in the next one.
    lines = [line.strip() for line in answer.out.splitlines()]
    rows = [re.split(r"  +", line) for line in lines]
    rows += [re.split(r"  +", f"{line}  {more}") for line, more in pairwise(lines)]
    assert "session 'run': 3 starts in 6 min 18 s, goodput 65.57 %" in answer.out
    assert [row[2:] for row in rows if len(row) == 9 and row[2] == "4"] == [
        ["4", "the beginning", "106", "1", "400 bytes", "0.50 s", "killed: ranks 0 to 3"],
        ["4", "99 (local)", "132", "1, 1 failed", "400 bytes", "0.75 s", _FAILED],
        ["4", "119 (local)", "123", "0", "0 bytes", "0.00 s", "no end recorded"],
    ]
    seconds = [f"{second}.00 s" for second in (14, 41, 7, 3, 1, 0, 1, 2, 0)]
    assert ["2", "7", *seconds] in rows
    assert ["training that was lost and is repeated", "40.00 s", "10.58 %"] in rows
    assert "A restart would lose 4 steps of it." in answer.out
    assert "2 starts failed; 20 steps were lost, 40.00 s of training." in answer.out


_FAILED = "failed: PeerLostError"


def test_programs_get_the_same(store: Path) -> None:
    (told,) = call("report", store, "--json").json()["sessions"]

    assert told["session"] == "run"
    assert [start["lost_steps"] for start in told["starts"]] == [None, 7, 13]
    assert [start["ending"] for start in told["starts"]] == ["killed", "failed", "open"]
    assert told["starts"][1]["recovery"] == {
        "start": 3,
        "meet": 1,
        "find": 0,
        "fetch": 1,
        "read": 2,
    }
    assert told["seconds"]["repeated"] == 20 * STEP_S
    assert told["goodput"] == pytest.approx(124 * STEP_S / told["total_s"])
    assert told["unsaved_steps"] == 4


def test_a_directory_without_a_record_is_refused(tmp_path: Path) -> None:
    empty, gone = call("report", tmp_path), call("report", tmp_path / "gone")

    assert (empty.status, gone.status) == (2, 2)
    assert f"no rank has left a record in {tmp_path}" in empty.err


def test_a_record_that_no_checkpointer_began_is_left_out(store: Path) -> None:
    alone = [Event("save", 5.0, 0, "node", "of a manager", 0, step=3)]
    write(alone, store / "other")

    both, only = call("report", store), call("report", store / "other")

    assert both.out == call("report", store / "events").out
    assert "1 record left out" in both.err
    assert (only.status, only.out) == (2, "")
    assert "no Checkpointer has begun them" in only.err


# The same as a trace.


def test_all_ranks_and_starts_are_in_one_trace(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "job.json"
    (store / "events" / "more").mkdir()
    write([Event("save", 5.0, 9, "node", "of a manager", 0, step=3)], store / "events" / "more")

    whole, one = call("report", store, "--trace", out), json.loads(out.read_text())
    session = call("report", store, "--trace", out, "--session", "run")

    assert (whole.status, session.status) == (0, 0)
    drawn = [entry for entry in one["traceEvents"] if entry["ph"] != "M"]
    of_job = [entry for entry in drawn if entry["cat"] == "job"]
    kinds = Counter(entry["name"] for entry in of_job if entry["ph"] == "X")
    assert (kinds["recovery"], kinds["down"], kinds["repeated"]) == (3, 2, 2)
    assert [entry["name"] for entry in of_job if entry["ph"] == "i"] == [
        "killed after step 106",
        "failed after step 132",
    ]
    assert {entry["pid"] for entry in drawn if entry not in of_job} == {0, 1, 2, 3, 9}
    names = {e["args"].get("name") for e in one["traceEvents"] if e["ph"] == "M"}
    assert {"job", "session 'run'", "rank 0 (node)", "rank 3 (node)", "training waits"} <= names
    assert 9 not in {entry["pid"] for entry in json.loads(out.read_text())["traceEvents"]}


def test_a_trace_that_cannot_be_written_is_told_instead(store: Path) -> None:
    answer = call("report", store, "--trace", store / "gone" / "job.json")

    assert (answer.status, answer.out) == (2, "")
    assert f"there is no folder {store / 'gone'}. Make it" in answer.err


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
def running(tmp_path: Path) -> Path:
    write(running_job().events, tmp_path / "events")
    return tmp_path


def test_what_is_safe_where_is_shown_and_told_to_programs(running: Path) -> None:
    answer = call("report", running)

    assert (answer.status, answer.err) == (0, "")
    rows = [line.split() for line in answer.out.splitlines()]
    assert "Start 2 is at step 8, " in answer.out
    levels = [row for row in rows if row[:2] in (["the", "nodes"], ["other", "nodes"])]
    assert [row[2] for row in levels] == ["6", "6"]
    assert [row[-2:] for row in levels] == [["2", "steps"]] * 2
    assert ["shared", "storage", "-", "-", "-"] in rows
    assert [row[0] for row in rows if row[-1:] in (["failed"], ["replicated"])] == ["8", "6"]
    assert "1 save failed, the last of step 8: StorageError: it is full" in answer.out
    (told,) = call("report", running, "--json").json()["sessions"]
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
