"""Sinks that keep metrics of one rank for Prometheus.

:class:`PrometheusTextfile` writes the file that node_exporter's textfile collector reads, and needs
no package. :class:`PrometheusRegistry` hands the same metrics to ``prometheus_client``.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias
from urllib.parse import quote

from localckpt.errors import CheckpointingException
from localckpt.events.event import Event

__all__ = ["PrometheusRegistry", "PrometheusTextfile"]

_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
Labels: TypeAlias = tuple[tuple[str, str], ...]

_FAMILIES: dict[str, tuple[Kind, str]] = {
    "localckpt_up": ("gauge", "1 while the run goes on, 0 once it has ended in order."),
    "localckpt_run_start_timestamp_seconds": ("gauge", "When this start of the rank began."),
    "localckpt_events_total": ("counter", "Events, by name and outcome."),
    "localckpt_events_dropped_total": ("counter", "Events that found the queue of sinks full."),
    "localckpt_duration_seconds": ("histogram", "Durations of saves, restarts and their parts."),
    "localckpt_lost_seconds_total": ("counter", "Time in which the rank did not train."),
    "localckpt_bytes_total": ("counter", "Bytes of this rank, by the event that moved them."),
    "localckpt_step": ("gauge", "Last step that is known to be done."),
    "localckpt_step_seconds": ("gauge", "Duration of a step without a save."),
    "localckpt_last_save_step": ("gauge", "Step of the newest complete checkpoint."),
    "localckpt_last_save_timestamp_seconds": ("gauge", "When the newest one was durable."),
    "localckpt_resumed_step": ("gauge", "Step that the run resumed from, -1 for none."),
}


# They are there with 0 from the beginning: increase() does not see a counter that begins with 1.
_FROM_ZERO = [
    *(("save", store, outcome) for store in ("nodes", "shared") for outcome in ("ok", "failed")),
    ("degraded", "nodes", "ok"),
    ("diverged", "nodes", "failed"),
    ("quarantined", "nodes", "ok"),
]


class _Sample(NamedTuple):
    """One line of the exposition; ``suffix`` is that of a histogram's sample."""

    suffix: str
    labels: Labels
    value: float


