"""What the records of a job's ranks tell, on the command line."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from localckpt.events.event import Event
from localckpt.events.jsonl import JsonLines
from tests.cli.commands import call
from tests.cli.jobs import STEP_S, PaperJob
from tests.events.sinks import make_event


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


def test_one_session_is_reported_and_another_one_refused(store: Path) -> None:
    one, none = call("report", store, "--session", "run"), call("report", store, "--session", "x")

    assert one.out == call("report", store).out
    assert (none.status, none.out) == (2, "")
    assert "there is no record of session 'x'" in none.err


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


def test_every_event_is_drawn_on_its_ranks_track(tmp_path: Path) -> None:
    out = tmp_path / "job.json"
    events = [
        make_event(1, name="blocking", duration=0.5, step=9, is_lost=True),
        make_event(2, name="background", duration=4.0, step=9, nbytes=5),
        make_event(3, name="preempted", details={"reason": "SIGTERM"}),
    ]
    write(events, tmp_path / "events")

    call("report", tmp_path / "events", "--trace", out)

    entries = json.loads(out.read_text())["traceEvents"]
    drawn = [entry for entry in entries if entry["ph"] != "M"]
    assert [(e["ph"], e["name"], e["ts"]) for e in drawn] == [
        ("X", "blocking 9", 1001e6),
        ("b", "background 9", 1002e6),
        ("e", "background 9", 1006e6),
        ("i", "preempted", 1003e6),
    ]
    assert (drawn[0]["dur"], drawn[0]["cat"], drawn[0]["tid"]) == (0.5e6, "lost", 1)
    assert drawn[1]["id"] == drawn[2]["id"]
    assert drawn[1]["args"] == {"step": 9, "bytes": 5, "outcome": "ok"}
    assert drawn[3]["args"]["reason"] == "SIGTERM"


def test_a_trace_that_cannot_be_written_is_told_instead(store: Path) -> None:
    answer = call("report", store, "--trace", store / "gone" / "job.json")

    assert (answer.status, answer.out) == (2, "")
    assert f"there is no folder {store / 'gone'}. Make it" in answer.err


def test_no_table_is_wider_than_a_terminal(store: Path) -> None:
    tables = call("report", store).out.partition("Start 3")[0].splitlines()[:-3]

    assert max(map(len, tables)) <= 80
