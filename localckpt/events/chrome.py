"""Sink that draws a rank's events in the format of Chrome's and Perfetto's trace viewers.

The files are JSON arrays without an end, which both viewers read, so one is of use after a kill.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from localckpt.errors import StorageError
from localckpt.events.event import LOST, Event

__all__ = ["ChromeTrace", "trace_entries", "track_entries"]

# Threads of the picture. What training waits for is on one, where parts lie within their whole.
_TRACKS = {1: "training waits", 2: "what happened"}
_ON_TRAINING = LOST | {"resume", "wait_prev", "d2h"}
# Several of these may be under way at once, so they are drawn side by side.
_SIDE_BY_SIDE = frozenset(("save", "background", "reprotected"))


class ChromeTrace:
    """Sink that writes one trace per rank and start.

    Args:
        folder: Directory of the files ``rank<n>.<time>.<run>.trace.json``.
        most_nbytes: Size at which a file ends; later events are not drawn, which a warning says.
    """

    def __init__(self, folder: str | os.PathLike[str], *, most_nbytes: int = 64 << 20) -> None:
        self._folder = Path(folder)
        self._most_nbytes = most_nbytes
        self._file: int | None = None
        self._nbytes = 0

    def write(self, event: Event) -> None:
        """Draw one event.

        Raises:
            OSError: The file cannot be written.
            StorageError: It is as large as it may be.
        """
        if self._file is None:
            self._open(event)
        if self._nbytes >= self._most_nbytes:
            raise StorageError(f"the trace in {self._folder} has {self._nbytes} bytes")
        self._append(trace_entries(event))

    def flush(self) -> None:
        """Do nothing: every event was written by itself."""

    def close(self) -> None:
        """Close the file."""
        if (file := self._file) is not None:
            self._file = None
            os.close(file)

    def _open(self, first: Event) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        began = datetime.fromtimestamp(first.start, UTC).strftime("%Y%m%dT%H%M%S")
        path = self._folder / f"rank{first.rank:05d}.{began}.{first.run}.trace.json"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o666)
        self._nbytes += os.write(self._file, b"[\n")
        self._append(track_entries(first))

    def _append(self, entries: Iterable[dict[str, Any]]) -> None:
        assert self._file is not None, "a file is open"
        text = "".join(f"{json.dumps(entry)},\n" for entry in entries).encode()
        if os.write(self._file, text) != len(text):
            raise StorageError(f"{self._folder} did not take {len(text)} bytes: is it full?")
        self._nbytes += len(text)


def track_entries(event: Event) -> list[dict[str, Any]]:
    """Entries that name the tracks of an event's rank."""
    ours = {"ph": "M", "pid": event.rank}
    rank = f"rank {event.rank} ({event.node})"
    return [
        {**ours, "name": "process_name", "args": {"name": rank}},
        {**ours, "name": "process_sort_index", "args": {"sort_index": event.rank}},
        *(
            {**ours, "tid": tid, "name": "thread_name", "args": {"name": name}}
            for tid, name in _TRACKS.items()
        ),
    ]


def trace_entries(event: Event) -> list[dict[str, Any]]:
    """Entries of the trace event format that draw one event; times in microseconds."""
    begin, length = 1e6 * event.start, 1e6 * event.duration
    told = {
        "step": event.step,
        "bytes": event.nbytes,
        "tier": event.tier,
        "outcome": event.outcome,
        "error_class": event.error_class or None,
        **event.details,
    }
    step = "" if event.step is None else f" {event.step}"
    entry = {
        "name": f"{event.name}{step}",
        "cat": "lost" if event.is_lost else "localckpt",
        "pid": event.rank,
        "tid": 1 if event.name in _ON_TRAINING else 2,
        "ts": begin,
        "args": {name: value for name, value in told.items() if value is not None},
    }
    if event.name in _SIDE_BY_SIDE:
        pair = entry | {"id": f"{event.run}.{event.number}"}
        ends = {key: pair[key] for key in ("name", "cat", "pid", "tid", "id")}
        return [pair | {"ph": "b"}, ends | {"ph": "e", "ts": begin + length}]
    if event.name in _ON_TRAINING or event.duration:
        return [entry | {"ph": "X", "dur": length}]
    return [entry | {"ph": "i", "s": "t"}]
