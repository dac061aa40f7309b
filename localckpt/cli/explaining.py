"""``localckpt explain``: what a restart would load, from the stores of several nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from localckpt.cli.output import JsonOption, one_line_errors, say, say_json, store_or_default
from localckpt.ids import ShardRecord
from localckpt.managers.explanation import Explanation
from localckpt.managers.explanation import explain as explain_holdings
from localckpt.storage.aside import why_set_aside
from localckpt.storage.catalog import SessionFolder, find_sessions, node_token

__all__ = ["explain"]

_SHORT = {
    "damaged": "its header is damaged",
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
    them whole.
    """
    with one_line_errors():
        nodes = _gather(directories or [store_or_default(None)])
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


class _Found:
    """What one node has of one session."""

    def __init__(self) -> None:
        self.records: list[ShardRecord] = []
        self.bad: list[str] = []

    def add(self, session: SessionFolder) -> None:
        shards, uncounted = session.shards()
        self.records += [shard.record for shard in shards]
        self.bad += [f"{file.path.name}: {_SHORT[file.fault]}" for file in uncounted]
        self.bad += [
            f"{file.path.name}: {why_set_aside(file.path)}"
            for file in session.leftovers()
            if file.kind == "corrupt"
        ]


def _gather(directories: list[Path]) -> dict[str, dict[str, _Found]]:
    """What each node has, by session; two directories of one node are one."""
    nodes: dict[str, dict[str, _Found]] = {}
    labels: dict[str, str] = {}
    for directory in dict.fromkeys(directories):
        sessions = find_sessions(directory)
        token = node_token(directory) or str(directory)
        label = labels.setdefault(token, str(directory))
        if label != str(directory):
            typer.echo(f"localckpt: {directory} is of the same node as {label}", err=True)
        found = nodes.setdefault(label, {})
        for session in sessions:
            found.setdefault(session.session_id, _Found()).add(session)
    return nodes


def _explain(
    session: str, nodes: dict[str, dict[str, _Found]], world_size: int | None
) -> Explanation:
    nothing = _Found()
    found = {label: sessions.get(session, nothing) for label, sessions in nodes.items()}
    return explain_holdings(
        {label: of_node.records for label, of_node in found.items()},
        world_size,
        {label: of_node.bad for label, of_node in found.items()},
    )
