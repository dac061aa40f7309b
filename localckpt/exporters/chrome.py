"""Sink that draws a rank's events in the format of Chrome's and Perfetto's trace viewers.

The files are JSON arrays without an end, which both viewers read, so one is of use after a kill.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from localckpt.errors import StorageError
from localckpt.events.appending import AppendedFile, file_name
from localckpt.events.event import LOST, Event

__all__ = ["ChromeTrace", "trace_entries", "track_entries"]

# Threads of the picture. What training waits for is on one, where parts lie within their whole.
_TRACKS = {1: "training waits", 2: "what happened"}
_ON_TRAINING = LOST | {"resume", "wait_prev", "d2h"}
# Several of these may be under way at once, so they are drawn side by side.
_SIDE_BY_SIDE = frozenset(("save", "background", "reprotected", "drain"))


class ChromeTrace:
    """Sink that writes one trace per rank and start.

    Args:
        folder: Directory of the files ``rank<n>.<time>.<run>.trace.json``.
        most_nbytes: Size at which a file ends; later events are not drawn, which a warning says.
    """

    def __init__(self, folder: str | os.PathLike[str], *, most_nbytes: int = 64 << 20) -> None:
        self._folder = Path(folder).absolute()
        self._most_nbytes = most_nbytes
        self._file: AppendedFile | None = None

    def write(self, event: Event) -> None:
        """Draw one event; raises OSError, and StorageError if the file is as large as it may be."""
        if self._file is None:
            self._folder.mkdir(0o700, parents=True, exist_ok=True)
            path = self._folder / f"{file_name(event)}.trace.json"
            self._file = AppendedFile(path, 0o600)
            self._file.append(b"[\n" + _lines(track_entries(event)))
        if self._file.nbytes >= self._most_nbytes:
            raise StorageError(f"the trace in {self._folder} has {self._file.nbytes} bytes")
        self._file.append(_lines(trace_entries(event)))

    def flush(self) -> None:
        """Do nothing: every event was written by itself."""

    def close(self) -> None:
        """Close the file."""
        if (file := self._file) is not None:
            self._file = None
            file.close()


def _lines(entries: Iterable[dict[str, Any]]) -> bytes:
    return "".join(f"{json.dumps(entry)},\n" for entry in entries).encode()


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
    fields = {
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
        "args": {name: value for name, value in fields.items() if value is not None},
    }
    if event.name in _SIDE_BY_SIDE:
        pair = entry | {"id": f"{event.run}.{event.number}"}
        ends = {key: pair[key] for key in ("name", "cat", "pid", "tid", "id")}
        return [pair | {"ph": "b"}, ends | {"ph": "e", "ts": begin + length}]
    if event.name in _ON_TRAINING or event.duration:
        return [entry | {"ph": "X", "dur": length}]
    return [entry | {"ph": "i", "s": "t"}]
