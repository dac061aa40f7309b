"""Trace of a whole job: all ranks and starts in one picture for Perfetto."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from localckpt.events.chrome import trace_entries, track_entries
from localckpt.events.event import Event
from localckpt.report.account import account
from localckpt.report.starts import starts_of

__all__ = ["trace_of"]

_JOB = 1_000_000_000
"""Number of the process that stands for the job; no rank has it."""


def trace_of(events: Sequence[Event]) -> dict[str, Any]:
    """Draw events in the trace event format, which Perfetto and Chrome read.

    Above the tracks of the ranks is one for each session: what the time of the job was.
    """
    ranks = {event.rank: event for event in events}
    entries = [entry for _, event in sorted(ranks.items()) for entry in track_entries(event)]
    entries += [entry for event in events for entry in trace_entries(event)]
    return {"traceEvents": [*_job_entries(events), *entries], "displayTimeUnit": "ms"}


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
