"""Spans and metrics as the SDK of OpenTelemetry has them, and metrics as Prometheus reads them."""

from __future__ import annotations

import importlib
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from localckpt import CheckpointingException
from localckpt.events.event import Event
from localckpt.exporters.otel import OpenTelemetry
from localckpt.exporters.prometheus import PrometheusTextfile
from tests.events.sinks import make_event

_FULL = {"error": "full"}
_EVENTS = [
    make_event(0, name="run_began", details={"session": "s"}),
    make_event(1, name="blocking", duration=0.5, step=9, nbytes=5, is_lost=True),
    make_event(2, name="blocking", duration=0.25, step=9, tier="shared", is_lost=True),
    make_event(3, name="background", duration=4.0, step=9),
    make_event(4, duration=5.0, step=9, nbytes=5, tier="replicated", details={"d2h_s": 0.1}),
    make_event(5, step=9, tier="shared", outcome="failed", error_class="X", details=_FULL),
    make_event(6, name="steps", step=12),
    make_event(7, name="read", duration=1.0, step=3),
    make_event(8, name="resume", duration=3.0, step=3, details={"kept": [1]}),
    make_event(9, name="find", duration=1.0),
]


def _written(events: list[Event]) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """Spans and data points, by name."""
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    export = importlib.import_module("opentelemetry.sdk.trace.export")
    in_memory = importlib.import_module("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    metrics = importlib.import_module("opentelemetry.sdk.metrics")
    reading = importlib.import_module("opentelemetry.sdk.metrics.export")
    exporter, reader = in_memory.InMemorySpanExporter(), reading.InMemoryMetricReader()
    tracers, meters = sdk.TracerProvider(), metrics.MeterProvider([reader])
    tracers.add_span_processor(export.SimpleSpanProcessor(exporter))
    sink = OpenTelemetry(tracers, meters)

    for event in events:
        sink.write(event)
    sink.close()

    spans = defaultdict[str, list[Any]](list)
    for span in exporter.get_finished_spans():
        spans[span.name].append(span)
    (resource,) = reader.get_metrics_data().resource_metrics
    (scope,) = resource.scope_metrics
    points = {metric.name: list(metric.data.data_points) for metric in scope.metrics}
    tracers.shutdown()
    meters.shutdown()
    return spans, points


def test_the_parts_of_a_save_are_children_of_its_span_and_metrics_say_what_was_done() -> None:
    spans, points = _written(_EVENTS)

    nodes, shared = spans["localckpt.save"]
    (background,) = spans["localckpt.background"]
    of_nodes, of_shared = spans["localckpt.blocking"]
    assert background.parent.span_id == of_nodes.parent.span_id == nodes.context.span_id
    assert of_shared.parent.span_id == shared.context.span_id
    assert nodes.parent is None
    assert (nodes.start_time, nodes.end_time) == (1004 * 10**9, 1009 * 10**9)
    assert nodes.attributes["localckpt.step"] == 9
    assert nodes.attributes["localckpt.d2h_s"] == 0.1
    assert nodes.attributes["localckpt.session"] == "s"
    assert of_nodes.attributes["localckpt.lost"] is True
    assert not shared.status.is_ok
    assert shared.status.description == "full"
    assert shared.attributes["error.type"] == "X"
    lost = {
        (p.attributes["localckpt.event"], p.attributes["localckpt.store"]): p.value
        for p in points["localckpt.lost_time"]
    }
    assert lost == {("blocking", "nodes"): 0.5, ("blocking", "shared"): 0.25}
    assert [p.value for p in points["localckpt.step"]] == [12]
    (saved,) = points["localckpt.last_save.step"]
    assert (saved.value, saved.attributes["localckpt.store"]) == (9, "nodes")
    assert sum(p.sum for p in points["localckpt.duration"]) == pytest.approx(14.75)
    assert sum(p.value for p in points["localckpt.events"]) == len(_EVENTS)
    assert sum(p.value for p in points["localckpt.io"]) == 10


def test_parts_whose_whole_never_comes_are_not_kept_for_ever() -> None:
    events = [make_event(n, name="blocking", duration=1.0, step=n) for n in range(150)]

    spans, _ = _written(events)

    assert len(spans["localckpt.blocking"]) == 150


def test_without_the_package_the_sink_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)

    with pytest.raises(CheckpointingException, match="pip install opentelemetry-sdk"):
        OpenTelemetry()


_SESSION = 'a "run"\n\\1'
_METERED = [
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


def _check_metrics(found: dict[tuple[str, frozenset[tuple[str, str]]], float], up: int) -> None:
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

    _check_metrics(read(_METERED), up=1)
    _check_metrics(read([make_event(10, name="run_ended")]), up=0)
