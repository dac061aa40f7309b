"""What the records of a job's ranks tell, on the command line and computed from events alone."""

from __future__ import annotations

import json
import random
import re
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localckpt.cli.account import Account, account
from localckpt.cli.starts import starts_of
from localckpt.cli.status import status_of
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
    (told,) = call("report", store, "--json").json()["sessions"]
    assert told["session"] == "run"
    assert [start["lost_steps"] for start in told["starts"]] == [None, 7, 13]
    assert [start["ending"] for start in told["starts"]] == ["killed", "failed", "open"]
    parts = {"start": 3, "meet": 1, "find": 0, "fetch": 1, "read": 2}
    assert told["starts"][1]["recovery"] == parts
    spent = {"training": 124 * STEP_S, "blocking": 1.25, "waiting": 0, "recovery": 37}
    assert told["seconds"] == spent | {"repeated": 20 * STEP_S, "down": 52}
    assert told["goodput"] == pytest.approx(124 * STEP_S / told["total_s"])
    assert told["unsaved_steps"] == 4


_FAILED = "failed: PeerLostError"


def test_records_that_no_checkpointer_began_or_no_directory_has_are_told_as_such(
    store: Path,
) -> None:
    write([Event("save", 5.0, 0, "node", "of a manager", 0, step=3)], store / "other")
    (store / "empty").mkdir()

    both, only, empty, gone = (call("report", store / n) for n in ("", "other", "empty", "gone"))

    assert both.out == call("report", store / "events").out
    assert "1 record left out" in both.err
    assert (only.status, only.out) == (2, "")
    assert "no Checkpointer has begun them" in only.err
    assert (empty.status, gone.status) == (2, 2)
    assert f"no rank has left a record in {store / 'empty'}" in empty.err


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
    nobodys = call("report", store, "--trace", out, "--session", "nobody's")
    assert (nobodys.status, "there is no record of session" in nobodys.err) == (2, True)
    nowhere = call("report", store, "--trace", store / "gone" / "job.json")
    assert (nowhere.status, nowhere.out) == (2, "")
    assert f"there is no folder {store / 'gone'}. Make it" in nowhere.err


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


def test_what_is_safe_where_is_shown_and_told_to_programs(tmp_path: Path) -> None:
    write(running_job().events, tmp_path / "events")
    answer = call("report", tmp_path)

    assert (answer.status, answer.err) == (0, "")
    rows = [line.split() for line in answer.out.splitlines()]
    assert "Start 2 is at step 8, " in answer.out
    levels = [row for row in rows if row[:2] in (["the", "nodes"], ["other", "nodes"])]
    assert [row[2] for row in levels] == ["6", "6"]
    assert [row[-2:] for row in levels] == [["2", "steps"]] * 2
    assert ["shared", "storage", "-", "-", "-"] in rows
    assert [row[0] for row in rows if row[-1:] in (["failed"], ["replicated"])] == ["8", "6"]
    assert "1 save failed, the last of step 8: StorageError: it is full" in answer.out
    (told,) = call("report", tmp_path, "--json").json()["sessions"]
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

    both, one = call("report", tmp_path / "both"), call("report", tmp_path / "one")

    assert "rank 1 not heard of for up to" in both.out
    assert "Of start 1 the records of rank 1 are missing: give the stores of all nodes" in one.out


def account_of(events: list[Event]) -> Account:
    (starts,) = starts_of(events).values()
    return account(starts)


def test_too_few_copies_end_with_a_save_that_has_all_or_when_copies_are_made() -> None:
    job = PaperJob(ranks=2)
    job.start()

    def since() -> float | None:
        (starts,) = starts_of(job.events).values()
        return status_of(starts).degraded_since

    job.train(2)
    job.save()
    noted = job.at
    job.note("degraded", step=job.done)
    first = since()
    job.train(2)
    job.save()
    job.note("degraded", step=job.done)
    assert since() == first == noted
    job.train(1)
    job.save(tier="replicated")
    assert since() is None
    job.train(1)
    job.save()
    job.note("degraded", step=job.done)
    assert since() not in (None, first)
    job.train(2)
    job.note("reprotected")
    assert since() is None


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("train"), st.integers(1, 5)),
        st.tuples(st.just("save"), st.floats(0, 3)),
        st.tuples(st.just("start"), st.floats(0, 20)),
        st.tuples(st.just("go back"), st.integers(0, 30)),
        st.tuples(st.just("wait"), st.floats(0, 3)),
    ),
    max_size=25,
)


@given(st.integers(1, 3), ACTIONS, st.randoms())
def test_every_second_is_accounted_for_once_and_training_that_counts_is_what_was_kept(
    ranks: int, actions: list[tuple[str, Any]], order: random.Random
) -> None:
    job = PaperJob(ranks)
    job.start()
    lost = []
    for action, value in actions:
        if action == "train":
            job.train(value)
        elif action == "save":
            job.save(value)
        elif action == "wait":
            job.note("wait", value)
        else:
            if action == "go back":
                job.saved = min(job.saved, value)
            lost.append(job.done - job.saved)
            job.start(down_s=value)
    order.shuffle(job.events)

    told = account_of(job.events)

    assert all(left.ended == pytest.approx(right.began) for left, right in pairwise(told.stretches))
    assert told.total_s == pytest.approx(job.at - 1000.0)
    assert [restart.lost_steps for restart in told.restarts[1:]] == lost
    assert told.unsaved_steps == job.done - job.saved
    assert told.seconds["training"] == pytest.approx((job.done + 1) * STEP_S)
    assert told.seconds["repeated"] == pytest.approx(sum(lost) * STEP_S)
    assert told.seconds["repeated"] == pytest.approx(sum(r.repeated_s for r in told.restarts))


def test_a_start_that_never_resumed_is_recovery_and_the_ends_of_ranks_are_one_end() -> None:
    job = PaperJob(ranks=2)
    job.start()
    job.train(2)
    job.save()
    job.train(2)
    job.fail_to_start(30)
    job.start(down_s=5)
    job.train(1)
    job.end("failed", error_class="PeerLostError")
    dead = job.events[-1].run
    job.events = [e for e in job.events if (e.run, e.name) != (dead, "run_ended")]
    job.start()
    job.note("wait", 3.0)
    job.end("stopped")

    told = account_of(job.events)

    assert [r.start.resumed_step for r in told.restarts] == [-1, None, 1, 1]
    assert [r.start.last_step for r in told.restarts] == [3, None, 2, 1]
    assert [r.lost_steps for r in told.restarts] == [None, 0, 2, 1]
    assert [r.start.ending for r in told.restarts] == ["killed", "killed", "killed", "stopped"]
    assert [r.start.silent_ranks for r in told.restarts] == [(0, 1), (0, 1), (1,), ()]
    assert told.seconds["recovery"] == 15 + 30 + 15 + 15