class _Histogram:
    """Durations in buckets."""

    def __init__(self) -> None:
        self.counts = [0] * (len(_BUCKETS_S) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count a duration."""
        index = sum(seconds > bound for bound in _BUCKETS_S)
        self.counts[index] += 1
        self.sum_s += seconds

    def samples(self, labels: Labels) -> Iterator[_Sample]:
        """Samples of all buckets, their sum and their count."""
        total = 0
        for bound, count in zip((*_BUCKETS_S, None), self.counts, strict=True):
            total += count
            le = "+Inf" if bound is None else f"{bound:g}"
            yield _Sample("_bucket", (*labels, ("le", le)), total)
        yield _Sample("_sum", labels, self.sum_s)
        yield _Sample("_count", labels, total)


class _Metrics:
    """Metrics of one rank, counted from its events; read by one thread, written by another."""

    def __init__(self) -> None:
        self.session: str | None = None
        self.rank = 0
        self._lock = threading.Lock()
        self._next_number = 0
        self._values: dict[str, dict[Labels, float]] = defaultdict(lambda: defaultdict(float))
        self._durations: dict[Labels, _Histogram] = defaultdict(_Histogram)

    def take(self, event: Event) -> None:
        """Count an event."""
        with self._lock:
            if self.session is None:
                self.session = str(event.details.get("session", ""))
                self.rank = event.rank
                self._set("localckpt_up", 1)
                for name, store, outcome in _FROM_ZERO:
                    labels = ("event", name), ("store", store), ("outcome", outcome)
                    self._add("localckpt_events_total", 0, *labels)
                self._set("localckpt_run_start_timestamp_seconds", event.start)
            self._take(event)

    def _take(self, event: Event) -> None:
        store = "shared" if event.tier == "shared" else "nodes"
        of_event = ("event", event.name), ("store", store)
        self._add("localckpt_events_total", 1, *of_event, ("outcome", event.outcome))
        dropped = max(0, event.number - self._next_number)
        self._next_number = max(event.number + 1, self._next_number)
        self._add("localckpt_events_dropped_total", dropped)
        if event.duration:
            self._durations[of_event].add(event.duration)
        if event.is_lost:
            self._add("localckpt_lost_seconds_total", event.duration, *of_event)
        if event.nbytes:
            self._add("localckpt_bytes_total", event.nbytes, *of_event)
        is_ok = event.outcome == "ok" and event.step is not None
        if event.name == "save" and is_ok:
            self._set("localckpt_last_save_step", event.step, ("store", store))
            durable = event.start + event.duration
            self._set("localckpt_last_save_timestamp_seconds", durable, ("store", store))
        elif event.name == "steps":
            self._set("localckpt_step", event.step)
            self._set("localckpt_step_seconds", event.details.get("step_s"))
        elif event.name == "resume" and is_ok:
            self._set("localckpt_resumed_step", event.step)
        elif event.name == "run_ended":
            self._set("localckpt_up", 0)

    def _set(self, name: str, value: float | None, *labels: tuple[str, str]) -> None:
        if value is not None:
            self._values[name][labels] = value

    def _add(self, name: str, value: float, *labels: tuple[str, str]) -> None:
        self._values[name][labels] += value

    def families(self) -> list[tuple[str, Kind, str, list[_Sample]]]:
        """All metrics: name, kind, help and samples."""
        with self._lock:
            own = ("session", self.session or ""), ("rank", str(self.rank))
            found = []
            for name, (kind, text) in _FAMILIES.items():
                if kind == "histogram":
                    samples = [
                        sample
                        for labels, histogram in self._durations.items()
                        for sample in histogram.samples((*own, *labels))
                    ]
                else:
                    values = self._values[name].items()
                    samples = [_Sample("", (*own, *labels), value) for labels, value in values]
                if samples:
                    found.append((name, kind, text, samples))
            return found


class PrometheusTextfile:
    """Sink that writes a file for node_exporter's textfile collector.

    The file ``localckpt-<session>-rank<n>.prom`` is replaced as a whole, and stays when the run is
    over: ``localckpt_up`` is 0 then, and 1 after a kill.

    Args:
        folder: Directory that the collector is told of (``--collector.textfile.directory``).
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder).absolute()
        self._metrics = _Metrics()
        self._written = self._taken = 0

    def write(self, event: Event) -> None:
        """Count one event."""
        self._metrics.take(event)
        self._taken += 1

    def flush(self) -> None:
        """Replace the file; raises OSError."""
        if self._taken == self._written:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        session = quote(self._metrics.session or "", safe="")
        path = self._folder / f"localckpt-{session}-rank{self._metrics.rank:05d}.prom"
        # The collector reads what ends in .prom only.
        new = path.with_suffix(f".{os.getpid()}.new")
        try:
            # "x", since another user may have put a link in its place.
            new.unlink(missing_ok=True)
            with new.open("x") as file:
                file.write(_exposition(self._metrics))
            new.replace(path)
        except OSError:
            with suppress(OSError):
                new.unlink(missing_ok=True)
            raise
        self._written = self._taken

    def close(self) -> None:
        """Do nothing: the file stays."""


class PrometheusRegistry:
    """Sink that has ``prometheus_client`` expose the metrics, as by its ``start_http_server``.

    Args:
        registry: A ``CollectorRegistry``; ``None`` for the package's own.

    Raises:
        CheckpointingException: ``prometheus_client`` is not installed.
    """

    def __init__(self, registry: Any = None) -> None:
        try:
            self._client: Any = importlib.import_module("prometheus_client")
        except ImportError as error:
            raise CheckpointingException(
                "PrometheusRegistry needs prometheus_client: pip install prometheus-client, or "
                "use PrometheusTextfile, which needs nothing"
            ) from error
        self._core: Any = importlib.import_module("prometheus_client.core")
        self._metrics = _Metrics()
        self._registry = self._client.REGISTRY if registry is None else registry
        self._registry.register(self)

    def write(self, event: Event) -> None:
        """Count one event."""
        self._metrics.take(event)

    def flush(self) -> None:
        """Do nothing: metrics are read when they are asked for."""

    def close(self) -> None:
        """Take the metrics out of the registry."""
        self._registry.unregister(self)

    def collect(self) -> Iterator[Any]:
        """Metrics as ``prometheus_client`` asks for them; in any thread."""
        for name, kind, text, samples in self._metrics.families():
            family = self._core.Metric(name.removesuffix("_total"), text, kind)
            for suffix, labels, value in samples:
                family.add_sample(f"{name}{suffix}", dict(labels), value)
            yield family


def _exposition(metrics: _Metrics) -> str:
    """The text format, version 0.0.4."""
    lines = []
    for name, kind, text, samples in metrics.families():
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        for suffix, labels, value in samples:
            lines.append(f"{name}{suffix}{{{_label_text(dict(labels))}}} {value!r}")
    return "\n".join([*lines, ""])


def _label_text(labels: Mapping[str, str]) -> str:
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n"}
    return ",".join(
        f'{name}="{"".join(escapes.get(c, c) for c in value)}"' for name, value in labels.items()
    )
