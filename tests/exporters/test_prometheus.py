"""Metrics as Prometheus reads them: by its own parser, and from its own registry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from localckpt.events.event import Event
from localckpt.exporters.prometheus import PrometheusTextfile
from tests.events.sinks import make_event

_SESSION = 'a "run"\n\\1'
_EVENTS = [
    make_event(0, name="run_began", details={"session": _SESSION}),
    make_event(1, name="blocking", duration=0.2, step=9, nbytes=50, is_lost=True),
    make_event(2, name="blocking", duration=2.0, step=19, nbytes=50, is_lost=True),
    make_event(3, duration=4.0, step=9, nbytes=50, tier="replicated"),
    make_event(4, step=19, outcome="failed", error_class="StorageError"),
    make_event(5, duration=8.0, step=19, tier="shared"),
    # Two were dropped.
    make_event(8, name="steps", step=25, details={"step_s": 0.5, "save_s": None}),
    make_event(9, name="resume", step=-1, duration=3.0),
]


def _samples(families: Any) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Values by name and the labels that are not the rank's own."""
    own = {"session": _SESSION, "rank": "3"}
    found = {}
    for family in families:
        assert family.documentation
        for sample in family.samples:
            assert own.items() <= sample.labels.items()
            labels = frozenset(sample.labels.items() - own.items())
            found[sample.name, labels] = sample.value
    return found


def _check(found: dict[tuple[str, frozenset[tuple[str, str]]], float], up: int) -> None:
    def value(name: str, **labels: str) -> float:
        return found[f"localckpt_{name}", frozenset(labels.items())]

    blocking = {"event": "blocking", "store": "nodes"}
    assert value("up") == up
    assert value("events_total", event="save", store="nodes", outcome="failed") == 1
    assert value("events_total", event="degraded", store="nodes", outcome="ok") == 0
    assert value("events_dropped_total") == 2
    assert value("duration_seconds_count", **blocking) == 2
    assert value("duration_seconds_sum", **blocking) == pytest.approx(2.2)
    assert value("duration_seconds_bucket", **blocking, le="0.3") == 1
    assert value("duration_seconds_bucket", **blocking, le="+Inf") == 2
    assert value("lost_seconds_total", **blocking) == pytest.approx(2.2)
    assert value("bytes_total", event="save", store="nodes") == 50
    assert value("last_save_step", store="nodes") == 9
    assert value("last_save_timestamp_seconds", store="nodes") == 1007.0
    assert value("last_save_step", store="shared") == 19
    assert (value("step"), value("step_seconds"), value("resumed_step")) == (25, 0.5, -1)


def test_the_text_file_is_what_the_collector_reads(tmp_path: Path) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    sink = PrometheusTextfile(tmp_path / "made")

    def read(events: list[Event]) -> Any:
        for event in events:
            sink.write(event)
        sink.flush()
        (file,) = (tmp_path / "made").iterdir()
        assert file.name == "localckpt-a%20%22run%22%0A%5C1-rank00003.prom"
        return _samples(parser.text_string_to_metric_families(file.read_text()))

    _check(read(_EVENTS), up=1)
    _check(read([make_event(10, name="run_ended")]), up=0)
