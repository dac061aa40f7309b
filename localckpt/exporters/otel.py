"""Sink that makes OpenTelemetry spans and metrics of events.

It uses OpenTelemetry's API: where they go is for the SDK's providers, which the program sets up.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from localckpt.errors import CheckpointingException
from localckpt.events.event import Event

_SCOPE = "localckpt"
# The whole comes after its parts, which wait for it; not more of them than this.
_PARTS = {
    **dict.fromkeys(("blocking", "wait_prev", "d2h", "background"), "save"),
    **dict.fromkeys(("start", "meet", "find", "fetch", "read"), "resume"),
}
_MOST_WAITING = 100


class OpenTelemetry:
    """Spans of saves and restarts, with their parts as children, and of whatever else takes time.

    Metrics are ``localckpt.duration``, ``localckpt.events``, ``localckpt.lost_time``,
    ``localckpt.io``, ``localckpt.step`` and ``localckpt.last_save.step``.

    Args:
        tracer_provider, meter_provider: Providers of the SDK; ``None`` for the global ones.

    Raises:
        CheckpointingException: ``opentelemetry-api`` is not installed.
    """

    def __init__(self, tracer_provider: Any = None, meter_provider: Any = None) -> None:
        try:
            self._trace: Any = importlib.import_module("opentelemetry.trace")
            metrics: Any = importlib.import_module("opentelemetry.metrics")
        except ImportError as error:
            raise CheckpointingException(
                "the OpenTelemetry sink needs opentelemetry-api: pip install opentelemetry-sdk"
            ) from error
        self._tracer = self._trace.get_tracer(_SCOPE, tracer_provider=tracer_provider)
        meter = metrics.get_meter(_SCOPE, meter_provider=meter_provider)
        self._durations = meter.create_histogram(
            "localckpt.duration", unit="s", description="Durations of saves, restarts and parts."
        )
        self._events = meter.create_counter("localckpt.events", description="Events by outcome.")
        self._lost = meter.create_counter(
            "localckpt.lost_time", unit="s", description="Time in which the rank did not train."
        )
        self._nbytes = meter.create_counter("localckpt.io", unit="By", description="Bytes moved.")
        self._step = meter.create_gauge("localckpt.step", description="Last step that was done.")
        self._saved = meter.create_gauge(
            "localckpt.last_save.step", description="Step of the newest complete checkpoint."
        )
        self._session = ""
        self._waiting: list[Event] = []

    def write(self, event: Event) -> None:
        """Measure one event, and make spans of what is over with it."""
        if event.name == "run_began":
            self._session = str(event.details.get("session", ""))
        self._measure(event)
        if event.name in _PARTS:
            self._waiting.append(event)
            if len(self._waiting) > _MOST_WAITING:
                self._make_span(self._waiting.pop(0))
        elif event.name in _PARTS.values():
            parts = [part for part in self._waiting if _belongs(part, event)]
            self._waiting = [part for part in self._waiting if part not in parts]
            self._make_span(event, parts)
        elif event.name != "steps":
            self._make_span(event)

    def flush(self) -> None:
        """Do nothing: the SDK's processors export."""

    def close(self) -> None:
        """Make spans of parts whose whole did not come; the providers stay the program's."""
        for event in self._waiting:
            self._make_span(event)
        self._waiting = []

    def _measure(self, event: Event) -> None:
        attributes = {
            "localckpt.event": event.name,
            "localckpt.store": _store(event),
            "localckpt.session": self._session,
            "localckpt.rank": event.rank,
        }
        of_rank = {name: attributes[name] for name in ("localckpt.session", "localckpt.rank")}
        self._events.add(1, attributes | {"localckpt.outcome": event.outcome})
        if event.duration:
            self._durations.record(event.duration, attributes)
        if event.is_lost:
            self._lost.add(event.duration, attributes)
        if event.nbytes:
            self._nbytes.add(event.nbytes, attributes)
        if event.step is not None and event.name == "steps":
            self._step.set(event.step, of_rank)
        if event.step is not None and event.name == "save" and event.outcome == "ok":
            self._saved.set(event.step, of_rank | {"localckpt.store": _store(event)})

    def _make_span(self, event: Event, parts: Sequence[Event] = (), context: Any = None) -> None:
        fields = {
            "session": self._session,
            "rank": event.rank,
            "run": event.run,
            "step": event.step,
            "bytes": event.nbytes,
            "tier": event.tier,
            "outcome": event.outcome,
            "lost": event.is_lost,
            **event.details,
        }
        span = self._tracer.start_span(
            f"localckpt.{event.name}",
            context=context,
            attributes={
                f"localckpt.{name}": value
                if isinstance(value, str | bool | int | float)
                else str(value)
                for name, value in fields.items()
                if value is not None
            },
            start_time=_nanoseconds(event.start),
        )
        for part in parts:
            self._make_span(part, context=self._trace.set_span_in_context(span))
        if event.outcome == "failed":
            error = str(event.details.get("error", event.error_class))
            span.set_attribute("error.type", event.error_class)
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, error))
        span.end(end_time=_nanoseconds(event.start + event.duration))


def _belongs(part: Event, whole: Event) -> bool:
    is_same = part.step == whole.step and _store(part) == _store(whole)
    return _PARTS[part.name] == whole.name and (whole.name == "resume" or is_same)


def _store(event: Event) -> str:
    return "shared" if event.tier == "shared" else "nodes"


def _nanoseconds(seconds: float) -> int:
    return round(1e9 * seconds)
