"""Traces of a job for Perfetto, drawn from the record of its ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from localckpt.cli.account import account
from localckpt.cli.starts import starts_of
from localckpt.errors import StorageError
from localckpt.events.event import LOST, Event

# Number of the process that stands for the job; no rank has it.
_JOB = 1_000_000_000
# Threads of the picture. What training waits for is on one, where parts lie within their whole.
_TRACKS = {1: "training waits", 2: "what happened"}
_ON_TRAINING = LOST | {"resume", "wait_prev", "d2h"}
# Several of these may be under way at once, so they are drawn side by side.
_SIDE_BY_SIDE = frozenset(("save", "background", "reprotected", "drain"))


def write_trace(events: Sequence[Event], path: Path) -> None:
    """Write events for Perfetto and Chrome, with a track for each session; raises StorageError."""
    ranks = {event.rank: event for event in events}
    entries = [entry for _, event in sorted(ranks.items()) for entry in _track_entries(event)]
    entries += [entry for event in events for entry in _trace_entries(event)]
    drawn = {"traceEvents": [*_job_entries(events), *entries], "displayTimeUnit": "ms"}
    try:
        # The user's alone, as the record is.
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(file, "w") as stream:
            stream.write(json.dumps(drawn))
    except OSError as error:
        why = error.strerror or str(error)
        if not path.absolute().parent.is_dir():
            why = f"there is no folder {path.absolute().parent}. Make it, or give another file"
        raise StorageError(f"the trace cannot be written to {path}: {why}") from error


def _job_entries(events: Sequence[Event]) -> list[dict[str, Any]]:
    job = {"pid": _JOB}
    entries: list[dict[str, Any]] = [
        {**job, "ph": "M", "name": "process_name", "args": {"name": "job"}},
        {**job, "ph": "M", "name": "process_sort_index", "args": {"sort_index": -1}},
    ]
    for track, (session, starts) in enumerate(starts_of(events).items(), 1):
        on_track = {**job, "tid": track}
        name = f"session {session!r}"
        entries.append({**on_track, "ph": "M", "name": "thread_name", "args": {"name": name}})
        accounted = account(starts)
        entries += [
            {
                **on_track,
                "ph": "X",
                "cat": "job",
                "name": stretch.kind,
                "ts": 1e6 * stretch.began,
                "dur": 1e6 * stretch.seconds,
            }
            for stretch in accounted.stretches
        ]
        entries += [
            {
                **on_track,
                "ph": "i",
                "s": "p",
                "cat": "job",
                "name": f"{restart.start.ending} after step {restart.start.last_step}",
                "ts": 1e6 * restart.start.ended,
            }
            for restart in accounted.restarts
            if restart.start.ending in ("killed", "failed")
        ]
    return entries


def _track_entries(event: Event) -> list[dict[str, Any]]:
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


def _trace_entries(event: Event) -> list[dict[str, Any]]:
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
