"""``localckpt verify``: reads all shards of a store, and checks every block."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from localckpt.cli.output import (
    BAD,
    REFUSED,
    JsonOption,
    StoreArgument,
    one_line_errors,
    say,
    say_json,
    size,
    store_or_default,
)
from localckpt.storage.catalog import ShardFile, UncountedFile, find_sessions

__all__ = ["verify"]


def verify(directory: StoreArgument = None, json: JsonOption = False) -> None:
    """Check every block of every shard in a store.

    The exit status is 0 if all is good, 1 if something is bad, and 2 if something could not be
    read. Files that were set aside as damaged before (*.corrupt) are not looked at again.
    """
    with one_line_errors():
        outcome = _verify_all(store_or_default(directory), quiet=json)
    if json:
        say_json(outcome.to_json())
    else:
        outcome.say_summary()
    raise typer.Exit(outcome.exit_status)


class _Outcome:
    """How it went, so far."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.verified = self.nbytes = self.vanished = self.set_aside = 0
        self.bad: list[UncountedFile] = []
        self.unreadable: list[UncountedFile] = []

    @property
    def exit_status(self) -> int:
        return BAD if self.bad else REFUSED if self.unreadable else 0

    def take(self, file: ShardFile | UncountedFile | None) -> None:
        if file is None:
            self.vanished += 1
        elif isinstance(file, ShardFile):
            self.verified += 1
            self.nbytes += file.record.nbytes
        elif file.fault in ("unreadable", "other version"):
            self.unreadable.append(file)
        else:
            self.bad.append(file)

    def to_json(self) -> dict[str, Any]:
        return {
            "store": str(self.root),
            "verified": self.verified,
            "nbytes": self.nbytes,
            "bad": _to_json(self.bad),
            "unreadable": _to_json(self.unreadable),
            "vanished": self.vanished,
            "set_aside": self.set_aside,
        }

    def say_summary(self) -> None:
        counts = [f"{self.verified} good ({size(self.nbytes)})", f"{len(self.bad)} bad"]
        if self.unreadable:
            counts.append(f"{len(self.unreadable)} not readable")
        if self.vanished:
            counts.append(f"{self.vanished} let go by the job meanwhile")
        if self.set_aside:
            counts.append(f"{self.set_aside} set aside before, not looked at")
        say(f"{self.root}: {', '.join(counts)}")


def _to_json(files: Sequence[UncountedFile]) -> list[dict[str, str]]:
    return [{"path": str(file.path), "why": file.description} for file in files]


def _verify_all(root: Path, *, quiet: bool) -> _Outcome:
    outcome = _Outcome(root)

    def take(file: ShardFile | UncountedFile | None) -> None:
        outcome.take(file)
        if isinstance(file, UncountedFile) and not quiet:
            word = "bad" if file in outcome.bad else "not readable"
            say(f"{word}: {file.path}: {file.description}", red=True)

    found = []
    for session in find_sessions(root):
        shards, uncounted = session.shards()
        found += [(session, shard) for shard in shards]
        outcome.set_aside += len(session.corrupt_files())
        for file in uncounted:
            take(file)
    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    total = sum(shard.record.nbytes for _, shard in found)
    with Progress(
        *columns, console=console, transient=True, disable=quiet or not console.is_terminal
    ) as progress:
        task, begun = progress.add_task("", total=total), 0
        for session, shard in found:
            take(session.verify(shard, lambda nbytes: progress.advance(task, nbytes)))
            # Not all of a bad one is read, and the header of each one twice.
            begun += shard.record.nbytes
            progress.update(task, completed=begun)
    return outcome
