"""``localckpt explain``: what a restart would load, from the stores of several nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from localckpt.cli.output import (
    REFUSED,
    JsonOption,
    one_line_errors,
    say,
    say_json,
    store_or_default,
    warn,
)
from localckpt.errors import CheckpointingException
from localckpt.ids import ShardRecord
from localckpt.managers.explanation import Explanation
from localckpt.managers.explanation import explain as explain_holdings
from localckpt.managers.holdings import Holdings
from localckpt.storage.aside import why_set_aside
from localckpt.storage.catalog import SessionFolder, find_sessions, node_token

__all__ = ["explain"]

_SHORT = {
    "other version": "it is of another version of the format",
    "other session": "it belongs to another session",
    "unreadable": "it cannot be read",
}


def explain(
    directories: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="DIR",
            readable=False,
            help="The stores of all nodes; this user's store in memory by default.",
            show_default=False,
        ),
    ] = None,
    world_size: Annotated[
        int | None,
        typer.Option(min=1, help="With how many ranks the job is to be restarted."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Say what a restart would load, and why.

    That is: which checkpoint, why none that is newer, and the loss of which nodes it survives. Each
    DIR is the store of one node. Files are judged by their headers: `localckpt verify` reads
    them whole. The exit status is 2 if a DIR cannot be used; what is said is of the others.
    """
    with one_line_errors():
        given = list(dict.fromkeys(directories or [store_or_default(None)]))
    read = _read_all(given)
    if read:
        _tell(_gather(read), world_size, json)
    raise typer.Exit(0 if len(read) == len(given) else REFUSED)


def _tell(nodes: _Nodes, world_size: int | None, json: bool) -> None:
    sessions = dict.fromkeys(session for node in nodes.values() for session in node)
    explanations = {session: _explain(session, nodes, world_size) for session in sorted(sessions)}
    if json:
        told = [{"session": s, **explanation.to_json()} for s, explanation in explanations.items()]
        say_json({"sessions": told})
        return
    for number, (session, explanation) in enumerate(explanations.items()):
        say(*[""][: number > 0], f"session {session!r}", bold=True)
        say(*str(explanation).splitlines())
    if not explanations:
        say("No job has used these stores yet.")


@dataclass(frozen=True, slots=True)
class _Found:
    """What one node, or one of its directories, has of one session."""

    records: tuple[ShardRecord, ...] = ()
    bad: tuple[str, ...] = ()

    def and_also(self, other: _Found) -> _Found:
        return _Found(self.records + other.records, self.bad + other.bad)


_Nodes = dict[str, dict[str, _Found]]
"""What each node has, by session."""


def _read_all(directories: Sequence[Path]) -> dict[Path, list[tuple[str, _Found]]]:
    """What the directories have, with its session, without those that cannot be used."""
    read = {}
    for directory in directories:
        try:
            read[directory] = [(s.session_id, _read(s)) for s in find_sessions(directory)]
        except CheckpointingException as error:
            left_out = f"{directory} is left out: " if len(directories) > 1 else ""
            warn(f"{left_out}{error}")
    return read


def _read(session: SessionFolder) -> _Found:
    shards, uncounted = session.shards()
    bad = [f"{file.path.name}: {_SHORT.get(file.fault, file.why)}" for file in uncounted]
    aside = [f"{path.name}: {why_set_aside(path)}" for path in session.corrupt_files()]
    return _Found(tuple(shard.record for shard in shards), (*bad, *aside))


def _gather(read: Mapping[Path, Sequence[tuple[str, _Found]]]) -> _Nodes:
    """Take the directories of one node together."""
    nodes: _Nodes = {}
    labels: dict[str, str] = {}
    for directory, sessions in read.items():
        label = labels.setdefault(node_token(directory) or str(directory), str(directory))
        if label != str(directory):
            warn(f"{directory} is of the same node as {label}")
        of_node = nodes.setdefault(label, {})
        for session, found in sessions:
            of_node[session] = of_node.get(session, _Found()).and_also(found)
    return nodes


def _explain(session: str, nodes: _Nodes, world_size: int | None) -> Explanation:
    nothing = _Found()
    found = {label: sessions.get(session, nothing) for label, sessions in nodes.items()}
    return explain_holdings(
        Holdings.found({label: of_node.records for label, of_node in found.items()}),
        world_size,
        {label: of_node.bad for label, of_node in found.items()},
    )
