"""``localckpt report``: how a job's starts went, what failures have cost, and the goodput."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from localckpt.cli.account import (
    PARTS,
    Account,
    Kind,
    Restart,
    SaveCounts,
    account,
)
from localckpt.cli.output import (
    JsonOption,
    counted,
    duration,
    one_line_errors,
    say,
    say_json,
    say_table,
    size,
    store_or_default,
    stores_argument,
    warn,
)
from localckpt.cli.starts import Start, starts_of
from localckpt.cli.status import status_of
from localckpt.cli.tracing import write_trace
from localckpt.errors import StorageError
from localckpt.events.event import Event
from localckpt.events.jsonl import read_events
from localckpt.failure_texts import ranks_named

_WORDS: dict[Kind, str] = {
    "training": "training that counts",
    "blocking": "training waited for saves",
    "waiting": "waiting for the last saves",
    "repeated": "training that was lost and is repeated",
    "recovery": "recovery",
    "down": "nothing ran",
}
_FAILURES = ("killed", "failed")
_WIDTH = 80


def report(
    directories: Annotated[
        list[Path] | None,
        stores_argument("The stores of all nodes, or directories or files of records"),
    ] = None,
    session: Annotated[
        str | None,
        typer.Option(help="Of this session only; of all by default.", show_default=False),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            readable=False,
            help="Also draw it into this file, for https://ui.perfetto.dev.",
            show_default=False,
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Say what a job has done, what failures cost, and what is safe.

    That is: saves, and how long training waited for them; steps that each restart has lost; how
    long it took, part by part; and the share of all time that was training that counts. Of a start
    that has no end: how far it is, and the newest checkpoint on the nodes, on other nodes and on
    shared storage. It reads the records that ranks keep beside their checkpoints. The exit status
    is 2 if there is none.
    """
    with one_line_errors():
        events = _read_records(directories, session)
        if trace is not None:
            write_trace(events, trace)
        sessions = _sessions(events)
    accounts = {name: account(starts) for name, starts in sessions.items()}
    if json:
        told = [
            {"session": name, **accounts[name].to_json(), "status": status_of(starts).to_json()}
            for name, starts in sessions.items()
        ]
        say_json({"sessions": told})
        return
    for number, (name, starts) in enumerate(sessions.items()):
        say(*[""][: number > 0])
        _say(name, accounts[name])
        if starts[-1].ending == "open":
            say("", *status_of(starts).lines())


def _read_records(directories: Sequence[Path] | None, session: str | None) -> list[Event]:
    """Read the events of all ranks, of one session if that is given; StorageError for none."""
    given = [*map(store_or_default, directories)] if directories else [store_or_default(None)]
    where = " ".join(map(str, given))
    events = read_events(given)
    if not events:
        raise StorageError(
            f"no rank has left a record in {where}: give the directories that the checkpointers "
            f"of all nodes were given as local="
        )
    if session is None:
        return events
    began = (event for event in events if event.name == "run_began")
    runs = {event.run for event in began if event.details.get("session") == session}
    if not runs:
        raise StorageError(f"there is no record of session {session!r} in {where}")
    return [event for event in events if event.run in runs]


def _sessions(events: Sequence[Event]) -> dict[str, list[Start]]:
    """Starts of all sessions; raises StorageError if there are none."""
    sessions = starts_of(events)
    alone = {event.run for event in events}
    alone -= {event.run for event in events if event.name == "run_began"}
    left_out = (
        f"{counted(len(alone), 'record')} left out: no Checkpointer has begun them, so nothing "
        f"tells which session they are of"
    )
    if not sessions:
        raise StorageError(left_out)
    if alone:
        warn(left_out)
    return sessions


