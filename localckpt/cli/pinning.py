"""``localckpt pin`` and ``unpin``: have jobs keep a checkpoint on shared storage, or let go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from localckpt.cli.output import JsonOption, counted, one_line_errors, say, say_json
from localckpt.errors import StorageError
from localckpt.global_tier.folders import Folder, SharedCheckpoint, find_shared_sessions
from localckpt.global_tier.folders import pin as pin_folder
from localckpt.global_tier.folders import unpin as unpin_folder
from localckpt.global_tier.places import place_of

RootArgument = Annotated[
    Path,
    typer.Argument(metavar="DIR", readable=False, help="A root on shared storage."),
]
StepArgument = Annotated[
    int, typer.Argument(metavar="STEP", min=0, help="The iteration, as `localckpt ls` shows it.")
]
SessionOption = Annotated[
    str | None,
    typer.Option(help="The session, if several have this iteration.", show_default=False),
]


def pin(
    directory: RootArgument,
    step: StepArgument,
    session: SessionOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep a checkpoint on shared storage until it is unpinned.

    Every job that saves there keeps it, whatever its own rules are. A running job sees the pin at
    its next save.
    """
    with one_line_errors():
        newest = _find(directory, step, session)[0]
        if newest.problem is not None:
            raise newest.problem
        _change([newest.folder], pin_folder, "pinned", as_json)


def unpin(
    directory: RootArgument,
    step: StepArgument,
    session: SessionOption = None,
    as_json: JsonOption = False,
) -> None:
    """Leave a checkpoint to the rules of the jobs that save there again."""
    with one_line_errors():
        pinned = [known.folder for known in _find(directory, step, session) if known.is_pinned]
        if not pinned and not as_json:
            say(f"iteration {step} is not pinned")
        _change(pinned, unpin_folder, "unpinned", as_json)


def _find(directory: Path, step: int, session: str | None) -> list[SharedCheckpoint]:
    """Checkpoints of one iteration in one session, the newest first; raises StorageError."""
    root = place_of(directory)
    sessions = find_shared_sessions(root)
    if not sessions:
        raise StorageError(
            f"{root} is no root on shared storage: pins are for checkpoints there, as those of the "
            f"nodes go when newer ones are complete. Nothing was changed"
        )
    found = {
        known.session_id: checkpoints
        for known in sessions
        if session in (None, known.session_id)
        and (checkpoints := [c for c in known.checkpoints() if c.folder.iteration == step])
    }
    if not found:
        where = "" if session is None else f" in session {session!r}"
        raise StorageError(
            f"{root} has no checkpoint of iteration {step}{where}: `localckpt ls {root}` lists "
            f"them. Nothing was changed"
        )
    if len(found) > 1:
        names = ", ".join(map(repr, found))
        raise StorageError(
            f"{counted(len(found), 'session')} have iteration {step} ({names}): give --session. "
            f"Nothing was changed"
        )
    return next(iter(found.values()))


def _change(
    folders: list[Folder], change: Callable[[Folder], None], done: str, as_json: bool
) -> None:
    for folder in folders:
        change(folder)
        if not as_json:
            say(f"{done} {folder.path}")
    if as_json:
        say_json({done: [str(folder.path) for folder in folders]})
