"""Files of JSON lines: whole after a kill, bounded, and read back as they were written."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from localckpt.errors import CheckpointingException, StorageError
from localckpt.events import jsonl
from localckpt.events.event import Event
from localckpt.events.jsonl import JsonLines, read_events
from tests.events.sinks import make_event
from tests.managers.jobs import no_file_larger_than


def _written(folder: Path, events: list[Event], **options: int) -> None:
    sink = JsonLines(folder, **options)
    for event in events:
        sink.write(event)
    sink.close()


def test_events_are_read_back_as_they_were(tmp_path: Path) -> None:
    events = [
        make_event(0, name="run_began", details={"session": "a\nb é", "world_size": 4}),
        make_event(1, duration=0.25, step=3, nbytes=5, tier="replicated"),
        make_event(2, outcome="failed", error_class="StorageError", is_lost=True),
    ]

    _written(tmp_path / "made", events)

    (file,) = (tmp_path / "made").iterdir()
    assert file.name == "rank00003.19700101T001640.r.0000.jsonl"
    assert read_events([file]) == read_events([tmp_path]) == events
    assert json.loads(file.read_text().splitlines()[0])["v"] == 1


def test_only_the_last_line_of_a_file_may_be_torn(tmp_path: Path) -> None:
    _written(tmp_path, [make_event(number) for number in range(3)])
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()

    for nbytes in range(len(whole) + 1):
        file.write_bytes(whole[:nbytes])
        assert len(read_events([file])) == whole[:nbytes].count(b"\n")
    file.write_bytes(whole.replace(b'"name"', b'"n', 1))
    with pytest.raises(CheckpointingException, match=r"jsonl, line 1: "):
        read_events([file])


def test_what_is_no_event_or_of_a_newer_schema_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    told = {
        '{"v":99}': "of schema 99, and this localckpt reads schemas up to 1",
        '{"v":1,"name":"save"}': "this is no event",
        "[]": "it is no object",
        '{"a":1}': "it has no version",
        # What would take all of the stack, or of memory.
        "[" * 100_000: "events.jsonl, line 1",
        '"' + "x" * (3 << 20): "events.jsonl, line 1",
    }

    for line, text in told.items():
        file.write_text(f"{line}\n")
        with pytest.raises(CheckpointingException, match=text):
            read_events([file])
    with pytest.raises(StorageError, match="cannot be read"):
        read_events([tmp_path / "missing"])
    with pytest.raises(CheckpointingException, match="must be above 0"):
        JsonLines(tmp_path, files=0)


def test_files_are_bounded_and_each_says_of_which_run_it_is(tmp_path: Path) -> None:
    events = [make_event(number, step=number) for number in range(200)]

    _written(tmp_path, events, file_nbytes=1000, files=4)
    _written(tmp_path, [make_event(0, rank=4, run="other")], file_nbytes=1000, files=4)

    files = sorted(tmp_path.glob("rank00003.*"))
    assert 2 <= len(files) <= 4
    assert sum(file.stat().st_size for file in files) < 4 * 1200
    for file in files:
        assert json.loads(file.read_text().splitlines()[0])["number"] == 0
    read = [event for event in read_events([tmp_path]) if event.rank == 3]
    # The first, and the newest without a gap.
    assert [event.number for event in read] == [0, *range(200 - len(read) + 1, 200)]


def test_a_record_that_could_not_be_written_goes_on_and_says_what_it_lacks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "_FIRST_PAUSE_S", 0.05)
    folder = tmp_path / "events"
    sink = JsonLines(folder)
    sink.write(make_event(0))
    with no_file_larger_than(0):
        for number in (1, 2):
            sink.write(make_event(number))
    time.sleep(0.1)

    for number in (3, 4):
        sink.write(make_event(number))
    sink.close()

    assert [event.number for event in read_events([folder])] == [0, 3, 4]
    texts = [record.message for record in caplog.records]
    assert len(texts) == 2
    assert "is tried again meanwhile: [Errno 27]" in texts[0]
    assert texts[1] == f"the record of events in {folder} lacks 2 events"