def _say(name: str, told: Account) -> None:
    restarts = told.restarts
    say(
        f"session {name!r}: {counted(len(restarts), 'start')} in {duration(told.total_s)}, "
        f"goodput {_percent(told.goodput)}",
        bold=True,
    )
    say("")
    _say_starts(restarts)
    if len(restarts) > 1:
        say("")
        _say_restarts(restarts)
    say("")
    _say_kinds(told)
    say("")
    _say_missing(restarts)
    last, unsaved = restarts[-1].start, told.unsaved_steps
    if last.ending == "open" and unsaved is not None:
        say(
            f"The last start has recorded no end: it runs, or was killed. A restart would lose "
            f"{counted(unsaved, 'step')} of it."
        )
    lost = sum(restart.lost_steps or 0 for restart in restarts)
    failures = sum(restart.start.ending in _FAILURES for restart in restarts)
    say(
        f"{counted(failures, 'start')} failed; {counted(lost, 'step')} were lost, "
        f"{duration(told.seconds['repeated'])} of training. Steps are noted about every 2 seconds: "
        f"those since the last note are not counted."
    )


def _say_missing(restarts: Sequence[Restart]) -> None:
    """Tell of ranks of which nothing is known, so that nobody takes them for good ones."""
    for number, restart in enumerate(restarts, 1):
        start = restart.start
        if missing := sorted(set(range(start.world_size)) - start.ranks.keys()):
            say(
                f"Of start {number} the records of {ranks_named(missing)} are missing: give the "
                f"stores of all nodes.",
                red=True,
            )


def _say_starts(restarts: Sequence[Restart]) -> None:
    names = ["start", "began", "ranks", "resumed at", "last step", "saves", "saved"]
    names += ["waited", "ended"]
    rows = [
        (
            str(number),
            time.strftime("%m-%d %H:%M:%S", time.localtime(restart.start.began)),
            str(restart.start.world_size),
            _resumed(restart),
            "-" if restart.start.last_step is None else str(restart.start.last_step),
            _saves(restart.on_nodes, restart.on_shared),
            size(restart.on_nodes.nbytes + restart.on_shared.nbytes),
            duration(restart.on_nodes.blocking_s + restart.on_shared.blocking_s),
            _ending(restart.start),
        )
        for number, restart in enumerate(restarts, 1)
    ]
    right = ("start", "ranks", "last step", "saved", "waited")
    say_table(names, rows, right, _WIDTH)


def _resumed(restart: Restart) -> str:
    step = restart.start.resumed_step
    if step is None:
        return "never"
    if step < 0:
        return "the beginning"
    return f"{step} ({', '.join(sorted(restart.sources)) or 'unknown'})"


def _saves(on_nodes: SaveCounts, on_shared: SaveCounts) -> str:
    parts = [str(on_nodes.ok)]
    if on_shared.ok:
        parts.append(f"{on_shared.ok} shared")
    if failed := on_nodes.failed + on_shared.failed:
        parts.append(f"{failed} failed")
    if cut_off := on_nodes.cut_off + on_shared.cut_off:
        parts.append(f"{cut_off} cut off")
    return ", ".join(parts)


def _ending(start: Start) -> str:
    if start.ending == "killed":
        return f"killed: {ranks_named(start.silent_ranks)}"
    if start.ending == "failed":
        errors = {event.error_class for event in start.named("run_ended") if event.error_class}
        return f"failed: {', '.join(sorted(errors)) or 'unknown'}"
    return "no end recorded" if start.ending == "open" else start.ending


def _say_restarts(restarts: Sequence[Restart]) -> None:
    names = ["restart", "lost steps", "repeated", "down", "recovery", *PARTS, "other"]
    rows = [
        (
            str(number),
            str(restart.lost_steps),
            duration(restart.repeated_s),
            duration(restart.down_s),
            duration(restart.recovery_s),
            *(duration(restart.parts_s[part]) for part in PARTS),
            duration(max(0.0, restart.recovery_s - sum(restart.parts_s.values()))),
        )
        for number, restart in enumerate(restarts, 1)
        if restart.lost_steps is not None
    ]
    say_table(names, rows, names, _WIDTH)


def _say_kinds(told: Account) -> None:
    rows = [
        (_WORDS[kind], duration(seconds), _percent(seconds / told.total_s if told.total_s else 0))
        for kind, seconds in told.seconds.items()
    ]
    say_table(("time", "length", "share"), rows, right=("length", "share"))


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
