"""Records of ranks, as the commands that are about a job's past and present read them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from localckpt.cli.output import store_or_default, stores_argument
from localckpt.errors import StorageError
from localckpt.events.event import Event
from localckpt.events.jsonl import read_events

__all__ = ["RecordsArgument", "SessionOption", "read_records"]

RecordsArgument = Annotated[
    list[Path] | None,
    stores_argument("The stores of all nodes, or directories or files of records"),
]
SessionOption = Annotated[
    str | None, typer.Option(help="Of this session only; of all by default.", show_default=False)
]


def read_records(directories: Sequence[Path] | None, session: str | None) -> list[Event]:
    """Read the events of all ranks.

    Args:
        directories: Stores, or directories or files of records; none for the usual store.
        session: The events of this session only.

    Raises:
        CheckpointingException: Something cannot be read, or there is no event.
    """
    usual = [] if directories else [store_or_default(None)]
    given = [*map(store_or_default, directories or []), *usual]
    events = read_events(given)
    where = " ".join(map(str, given))
    if not events:
        raise StorageError(
            f"no rank has left a record in {where}: give the directories that the checkpointers "
            f"of all nodes were given as local="
        )
    if session is None:
        return events
    runs = {e.run for e in events if e.name == "run_began" and e.details.get("session") == session}
    if not runs:
        raise StorageError(f"there is no record of session {session!r} in {where}")
    return [event for event in events if event.run in runs]
