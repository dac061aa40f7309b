"""Spans and metrics, as the SDK of OpenTelemetry has them."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest

from localckpt import CheckpointingException
from localckpt.events.event import Event
from localckpt.exporters.otel import OpenTelemetry
from tests.events.sinks import make_event

_EVENTS = [
    make_event(0, name="run_began", details={"session": "s"}),
    make_event(1, name="blocking", duration=0.5, step=9, nbytes=5, is_lost=True),
    make_event(2, name="blocking", duration=0.25, step=9, tier="shared", is_lost=True),
    make_event(3, name="background", duration=4.0, step=9),
    make_event(4, duration=5.0, step=9, nbytes=5, tier="replicated", details={"d2h_s": 0.1}),
    make_event(
        5, step=9, tier="shared", outcome="failed", error_class="X", details={"error": "full"}
    ),
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

    spans: dict[str, list[Any]] = {}
    for span in exporter.get_finished_spans():
        spans.setdefault(span.name, []).append(span)
    (resource,) = reader.get_metrics_data().resource_metrics
    (scope,) = resource.scope_metrics
    points = {metric.name: list(metric.data.data_points) for metric in scope.metrics}
    tracers.shutdown()
    meters.shutdown()
    return spans, points


def test_the_parts_of_a_save_are_children_of_its_span() -> None:
    spans, _ = _written(_EVENTS)

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


def test_metrics_say_what_was_lost_saved_and_done() -> None:
    _, points = _written(_EVENTS)

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
