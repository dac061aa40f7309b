"""``localckpt ls``: what lies in one node's store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localckpt.cli.output import (
    JsonOption,
    StoreArgument,
    age,
    counted,
    one_line_errors,
    say,
    say_json,
    say_table,
    size,
    store_or_default,
)
from localckpt.cli.shared import SharedListing, look
from localckpt.global_tier.catalog import find_shared_sessions
from localckpt.ids import Checkpoint, ShardRecord
from localckpt.managers.coverage import complete_checkpoints
from localckpt.managers.explanation import ranges
from localckpt.managers.holdings import Holdings
from localckpt.managers.ordering import newest_first
from localckpt.storage.catalog import (
    Leftover,
    SessionFolder,
    ShardFile,
    UncountedFile,
    find_sessions,
    node_token,
)

__all__ = ["describe_leftovers", "ls"]


def ls(directory: StoreArgument = None, json: JsonOption = False) -> None:
    """List the checkpoints in a store, or on shared storage.

    "Complete here" means that this node alone holds the shards of all ranks; with several nodes
    that is neither usual nor needed: ask `localckpt explain` with the stores of all of them.
    """
    with one_line_errors():
        root = store_or_default(directory)
        if shared := [look(session) for session in find_shared_sessions(root)]:
            _say_shared(root, shared, json)
            return
        listings = [_look(session) for session in find_sessions(root)]
        node = node_token(root)
        if json:
            sessions = [listing.to_json() for listing in listings]
            say_json({"store": str(root), "shared": False, "node": node, "sessions": sessions})
            return
        say(f"{root}: node {node}" if node else f"{root}: of a node that has no name")
        for listing in listings:
            _say_listing(listing)
        if not listings:
            say("No job has used it yet.")


def _say_shared(root: Path, listings: Sequence[SharedListing], json: bool) -> None:
    if json:
        sessions = [{"session": s.session.session_id, **s.to_json()} for s in listings]
        say_json({"store": str(root), "shared": True, "sessions": sessions})
        return
    say(f"{root}: shared storage")
    for listing in listings:
        say("", f"session {listing.session.session_id!r}")
        listing.say()


@dataclass(frozen=True, slots=True)
class _Row:
    """One checkpoint, as far as it is on this node."""

    checkpoint: Checkpoint
    ranks: tuple[int, ...]
    copies: int
    parities: int
    nbytes: int
    saved_at: float
    is_complete: bool

    def to_json(self) -> dict[str, Any]:
        epoch, sequence = self.checkpoint.generation
        return {
            "iteration": self.checkpoint.iteration,
            "epoch": epoch,
            "sequence": sequence,
            "world_size": self.checkpoint.world_size,
            "ranks": list(self.ranks),
            "copies": self.copies,
            "parities": self.parities,
            "nbytes": self.nbytes,
            "saved_at": self.saved_at,
            "complete_here": self.is_complete,
        }


@dataclass(frozen=True, slots=True)
class _Listing:
    """One session on this node."""

    session_id: str
    rows: tuple[_Row, ...]
    uncounted: tuple[UncountedFile, ...]
    leftovers: tuple[Leftover, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "session": self.session_id,
            "checkpoints": [row.to_json() for row in self.rows],
            "uncounted": [
                {
                    "path": str(file.path),
                    "nbytes": file.nbytes,
                    "fault": file.fault,
                    "why": file.description,
                }
                for file in self.uncounted
            ],
            "leftovers": {
                name: {"files": len(files), "nbytes": sum(f.nbytes for f in files)}
                for name, files in _by_kind(self.leftovers).items()
            },
        }


def describe_leftovers(leftovers: Iterable[Leftover]) -> list[str]:
    """A line for each kind of which there are any."""
    meanings = {
        "dirty_live": "being written",
        "dirty_dead": "left unfinished by processes that are gone",
        "spare_live": "spare, for the next saves",
        "spare_dead": "spare, of processes that are gone",
        "corrupt": "set aside as damaged",
    }
    return [
        f"{counted(len(files), 'file')} {meanings[name]} "
        f"({size(sum(file.nbytes for file in files))})"
        for name, files in _by_kind(leftovers).items()
        if files
    ]


def _look(session: SessionFolder) -> _Listing:
    shards, uncounted = session.shards()
    rows = _rows(shards)
    return _Listing(session.session_id, rows, tuple(uncounted), tuple(session.leftovers()))


def _rows(shards: Sequence[ShardFile]) -> tuple[_Row, ...]:
    holdings = Holdings.found({"here": [shard.record for shard in shards]})
    complete = complete_checkpoints(holdings)
    by_checkpoint: dict[Checkpoint, list[ShardRecord]] = {}
    saved_at: dict[Checkpoint, float] = {}
    for shard in shards:
        checkpoint = shard.record.identity.checkpoint
        by_checkpoint.setdefault(checkpoint, []).append(shard.record)
        saved_at[checkpoint] = max(shard.modified_at, saved_at.get(checkpoint, 0.0))
    return tuple(
        _Row(
            checkpoint,
            tuple(sorted({r.identity.rank for r in found if not r.identity.is_parity})),
            sum(not record.identity.is_parity for record in found),
            sum(record.identity.is_parity for record in found),
            sum(record.nbytes for record in found),
            saved_at[checkpoint],
            checkpoint in complete,
        )
        for checkpoint in newest_first(by_checkpoint, holdings.lineages)
        for found in [by_checkpoint[checkpoint]]
    )


def _by_kind(leftovers: Iterable[Leftover]) -> dict[str, list[Leftover]]:
    kinds = ("dirty_live", "dirty_dead", "spare_live", "spare_dead", "corrupt")
    found: dict[str, list[Leftover]] = {kind: [] for kind in kinds}
    for file in leftovers:
        # What is set aside belongs to nobody any more.
        owner = "" if file.kind == "corrupt" else "_live" if file.is_live else "_dead"
        found[f"{file.kind}{owner}"].append(file)
    return found


def _say_listing(listing: _Listing) -> None:
    say("", f"session {listing.session_id!r}")
    if listing.rows:
        # Only where there is any.
        parity = ["parities"] if any(row.parities for row in listing.rows) else []
        names = ["iteration", "generation", "ranks here", "copies", *parity]
        rows = [
            (
                str(row.checkpoint.iteration),
                str(row.checkpoint.generation),
                f"{ranges(row.ranks) or 'none'} of {row.checkpoint.world_size}",
                str(row.copies),
                *([str(row.parities)] if parity else []),
                size(row.nbytes),
                age(row.saved_at),
                "yes" if row.is_complete else "no",
            )
            for row in listing.rows
        ]
        numbers = ("iteration", "generation", "copies", *parity, "size", "age")
        say_table([*names, "size", "age", "complete here"], rows, right=numbers)
    else:
        say("no shard")
    for file in listing.uncounted:
        say(f"not counted: {file.path}: {file.description}", red=True)
    say(*describe_leftovers(listing.leftovers))
