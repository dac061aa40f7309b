"""``localckpt verify``: reads all shards of a store, and checks every block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

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
from localckpt.errors import CheckpointingException
from localckpt.global_tier.folders import (
    SharedCheckpoint,
    SharedSession,
    find_shared_sessions,
    verify_file,
)
from localckpt.global_tier.places import Place, place_of
from localckpt.storage.catalog import (
    Problem,
    SessionFolder,
    ShardFile,
    UncountedFile,
    find_sessions,
)
from localckpt.storage.names import local_path

_OnRead: TypeAlias = Callable[[int], None]
_Result: TypeAlias = int | UncountedFile | tuple[Place, Problem] | None
"""Bytes of a good file, or the fault of a bad one; ``None`` if a job has removed it meanwhile."""
_Check: TypeAlias = tuple[int, Callable[[_OnRead], _Result]]
"""Bytes to read of a file, and the function that verifies it."""


def verify(directory: StoreArgument = None, json: JsonOption = False) -> None:
    """Check every block of every shard in a store.

    Or, on shared storage, of every file of every checkpoint. The exit status is 0 if all is good, 1
    if something is bad, and 2 if something could not be read. Files in quarantine
    (*.corrupt) are not looked at again.
    """
    with one_line_errors():
        outcome = _verify_all(directory or store_or_default(None), is_quiet=json)
    if json:
        say_json(outcome.to_json())
    else:
        outcome.say_summary()
    raise typer.Exit(outcome.exit_status)


class _Verified:
    """Counts of what was verified so far, and the files that are not good."""

    def __init__(self, root: object, *, is_quiet: bool) -> None:
        self._root, self._is_quiet = root, is_quiet
        self.verified = self.nbytes = self.vanished = self.quarantined = 0
        self.bad: list[dict[str, str]] = []
        self.unreadable: list[dict[str, str]] = []

    @property
    def exit_status(self) -> int:
        return BAD if self.bad else REFUSED if self.unreadable else 0

    def take(self, found: _Result) -> None:
        if found is None:
            self.vanished += 1
        elif isinstance(found, int):
            self.verified += 1
            self.nbytes += found
        elif isinstance(found, UncountedFile):
            self._note(found.path, found.problem.kind, found.description)
        else:
            path, problem = found
            self._note(path, problem.kind, problem.text)

    def _note(self, path: object, kind: str, why: str) -> None:
        is_bad = kind not in ("unreadable", "other version")
        (self.bad if is_bad else self.unreadable).append({"path": str(path), "why": why})
        if not self._is_quiet:
            say(f"{'bad' if is_bad else 'not readable'}: {path}: {why}", red=True)

    def to_json(self) -> dict[str, Any]:
        return {
            "store": str(self._root),
            "verified": self.verified,
            "nbytes": self.nbytes,
            "bad": self.bad,
            "unreadable": self.unreadable,
            "vanished": self.vanished,
            "quarantined": self.quarantined,
        }

    def say_summary(self) -> None:
        counts = [f"{self.verified} good ({size(self.nbytes)})", f"{len(self.bad)} bad"]
        if self.unreadable:
            counts.append(f"{len(self.unreadable)} not readable")
        if self.vanished:
            counts.append(f"{self.vanished} removed by the job meanwhile")
        if self.quarantined:
            counts.append(f"{self.quarantined} in quarantine, not looked at")
        say(f"{self._root}: {', '.join(counts)}")


def _verify_all(root: Path, *, is_quiet: bool) -> _Verified:
    place = place_of(root)
    outcome = _Verified(place, is_quiet=is_quiet)
    if shared := find_shared_sessions(place):
        checks = [*_of_shared(shared, outcome)]
    else:
        checks = [*_of_node(local_path(root), outcome)]
    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=is_quiet or not console.is_terminal
    ) as progress:
        task, begun = progress.add_task("", total=sum(nbytes for nbytes, _ in checks)), 0
        for nbytes, check in checks:
            outcome.take(check(lambda nbytes: progress.advance(task, nbytes)))
            # Not all of a bad one is read, and the header of each one twice.
            begun += nbytes
            progress.update(task, completed=begun)
    return outcome


def _of_node(root: Path, outcome: _Verified) -> Iterator[_Check]:
    for session in find_sessions(root):
        shards, uncounted = session.shards()
        outcome.quarantined += len(session.quarantined())
        for file in uncounted:
            outcome.take(file)
        for shard in shards:
            yield shard.record.nbytes, partial(_check_shard, session, shard)


def _check_shard(session: SessionFolder, shard: ShardFile, on_read: _OnRead) -> _Result:
    found = session.verify(shard, on_read)
    return found.record.nbytes if isinstance(found, ShardFile) else found


def _of_shared(sessions: Sequence[SharedSession], outcome: _Verified) -> Iterator[_Check]:
    for known in (known for session in sessions for known in session.checkpoints()):
        if known.problem is not None and not known.files:
            outcome.take((known.folder.path, Problem.of(known.problem)))
        for path, nbytes in known.files.items():
            yield nbytes or 0, partial(_check_file, known, path, nbytes)


def _check_file(
    known: SharedCheckpoint, path: Place, nbytes: int | None, on_read: _OnRead
) -> _Result:
    try:
        return verify_file(path, nbytes, known.record, on_read)
    except CheckpointingException as error:
        # A job that saves lets older checkpoints go.
        return (path, Problem.of(error)) if known.folder.has_record else None
