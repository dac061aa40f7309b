"""``localckpt clean``: removes what processes that are gone left on this node.

A file in quarantine is verified again before it is removed, and put back if it is good.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

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
from localckpt.global_tier.folders import find_shared_sessions
from localckpt.ids import Checkpoint, ShardIdentity
from localckpt.own_folders import open_below
from localckpt.storage.catalog import (
    Removable,
    SessionFolder,
    ShardFile,
    UncountedFile,
    find_sessions,
    put_back,
    why_quarantined,
)
from localckpt.storage.names import shared_path
from localckpt.storage.rank_folder import lock_store

_WAIT_S = 30.0


def clean(
    directory: StoreArgument = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be removed.")
    ] = False,
    corrupt: Annotated[
        bool,
        typer.Option(
            "--corrupt",
            help="Also verify again what is in quarantine, remove what is damaged, and put back "
            "what is good.",
        ),
    ] = False,
    put_back_given_up: Annotated[
        bool,
        typer.Option(
            "--put-back",
            help="Also put back the checkpoints that the job has given up, and forget how often it "
            "was resumed from them in vain.",
        ),
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for a job that is starting here.")
    ] = _WAIT_S,
    json: JsonOption = False,
) -> None:
    """Remove what processes that are gone left.

    That is: unfinished files, and recycled files. Shards stay, and so does whatever belongs to a
    process that runs. Call it on the node itself, where the processes of its jobs can be seen.
    """
    with one_line_errors():
        named = shared_path(directory or store_or_default(None))
        if find_shared_sessions(named):
            raise StorageError(
                f"{named} is on shared storage, and this command is for the stores of nodes: the "
                f"job's next save removes what was cut off there. Nothing was changed"
            )
        root = store_or_default(directory)
        find_sessions(root)
        # No job starts here meanwhile, so none that is not seen to run takes files over.
        with nullcontext() if dry_run else lock_store(root, timeout):
            judged = _judge(root, corrupt, put_back_given_up)
            removed = judged.bad
            good = {file: file.path for file in judged.good}
            if not dry_run:
                removed = [file for file in removed if _remove(file)]
                for session, checkpoint in judged.trusted:
                    session.forget(checkpoint)
                good = {file: put_back(file.path) for file in judged.good}
    nbytes = sum(file.nbytes for file in removed)
    if json:
        say_json(
            {
                "store": str(root),
                "dry_run": dry_run,
                "removed": [
                    {"path": str(file.path), "nbytes": file.nbytes, "kind": file.kind}
                    for file in removed
                ],
                "nbytes": nbytes,
                "put_back": [
                    {"path": str(path), "nbytes": file.nbytes} for file, path in good.items()
                ],
                "left": [{"path": str(file.path), "why": file.description} for file in judged.left],
            }
        )
        return
    would = "would " if dry_run else ""
    word = "would remove" if dry_run else "removed"
    for file in removed:
        say(f"{word} {file.path} ({size(file.nbytes)})")
    for file, path in good.items():
        say(f"{would}put back {path} ({size(file.nbytes)}): every block of it is good")
    for left in judged.left:
        say(f"left {left.path}: {left.description}", red=True)
    summary = f"{root}: {word} {counted(len(removed), 'file')}, {size(nbytes)}"
    say(f"{summary}; {would}put back {len(good)}" if good else summary)


class _Judged(NamedTuple):
    """Files to remove or put back, also of those in quarantine, as they are found to be now."""

    good: list[Removable]
    """In quarantine and not damaged, and there is no other copy of it in its session."""
    bad: list[Removable]
    """Of a process that is gone, damaged, or there is a good copy."""
    left: list[UncountedFile]
    """Nobody can say, or the job has given it up."""
    trusted: list[tuple[SessionFolder, Checkpoint]]
    """Checkpoints that the job has given up, or may yet, and is to try again."""


def _judge(root: Path, corrupt: bool, put_back_given_up: bool) -> _Judged:
    judged = _Judged([], [], [], [])
    for session in find_sessions(root):
        leftovers = session.leftovers()
        judged.bad.extend(f for f in leftovers if f.kind != "corrupt" and not f.is_live)
        trusts = session.noted_trusts()
        marks = trusts.marked("quarantined")
        if put_back_given_up:
            counted_on = (c for c, trust in trusts.items() if trust.failed_starts)
            judged.trusted.extend((session, c) for c in {*counted_on, *marks})
        quarantined = [file for file in leftovers if file.kind == "corrupt"]
        if not quarantined or not (corrupt or put_back_given_up):
            # Reading all of a store takes its time.
            continue
        shards = session.shards()[0]
        kept: set[ShardIdentity] = set()
        for file in quarantined:
            found = session.verify_again(file.path)
            if isinstance(found, ShardFile):
                identity = found.record.identity
                problem = why_quarantined(file.path)
                is_given_up = problem.kind == "given up" or identity.checkpoint in marks
                if is_given_up and not put_back_given_up:
                    judged.left.append(UncountedFile(file.path, file.nbytes, problem))
                if not (put_back_given_up if is_given_up else corrupt):
                    continue
                others = [shard for shard in shards if shard.record.identity == identity]
                is_here = identity in kept or any(_is_good(session, other) for other in others)
                kept.add(identity)
                (judged.bad if is_here else judged.good).append(file)
            elif found is not None and corrupt and found.problem.kind == "damaged":
                judged.bad.append(file)
            elif found is not None and corrupt:
                judged.left.append(found)
    return judged


def _is_good(session: SessionFolder, shard: ShardFile) -> bool:
    return isinstance(session.verify(shard, lambda _: None), ShardFile)


def _remove(file: Removable) -> bool:
    try:
        # Without following a link that is put in the place of a folder meanwhile.
        rank = file.path.parent
        folder = open_below(rank.parent.parent, rank.parent.name, rank.name)
        try:
            os.unlink(file.path.name, dir_fd=folder)
        finally:
            os.close(folder)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StorageError(f"{file.path} cannot be removed: {error.strerror or error}") from error
    return True
