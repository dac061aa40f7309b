"""``localckpt explain``: what a restart would load, from the stores of several nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from localckpt.availability.explanation import Explanation
from localckpt.cli.gathered import Found, Nodes, explain_session, gather, read_store
from localckpt.cli.listing import SharedListing, look
from localckpt.cli.output import (
    BAD,
    REFUSED,
    JsonOption,
    age,
    counted,
    one_line_errors,
    say,
    say_json,
    store_or_default,
    stores_argument,
    warn,
)
from localckpt.errors import CheckpointingException
from localckpt.global_tier.folders import SharedCheckpoint, find_shared_sessions
from localckpt.storage.catalog import ShardFile
from localckpt.storage.names import shared_path


def explain(
    directories: Annotated[
        list[Path] | None,
        stores_argument("The stores of all nodes, and roots on shared storage"),
    ] = None,
    world_size: Annotated[
        int | None,
        typer.Option(min=1, help="With how many ranks the job is to be restarted."),
    ] = None,
    session: Annotated[
        str | None, typer.Option(help="Of this session only; of all by default.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Say what a restart would load, and why.

    That is: which checkpoint, why none that is newer, and the loss of which nodes it survives. Each
    DIR is the store of one node, or a root on shared storage. Files are judged by their headers:
    `localckpt verify` reads them whole. The exit status is 1 if there is nothing that a restart
    could load, and 2 if a DIR cannot be used; the answer is of the others.
    """
    with one_line_errors():
        usual = [] if directories else [store_or_default(None)]
        given = [*map(shared_path, dict.fromkeys(directories or [])), *usual]
    read, shared = _read_all(given)
    sessions = _sessions(gather(read, warn), shared, world_size)
    if session is not None:
        sessions = [found for found in sessions if found.name == session]
    if json and (read or shared):
        say_json({"sessions": [found.to_json() for found in sessions]})
    elif sessions:
        for number, found in enumerate(sessions):
            say(*[""][: number > 0], f"session {found.name!r}", bold=True)
            found.say()
    elif read or shared:
        say("No job has used these stores yet." if session is None else f"No session {session!r}.")
    if len(read) + len(shared) < len(given):
        raise typer.Exit(REFUSED)
    raise typer.Exit(0 if any(found.can_be_loaded for found in sessions) else BAD)


@dataclass(frozen=True, slots=True)
class _Session:
    """One session on the nodes, and on shared storage."""

    name: str
    on_nodes: Explanation
    saved_at: float | None
    shared: tuple[SharedListing, ...]

    @property
    def can_be_loaded(self) -> bool:
        return self.on_nodes.loads is not None or self.newest_shared is not None

    @property
    def newest_shared(self) -> SharedCheckpoint | None:
        """The checkpoint that a restart loads from shared storage."""
        loads = [listing.loads for listing in self.shared if listing.loads is not None]
        return max(loads, key=lambda known: known.folder.version, default=None)

    def to_json(self) -> dict[str, Any]:
        shared = [listing.to_json() for listing in self.shared]
        fields = {"session": self.name, **self.on_nodes.to_json()}
        return {**fields, "saved_at": self.saved_at, "shared": shared}

    def say(self) -> None:
        if self.on_nodes.nodes:
            say(*str(self.on_nodes).splitlines())
        if self.saved_at is not None and self.on_nodes.loads is not None:
            say(f"Iteration {self.on_nodes.loads.iteration} was saved {age(self.saved_at)} ago.")
        for number, listing in enumerate(self.shared):
            say(*[""][: number > 0 or bool(self.on_nodes.nodes)])
            say(f"shared storage {listing.session.path}", "")
            listing.say()
        newest, local = self.newest_shared, self.on_nodes.loads
        if self.shared and newest is None:
            say("", "From shared storage a restart finds nothing to load.")
        if newest is not None:
            ranks = newest.record.world_size
            say(
                "",
                f"From shared storage a restart loads iteration {newest.folder.iteration} (epoch "
                f"{newest.folder.epoch}, saved by {counted(ranks, 'rank')}, {age(newest.saved_at)} "
                f"ago), with any number of ranks.",
            )
        if newest is not None and local is not None:
            ahead = local.iteration - newest.folder.iteration
            where = "on the nodes" if ahead > 0 else "on shared storage"
            say(
                f"The higher iteration is that {where}."
                if ahead
                else "Both are the same iteration."
            )


def _read_all(
    directories: Sequence[Path | str],
) -> tuple[dict[Path, dict[str, Found]], dict[Path | str, list[SharedListing]]]:
    """Read stores of nodes, and roots on shared storage, but for those that cannot be used."""
    read: dict[Path, dict[str, Found]] = {}
    shared: dict[Path | str, list[SharedListing]] = {}
    for directory in directories:
        try:
            if found := find_shared_sessions(directory):
                shared[directory] = [look(session) for session in found]
            else:
                read[Path(directory)] = read_store(Path(directory))
        except CheckpointingException as error:
            left_out = f"{directory} is left out: " if len(directories) > 1 else ""
            warn(f"{left_out}{error}")
    return read, shared


def _sessions(
    nodes: Nodes, shared: Mapping[Path | str, Sequence[SharedListing]], world_size: int | None
) -> list[_Session]:
    listings = [listing for found in shared.values() for listing in found]
    names = {name for node in nodes.values() for name in node}
    names |= {listing.session.session_id for listing in listings}
    return [
        _session(
            name,
            *explain_session(name, nodes, world_size),
            tuple(listing for listing in listings if listing.session.session_id == name),
        )
        for name in sorted(names)
    ]


def _session(
    name: str,
    explanation: Explanation,
    shards: Sequence[ShardFile],
    listings: tuple[SharedListing, ...],
) -> _Session:
    times = [s.modified_at for s in shards if s.record.identity.checkpoint == explanation.loads]
    return _Session(name, explanation, max(times, default=None), listings)
