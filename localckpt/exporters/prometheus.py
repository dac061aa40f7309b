"""Sink that keeps metrics of one rank in the file that node_exporter's collector reads."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Literal, TypeAlias
from urllib.parse import quote

from localckpt.events.event import Event

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

    def samples(self, labels: Labels) -> Iterator[tuple[str, Labels, float]]:
        """Suffix, labels and value of all buckets, their sum and their count."""
        total = 0
        for bound, count in zip((*_BUCKETS_S, None), self.counts, strict=True):
            total += count
            le = "+Inf" if bound is None else f"{bound:g}"
            yield "_bucket", (*labels, ("le", le)), total
        yield "_sum", labels, self.sum_s
        yield "_count", labels, total


class PrometheusTextfile:
    """Sink that writes a file for node_exporter's textfile collector.

    The file ``localckpt-<session>-rank<n>.prom`` is replaced as a whole, and stays when the run is
    over: ``localckpt_up`` is 0 then, and 1 after a kill.

    Args:
        folder: Directory that the collector is told of (``--collector.textfile.directory``).
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder).absolute()
        self._session: str | None = None
        self._rank = 0
        self._next_number = 0
        self._values: dict[str, dict[Labels, float]] = defaultdict(lambda: defaultdict(float))
        self._durations: dict[Labels, _Histogram] = defaultdict(_Histogram)
        self._is_new = False

    def write(self, event: Event) -> None:
        """Count one event."""
        self._is_new = True
        if self._session is None:
            self._session, self._rank = str(event.details.get("session", "")), event.rank
            self._set("localckpt_up", 1)
            for name, store, outcome in _FROM_ZERO:
                labels = ("event", name), ("store", store), ("outcome", outcome)
                self._add("localckpt_events_total", 0, *labels)
            self._set("localckpt_run_start_timestamp_seconds", event.start)
        store = "shared" if event.tier == "shared" else "nodes"
        of_event = ("event", event.name), ("store", store)
        self._add("localckpt_events_total", 1, *of_event, ("outcome", event.outcome))
        self._add("localckpt_events_dropped_total", max(0, event.number - self._next_number))
        self._next_number = max(event.number + 1, self._next_number)
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

    def flush(self) -> None:
        """Replace the file; raises OSError."""
        if not self._is_new:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        session = quote(self._session or "", safe="")
        path = self._folder / f"localckpt-{session}-rank{self._rank:05d}.prom"
        # The collector reads what ends in .prom only.
        new = path.with_suffix(f".{os.getpid()}.new")
        try:
            # "x", since another user may have put a link in its place.
            new.unlink(missing_ok=True)
            with new.open("x") as file:
                file.writelines(self._exposition())
            new.replace(path)
        except OSError:
            with suppress(OSError):
                new.unlink(missing_ok=True)
            raise
        self._is_new = False

    def close(self) -> None:
        """Do nothing: the file stays."""

    def _set(self, name: str, value: float | None, *labels: tuple[str, str]) -> None:
        if value is not None:
            self._values[name][labels] = value

    def _add(self, name: str, value: float, *labels: tuple[str, str]) -> None:
        self._values[name][labels] += value

    def _exposition(self) -> Iterator[str]:
        """Lines of the text format, version 0.0.4."""
        own = ("session", self._session or ""), ("rank", str(self._rank))
        for name, (kind, text) in _FAMILIES.items():
            samples = [("", labels, value) for labels, value in self._values[name].items()]
            if kind == "histogram":
                of_all = (histogram.samples(of) for of, histogram in self._durations.items())
                samples = [*chain.from_iterable(of_all)]
            if samples:
                yield f"# HELP {name} {text}\n# TYPE {name} {kind}\n"
            for suffix, labels, value in samples:
                yield f"{name}{suffix}{{{_label_text((*own, *labels))}}} {value!r}\n"


def _label_text(labels: Labels) -> str:
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n"}
    return ",".join(f'{n}="{"".join(escapes.get(c, c) for c in value)}"' for n, value in labels)
