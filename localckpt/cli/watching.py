"""``localckpt watch``: a job that runs, live in the terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from localckpt.cli.account import degraded_since
from localckpt.cli.output import (
    JsonOption,
    age,
    counted,
    duration,
    one_line_errors,
    printable,
    say,
    say_json,
    size,
    table_lines,
)
from localckpt.cli.records import Records, RecordsArgument, SessionOption
from localckpt.cli.starts import JobSave, Start, ended_at, saves_of, starts_of
from localckpt.errors import StorageError
from localckpt.failure_texts import ranks_named

__all__ = ["Status", "status_of", "watch"]

_MOST_SAVES = 8
# Ranks note something every 2 seconds; a rank this far behind the others does not.
_SILENT_S = 30.0
# Time over which the speed of training is taken.
_RECENT_S = 60.0


def watch(
    directories: RecordsArgument = None,
    session: SessionOption = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, and end.")] = False,
    json: JsonOption = False,
) -> None:
    """Show a running job: how far it is, and what is safe.

    That is: the last step and how fast steps are, the newest checkpoint on the nodes, on other
    nodes and on shared storage, the last saves, and what is wrong. It ends with the job, or with
    Ctrl-C; with --json, or if the output is no terminal, it looks once. Ages are by the clock of
    the machine that looks.
    """
    with one_line_errors():
        records = Records(directories, session)
        seen = _statuses(records)
        if json:
            say_json({"sessions": [{"session": n, **s.to_json()} for n, s in seen.items()]})
        elif once or not (console := Console()).is_terminal:
            say(*_lines(seen))
        else:
            _show(console, records, seen, interval)


@dataclass(frozen=True, slots=True)
class Status:
    """Status of the last start of a job.

    Attributes:
        number: Number of the start, from 1.
        on_other_nodes: The newest save of which the nodes have copies on others.
        steps_per_s: Speed of training in its last minute; ``None`` if it is not known.
        last_heard: When each rank was last heard of, in seconds since 1970.
        degraded_since: Since when the newest checkpoint has fewer copies than asked for.
    """

    number: int
    start: Start
    saves: tuple[JobSave, ...]
    on_nodes: JobSave | None
    on_other_nodes: JobSave | None
    on_shared: JobSave | None
    steps_per_s: float | None
    last_heard: dict[int, float]
    degraded_since: float | None

    @property
    def failed(self) -> tuple[JobSave, ...]:
        """Saves that failed."""
        return tuple(save for save in self.saves if save.outcome == "failed")

    def to_json(self) -> dict[str, Any]:
        """Plain data; keys are only ever added."""
        levels = (self.on_nodes, self.on_other_nodes, self.on_shared)
        names = ("nodes", "other_nodes", "shared")
        return {
            "start": self.number,
            "ending": self.start.ending,
            "world_size": self.start.world_size,
            "began": self.start.began,
            "resumed_step": self.start.resumed_step,
            "last_step": self.start.last_step,
            "steps_per_s": self.steps_per_s,
            "newest": {
                name: None if save is None else _to_json(save)
                for name, save in zip(names, levels, strict=True)
            },
            "saves": [_to_json(save) for save in self.saves],
            "degraded_since": self.degraded_since,
            "last_heard": {str(rank): at for rank, at in self.last_heard.items()},
        }


def status_of(starts: Sequence[Start]) -> Status:
    """Status of a job, from its starts in the order in which they began; at least one."""
    start = starts[-1]
    saves = tuple(saves_of(start))
    ok = [save for save in saves if save.outcome == "ok"]
    on_nodes = [save for save in ok if not save.is_shared]
    return Status(
        number=len(starts),
        start=start,
        saves=saves,
        on_nodes=_newest(on_nodes),
        on_other_nodes=_newest([save for save in on_nodes if save.tier == "replicated"]),
        on_shared=_newest([save for save in ok if save.is_shared]),
        steps_per_s=_speed(start),
        last_heard={r: max(map(ended_at, events)) for r, events in sorted(start.ranks.items())},
        degraded_since=degraded_since(start),
    )


def _newest(saves: Sequence[JobSave]) -> JobSave | None:
    return max(saves, key=lambda save: save.step, default=None)


def _speed(start: Start) -> float | None:
    """Steps per second between the last notes."""
    marks = start.marks
    recent = [mark for mark in marks if mark[1] >= marks[-1][1] - _RECENT_S]
    if len(recent) < 2 or recent[-1][1] <= recent[0][1]:
        return None
    return (recent[-1][0] - recent[0][0]) / (recent[-1][1] - recent[0][1])


def _to_json(save: JobSave) -> dict[str, Any]:
    return {**asdict(save), "bytes_per_s": save.throughput}


def _statuses(records: Records) -> dict[str, Status]:
    """Status of each session by name."""
    sessions = starts_of(records.read())
    if not sessions:
        raise StorageError("no Checkpointer has begun these records: nothing tells whose they are")
    over = [start for starts in sessions.values() for start in starts[:-1]]
    records.shorten({event.run for start in over for event in start.events})
    return {name: status_of(starts) for name, starts in sessions.items()}


def _show(
    console: Console, records: Records, seen: Mapping[str, Status], interval_s: float
) -> None:
    """Show the status until every session has ended."""
    try:
        with Live(_text(seen), console=console, auto_refresh=False) as live:
            while any(status.start.ending == "open" for status in seen.values()):
                time.sleep(interval_s)
                seen = _statuses(records)
                live.update(_text(seen), refresh=True)
    except KeyboardInterrupt:
        return


def _text(seen: Mapping[str, Status]) -> Text:
    # Longer lines than the terminal's are cut, so that nothing moves.
    return Text("\n".join(map(printable, _lines(seen))), no_wrap=True, overflow="ellipsis")


def _lines(seen: Mapping[str, Status]) -> list[str]:
    lines: list[str] = []
    for name, status in seen.items():
        lines += [""] * bool(lines) + _lines_of(name, status)
    return lines


def _lines_of(name: str, status: Status) -> list[str]:
    start, step = status.start, status.start.last_step
    speed = "" if status.steps_per_s is None else f", {status.steps_per_s:.3g} steps/s"
    state = "is restarting" if step is None else f"at step {step}{speed}"
    if start.ending != "open":
        state = f"ended after step {step}: {start.ending}"
    head = f"session {name!r}, start {status.number}: {counted(start.world_size, 'rank')}, {state}"
    return [
        f"{head}; last heard of {age(start.ended)} ago",
        *_resumed(status),
        "",
        *_levels(status),
        *_recent(status),
        *_warnings(status),
    ]


def _resumed(status: Status) -> list[str]:
    resumed = status.start.resumed_step
    if resumed is None:
        return []
    took = duration(status.start.trained_from - status.start.began)
    source = "started from the beginning" if resumed < 0 else f"resumed after step {resumed}"
    return [f"{source} in {took}, {age(status.start.trained_from)} ago"]


def _levels(status: Status) -> list[str]:
    """A line for each place where checkpoints are: the newest one there."""
    places = {
        "the nodes": status.on_nodes,
        "other nodes": status.on_other_nodes,
        "shared storage": status.on_shared,
    }
    rows = []
    for place, save in places.items():
        if save is None or save.ended is None:
            rows.append((place, "-", "-", "-"))
        else:
            behind = (status.start.last_step or 0) - save.step
            rows.append((place, str(save.step), age(save.ended), counted(behind, "step")))
    names = ("newest on", "step", "age", "behind")
    return table_lines(names, rows, right=names[1:])


def _recent(status: Status) -> list[str]:
    recent = [save for save in status.saves if save.outcome != "skipped"][-_MOST_SAVES:]
    if not recent:
        return []
    names = ("save", "to", "size", "waited", "durable in", "per second", "")
    rows = [
        (
            str(save.step),
            "shared storage" if save.is_shared else "the nodes",
            size(save.nbytes),
            duration(save.blocking_s),
            "-" if save.ended is None else duration(save.ended - save.began),
            "-" if save.throughput is None else size(int(save.throughput)),
            _outcome(save),
        )
        for save in reversed(recent)
    ]
    return ["", *table_lines(names, rows, right=[*names[:1], *names[2:-1]])]


def _outcome(save: JobSave) -> str:
    if save.outcome == "unfinished":
        return "under way"
    return save.outcome if save.outcome == "failed" else save.tier or "ok"


def _warnings(status: Status) -> list[str]:
    lines = []
    if status.failed:
        last = status.failed[-1]
        lines.append(
            f"{counted(len(status.failed), 'save')} failed, the last of step {last.step}: "
            f"{last.error}"
        )
    if status.degraded_since is not None:
        lines.append(f"fewer copies than asked for, for {age(status.degraded_since)}")
    newest = max(status.last_heard.values())
    silent = [rank for rank, at in status.last_heard.items() if at < newest - _SILENT_S]
    if silent and status.start.ending == "open":
        oldest = min(status.last_heard.values())
        lines.append(f"{ranks_named(silent)} not heard of for up to {age(oldest)}")
    if missing := sorted(set(range(status.start.world_size)) - status.start.ranks.keys()):
        lines.append(f"no record of {ranks_named(missing)}: give the stores of all nodes")
    return ["", *lines] if lines else []
