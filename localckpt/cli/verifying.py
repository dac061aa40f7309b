"""``localckpt verify``: reads all shards of a store, and checks every block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
from localckpt.global_tier.catalog import (
    SharedCheckpoint,
    SharedSession,
    find_shared_sessions,
    verify_file,
)
from localckpt.storage.catalog import (
    SessionFolder,
    ShardFile,
    UncountedFile,
    find_sessions,
    uncounted_file,
)


def verify(directory: StoreArgument = None, json: JsonOption = False) -> None:
    """Check every block of every shard in a store.

    Or, on shared storage, of every file of every checkpoint. The exit status is 0 if all is good, 1
    if something is bad, and 2 if something could not be read. Files in quarantine
    (*.corrupt) are not looked at again.
    """
    with one_line_errors():
        outcome = _verify_all(store_or_default(directory), quiet=json)
    if json:
        say_json(outcome.to_json())
    else:
        outcome.say_summary()
    raise typer.Exit(outcome.exit_status)


class _Verified:
    """Counts of what was verified so far, and the files that are not good."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.verified = self.nbytes = self.vanished = self.quarantined = 0
        self.bad: list[UncountedFile] = []
        self.unreadable: list[UncountedFile] = []

    @property
    def exit_status(self) -> int:
        return BAD if self.bad else REFUSED if self.unreadable else 0

    def good(self, nbytes: int) -> None:
        """Count a file that was verified."""
        self.verified += 1
        self.nbytes += nbytes

    def take(self, file: UncountedFile) -> str:
        """Count a file that is not good, and return the word for it."""
        if file.problem.kind in ("unreadable", "other version"):
            self.unreadable.append(file)
            return "not readable"
        self.bad.append(file)
        return "bad"

    def to_json(self) -> dict[str, Any]:
        return {
            "store": str(self.root),
            "verified": self.verified,
            "nbytes": self.nbytes,
            "bad": _to_json(self.bad),
            "unreadable": _to_json(self.unreadable),
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
        say(f"{self.root}: {', '.join(counts)}")


def _to_json(files: Sequence[UncountedFile]) -> list[dict[str, str]]:
    return [{"path": str(file.path), "why": file.description} for file in files]


class _Check(NamedTuple):
    """File to verify, and the number of bytes that are read for it.

    ``verify`` returns the bytes of a good file, the fault of a bad one, and ``None`` if a job has
    removed the file meanwhile.
    """

    nbytes: int
    verify: Callable[[Callable[[int], None]], int | UncountedFile | None]


def _verify_all(root: Path, *, quiet: bool) -> _Verified:
    outcome = _Verified(root)

    def take(found: int | UncountedFile | None) -> None:
        if found is None:
            outcome.vanished += 1
        elif isinstance(found, int):
            outcome.good(found)
        else:
            word = outcome.take(found)
            if not quiet:
                say(f"{word}: {found.path}: {found.description}", red=True)

    shared = find_shared_sessions(root)
    checks = _of_shared(shared, take) if shared else _of_node(root, outcome, take)
    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    total = sum(check.nbytes for check in checks)
    with Progress(
        *columns, console=console, transient=True, disable=quiet or not console.is_terminal
    ) as progress:
        task, begun = progress.add_task("", total=total), 0
        for check in checks:
            take(check.verify(lambda nbytes: progress.advance(task, nbytes)))
            # Not all of a bad one is read, and the header of each one twice.
            begun += check.nbytes
            progress.update(task, completed=begun)
    return outcome


def _of_node(root: Path, outcome: _Verified, take: Callable[[UncountedFile], None]) -> list[_Check]:
    """Checks of a node's store; files that are no shards go to ``take`` at once."""

    def check(session: SessionFolder, shard: ShardFile) -> _Check:
        def verify(on_read: Callable[[int], None]) -> int | UncountedFile | None:
            found = session.verify(shard, on_read)
            return found.record.nbytes if isinstance(found, ShardFile) else found

        return _Check(shard.record.nbytes, verify)

    checks = []
    for session in find_sessions(root):
        shards, uncounted = session.shards()
        checks += [check(session, shard) for shard in shards]
        outcome.quarantined += len(session.quarantined())
        for file in uncounted:
            take(file)
    return checks


def _of_shared(
    sessions: Sequence[SharedSession], take: Callable[[UncountedFile], None]
) -> list[_Check]:
    """Checks of shared storage; directories without a good record go to ``take`` at once."""

    def check(known: SharedCheckpoint, path: Path, nbytes: int | None) -> _Check:
        def verify(on_read: Callable[[int], None]) -> int | UncountedFile | None:
            assert known.record is not None, "only a record tells of files"
            try:
                return verify_file(path, nbytes, known.record, on_read)
            except CheckpointingException as error:
                # A job that saves lets older checkpoints go.
                return uncounted_file(path, error) if known.folder.has_record else None

        return _Check(nbytes or 0, verify)

    checks = []
    for session in sessions:
        for known in session.checkpoints():
            checks += [check(known, path, nbytes) for path, nbytes in known.files().items()]
            if known.record is None and known.problem is not None:
                take(uncounted_file(known.folder.path, known.problem))
    return checks
