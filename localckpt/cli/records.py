"""Records of ranks, as the commands that are about a job's past and present read them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated

import typer

from localckpt.cli.output import store_or_default, stores_argument
from localckpt.errors import StorageError
from localckpt.events.event import Event
from localckpt.events.jsonl import RecordReader

__all__ = ["Records", "RecordsArgument", "SessionOption", "read_records"]

RecordsArgument = Annotated[
    list[Path] | None,
    stores_argument("The stores of all nodes, or directories or files of records"),
]
SessionOption = Annotated[
    str | None, typer.Option(help="Of this session only; of all by default.", show_default=False)
]

# What tells which runs were one start of which job.
_KEPT = ("run_began", "resume")


def read_records(directories: Sequence[Path] | None, session: str | None) -> list[Event]:
    """Read the events of all ranks; arguments and errors as of :class:`Records`."""
    return Records(directories, session).read()


class Records:
    """Records of ranks, which may still grow; of one session only, if that is given."""

    def __init__(self, directories: Sequence[Path] | None, session: str | None) -> None:
        usual = [] if directories else [store_or_default(None)]
        given = [*map(store_or_default, directories or []), *usual]
        self._where = " ".join(map(str, given))
        self._session = session
        self._reader = RecordReader(given)
        self._events: list[Event] = []

    def read(self) -> list[Event]:
        """Read all events that are there by now; raises CheckpointingException for none."""
        self._events += self._reader.read()
        if not self._events:
            raise StorageError(
                f"no rank has left a record in {self._where}: give the directories that the "
                f"checkpointers of all nodes were given as local="
            )
        if self._session is None:
            return self._events
        told = (event for event in self._events if event.name == "run_began")
        runs = {event.run for event in told if event.details.get("session") == self._session}
        if not runs:
            raise StorageError(f"there is no record of session {self._session!r} in {self._where}")
        return [event for event in self._events if event.run in runs]

    def shorten(self, runs: Collection[str]) -> None:
        """Forget what some runs did, but not that they were: a job may be watched for long."""
        self._events = [e for e in self._events if e.run not in runs or e.name in _KEPT]
