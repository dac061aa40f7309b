"""What a training loop records, and streams, which wait for no sink and outlive those that fail."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from localckpt import Checkpointer, CheckpointingException, Every
from localckpt.errors import StorageError
from localckpt.events.event import Event
from localckpt.events.stream import EventStream
from tests.events.sinks import Kept
from tests.managers.jobs import take_away

_NBYTES = 40_000


def _state() -> dict[str, Any]:
    return {"model": torch.nn.Linear(100, 100, bias=False)}


def _run(local: Path, **options: Any) -> Kept:
    """Train for four steps, and save every second one; what was recorded."""
    options = {"every": Every(steps=2), "rng": False, "timeout_s": 60.0} | options
    sink = Kept()
    with Checkpointer(_state(), local=local, events=[sink], **options) as checkpointer:
        first = checkpointer.resume()
        for step in range(first, first + 4):
            checkpointer.step(step)
    return sink


def test_each_save_is_recorded_with_what_training_waited_for(tmp_path: Path) -> None:
    sink = _run(tmp_path / "local", shared=tmp_path / "shared", shared_every=Every(steps=4))

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
    _run(tmp_path, session_id="mine")

    sink = _run(tmp_path, session_id="mine")

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


class _Hanging(Kept):
    """Takes nothing until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.go_on = threading.Event(), threading.Event()

    def write(self, event: Event) -> None:
        self.reached.set()
        self.go_on.wait(60)
        super().write(event)


class _Failing(Kept):
    def write(self, event: Event) -> None:
        super().write(event)
        raise OSError(28, "no space left")


def test_events_reach_all_sinks_in_order_with_their_fields() -> None:
    sinks = Kept(), Kept()
    stream = EventStream(sinks, rank=3)
    began = time.monotonic() - 2.0

    stream.emit("blocking", began=began, ended=began + 0.5, step=7, nbytes=10, tier="local")
    stream.emit("save", began=began, step=7, error=StorageError("the disk is full"))
    stream.close()

    assert sinks[0].events == sinks[1].events
    blocking, save = sinks[0].events
    assert blocking.duration == pytest.approx(0.5)
    assert blocking.start == pytest.approx(time.time() - 2.0, abs=30.0)
    assert (blocking.step, blocking.nbytes, blocking.tier, blocking.rank) == (7, 10, "local", 3)
    assert blocking.is_lost
    assert not save.is_lost
    assert (save.outcome, save.error_class) == ("failed", "StorageError")
    assert save.details == {"error": "the disk is full"}
    assert [event.number for event in sinks[0].events] == [0, 1]
    assert {event.run for event in sinks[0].events} == {stream.run}
    assert [sink.closed for sink in sinks] == [1, 1]
    assert sinks[0].flushes


def test_a_sink_that_hangs_holds_up_nobody_and_what_is_dropped_is_a_gap() -> None:
    hanging = _Hanging()
    stream = EventStream([hanging], capacity=4)
    stream.emit("run_began")
    assert hanging.reached.wait(60)

    for step in range(10):
        stream.emit("steps", step=step)
    stream.close(timeout_s=0.05)
    hanging.go_on.set()
    late = time.monotonic() + 60
    while not hanging.closed and time.monotonic() < late:
        time.sleep(0.01)

    assert [event.number for event in hanging.events] == [0, 1, 2, 3, 4]
    assert hanging.closed == 1


def test_a_sink_that_fails_is_warned_of_once_and_closed_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing, kept = _Failing(), Kept()
    stream = EventStream([failing, kept])

    with caplog.at_level(logging.WARNING, "localckpt"):
        for _ in range(3):
            stream.emit("steps")
        stream.close()

    assert len(kept.events) == 3
    assert (len(failing.events), failing.closed) == (1, 1)
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "_Failing failed, and gets no more events"
    ]


def test_nothing_is_emitted_without_sinks_after_the_end_or_in_a_fork() -> None:
    EventStream().emit("steps")
    kept = Kept()
    stream = EventStream([kept])
    if (child := os.fork()) == 0:
        stream.emit("steps")
        stream.close()
        os._exit(stream._queue.qsize())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    stream.close()
    stream.emit("steps")
    stream.close()

    assert kept.events == []
    assert kept.closed == 1
