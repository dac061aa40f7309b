"""Traces that Chrome and Perfetto read, also of a process that was killed; and lines of a log."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from localckpt.errors import StorageError
from localckpt.events.log import Log
from localckpt.exporters.chrome import ChromeTrace
from tests.events.sinks import make_event

_EVENTS = [
    make_event(0, name="run_began"),
    make_event(1, name="blocking", duration=0.5, step=9, is_lost=True),
    make_event(2, name="background", duration=4.0, step=9, nbytes=5),
    make_event(3, name="preempted", details={"reason": "SIGTERM"}),
]


def test_every_event_is_drawn_on_its_ranks_track(tmp_path: Path) -> None:
    sink = ChromeTrace(tmp_path)
    for event in _EVENTS:
        sink.write(event)

    # As it is while the process runs, and after a kill.
    (file,) = tmp_path.iterdir()
    entries = json.loads(file.read_text().rstrip(",\n") + "]")
    sink.close()

    assert file.name == "rank00003.19700101T001640.r.trace.json"
    names = [entry["args"].get("name") for entry in entries if entry["ph"] == "M"]
    assert names == ["rank 3 (n)", None, "training waits", "what happened"]
    drawn = [entry for entry in entries if entry["ph"] != "M"]
    assert {entry["pid"] for entry in drawn} == {3}
    assert [(e["ph"], e["name"], e["ts"]) for e in drawn] == [
        ("i", "run_began", 1000e6),
        ("X", "blocking 9", 1001e6),
        ("b", "background 9", 1002e6),
        ("e", "background 9", 1006e6),
        ("i", "preempted", 1003e6),
    ]
    assert (drawn[1]["dur"], drawn[1]["cat"], drawn[1]["tid"]) == (0.5e6, "lost", 1)
    assert drawn[2]["id"] == drawn[3]["id"]
    assert drawn[2]["args"] == {"step": 9, "bytes": 5, "outcome": "ok"}
    assert drawn[4]["args"]["reason"] == "SIGTERM"


def test_a_trace_does_not_grow_for_ever(tmp_path: Path) -> None:
    sink = ChromeTrace(tmp_path, most_nbytes=2000)

    def draw() -> None:
        for number in range(1000):
            sink.write(make_event(number, duration=1.0))

    with pytest.raises(StorageError, match="bytes"):
        draw()
    sink.close()
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size < 3000


def test_the_log_has_a_line_of_each_event_and_warns_of_what_went_wrong(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sink = Log()

    with caplog.at_level(logging.INFO, "localckpt.events.log"):
        sink.write(make_event(1, step=9, duration=0.5, nbytes=5, tier="local", details={"a": 0.1}))
        sink.write(make_event(2, step=9, outcome="failed", error_class="StorageError"))

    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("INFO", "rank 3: save of step 9: ok, 0.500 s, 5 bytes, local, a 0.100"),
        ("WARNING", "rank 3: save of step 9: failed, StorageError"),
    ]
