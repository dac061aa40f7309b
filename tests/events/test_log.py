"""Lines of a log."""

from __future__ import annotations

import logging

import pytest

from localckpt.events.log import Log
from tests.events.sinks import make_event


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
