"""``localckpt clean``: removes what processes that are gone left on this node."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from filelock import FileLock, Timeout

from localckpt.cli.output import (
    JsonOption,
    StoreArgument,
    counted,
    one_line_errors,
    say,
    say_json,
    size,
    store_or_default,
)
from localckpt.errors import StorageError
from localckpt.storage.catalog import Leftover, find_sessions, find_staging
from localckpt.storage.names import LOCK_NAME

__all__ = ["clean"]

_WAIT_S = 30.0


def clean(
    directory: StoreArgument = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be removed.")
    ] = False,
    corrupt: Annotated[
        bool, typer.Option("--corrupt", help="Also remove what was set aside as damaged.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for a job that is starting here.")
    ] = _WAIT_S,
    json: JsonOption = False,
) -> None:
    """Remove what processes that are gone left.

    That is: unfinished files, spare files, and shared memory. Shards stay, and so does whatever
    belongs to a process that runs. Call it on the node itself, where the processes of its jobs can
    be seen.
    """
    with one_line_errors():
        root = store_or_default(directory)
        find_sessions(root)
        if dry_run:
            removed = _removable(root, corrupt=corrupt)
        else:
            with _lock(root, timeout):
                removed = [file for file in _removable(root, corrupt=corrupt) if _remove(file)]
    if json:
        files: list[dict[str, Any]] = [
            {"path": str(file.path), "nbytes": file.nbytes, "kind": file.kind} for file in removed
        ]
        total = sum(file.nbytes for file in removed)
        say_json({"store": str(root), "dry_run": dry_run, "removed": files, "nbytes": total})
        return
    word = "would remove" if dry_run else "removed"
    for file in removed:
        say(f"{word} {file.path} ({size(file.nbytes)})")
    say(
        f"{root}: {word} {counted(len(removed), 'file')}, "
        f"{size(sum(file.nbytes for file in removed))}"
    )


@contextmanager
def _lock(root: Path, timeout_s: float) -> Iterator[None]:
    """No job starts here meanwhile, so none that is not seen to run takes files over."""
    lock = FileLock(root / LOCK_NAME, timeout=timeout_s, mode=0o600)
    try:
        lock.acquire()
    except Timeout as error:
        raise StorageError(
            f"another process held {lock.lock_file} for {timeout_s:g} s: a job is starting, or see "
            f"who it is (fuser). Nothing was removed"
        ) from error
    except OSError as error:
        raise StorageError(f"{lock.lock_file}: {error.strerror or error}") from error
    try:
        yield
    finally:
        lock.release()


def _removable(root: Path, *, corrupt: bool) -> list[Leftover]:
    found = [file for session in find_sessions(root) for file in session.leftovers()]
    return [
        file
        for file in [*found, *find_staging()]
        if (corrupt if file.kind == "corrupt" else not file.is_live)
    ]


def _remove(file: Leftover) -> bool:
    try:
        file.path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StorageError(f"{file.path} cannot be removed: {error.strerror or error}") from error
    return True
