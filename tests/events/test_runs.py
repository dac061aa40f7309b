"""What a training loop records: its saves, its restarts, and how it ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from localckpt import Checkpointer, CheckpointingException, Every
from tests.events.sinks import Kept
from tests.managers.jobs import take_away

_NBYTES = 40_000


def _state() -> dict[str, Any]:
    return {"model": torch.nn.Linear(100, 100, bias=False)}


def _run(local: Path, sink: Kept, steps: int, **options: Any) -> Checkpointer:
    """Train, and save every second step."""
    options = {"every": Every(steps=2), "rng": False, "timeout_s": 60.0} | options
    with Checkpointer(_state(), local=local, events=[sink], **options) as checkpointer:
        first = checkpointer.resume()
        for step in range(first, first + steps):
            if checkpointer.step(step):
                break
    return checkpointer


def test_each_save_is_recorded_with_what_training_waited_for(tmp_path: Path) -> None:
    sink = Kept()

    _run(tmp_path / "local", sink, 4, shared=tmp_path / "shared", shared_every=Every(steps=4))

    assert sink.closed == 1
    assert [event.number for event in sink.events] == list(range(len(sink.events)))
    saves = sink.named("save")
    assert [(e.step, e.tier, e.outcome) for e in saves if e.tier == "local"] == [
        (1, "local", "ok"),
        (3, "local", "ok"),
    ]
    (drain,) = sink.named("drain")
    assert (drain.step, drain.tier, drain.outcome) == (3, "shared", "ok")
    for save in saves:
        assert save.nbytes is not None
        assert save.nbytes > _NBYTES
        assert save.duration >= save.details["blocking_s"] >= save.details["d2h_s"] > 0
        assert save.details["wait_prev_s"] >= 0
        assert save.details["background_s"] >= 0
    for name, is_lost in {"blocking": True, "background": False, "d2h": False}.items():
        parts = sink.named(name)
        assert [e.step for e in parts] == [1, 3]
        assert {event.is_lost for event in parts} == {is_lost}
    assert sink.events[0].name == "run_began"
    assert sink.events[-1].name == "run_ended"
    assert (sink.events[-1].outcome, sink.events[-1].step) == ("ok", 3)


def test_a_run_begins_with_who_it_is_and_the_parts_of_its_restart(tmp_path: Path) -> None:
    _run(tmp_path, Kept(), 4, session_id="mine")
    sink = Kept()

    _run(tmp_path, sink, 4, session_id="mine")

    (began,) = sink.named("run_began")
    assert began.details["session"] == "mine"
    assert began.details["world_size"] == 1
    assert began.details["process_start"] <= began.start
    (resume,) = sink.named("resume")
    assert (resume.step, resume.tier, resume.details["source"]) == (3, "local", "own node")
    assert resume.details["job_run"] == began.run
    split = [resume.details[f"{part}_s"] for part in ("start", "meet", "find", "fetch", "read")]
    assert min(split) >= 0
    assert resume.details["read_s"] > 0
    assert sum(split) <= resume.duration + 1e-3
    (start,) = sink.named("start")
    assert start.start == pytest.approx(began.details["process_start"], abs=1.0)
    lost = [event.is_lost for event in sink.events if event.name in ("start", "meet", "read")]
    assert set(lost) == {True}
    (pruned, *_) = sink.named("pruned")
    assert (pruned.step, pruned.details["kept"]) == (5, [3, 5])


def test_a_save_that_fails_and_a_run_that_does_are_recorded(tmp_path: Path) -> None:
    sink, local = Kept(), tmp_path / "local"
    options: dict[str, Any] = {"every": Every(steps=1), "on_error": "raise", "events": [sink]}

    def train() -> None:
        with Checkpointer(_state(), local=local, **options) as checkpointer:
            checkpointer.resume()
            for step in range(4):
                checkpointer.step(step)
                checkpointer.wait_until_finished()
                if step == 0:
                    take_away(local / "session-")

    with pytest.raises(CheckpointingException):
        train()

    failed = [event for event in sink.named("save") if event.outcome == "failed"]
    assert [(event.step, event.error_class) for event in failed] == [(1, "StorageError")]
    assert "could not make again" in failed[0].details["error"]
    assert (sink.events[-1].name, sink.events[-1].outcome) == ("run_ended", "failed")
