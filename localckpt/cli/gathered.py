"""What the stores of several nodes hold, read side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from localckpt.availability.explanation import Explanation
from localckpt.availability.explanation import explain as explain_inventory
from localckpt.availability.inventory import Inventory
from localckpt.lineage import Lineage
from localckpt.replication.schemes import SCHEMES
from localckpt.storage.catalog import SessionFolder, ShardFile, find_sessions, node_token
from localckpt.storage.store import Stored
from localckpt.trust import Trusts

_SHORT = {
    "other version": "it is of another version of the format",
    "other session": "it belongs to another session",
    "unreadable": "it cannot be read",
}


@dataclass(frozen=True, slots=True)
class Found:
    """Pieces of one session in one node, or in one of its directories."""

    shards: list[ShardFile]
    bad: list[Stored]
    noted: list[Lineage]
    trusts: Trusts


Nodes = dict[str, dict[str, list[Found]]]
"""Pieces of each node, by session, of one or more directories."""


def read_store(directory: Path) -> dict[str, Found]:
    """Read a node's store, by session; raises StorageError."""
    return {session.session_id: _read(session) for session in find_sessions(directory)}


def _read(session: SessionFolder) -> Found:
    shards, uncounted = session.shards()
    bad = [
        Stored(
            file.path.name,
            problem=replace(
                file.problem,
                text=_SHORT.get(file.problem.kind, file.problem.text),
                claim="",
            ),
        )
        for file in uncounted
    ]
    bad += [Stored(path.name, problem=problem) for path, problem in session.quarantined().items()]
    return Found(shards, bad, session.noted_lineages(), session.noted_trusts())


def gather(read: Mapping[Path, Mapping[str, Found]], warn: Callable[[str], None]) -> Nodes:
    """Put together what the directories of each node hold."""
    nodes: Nodes = {}
    labels: dict[str, str] = {}
    for directory, sessions in read.items():
        label = labels.setdefault(node_token(directory) or str(directory), str(directory))
        if label != str(directory):
            warn(f"{directory} is of the same node as {label}")
        of_node = nodes.setdefault(label, {})
        for session, found in sessions.items():
            of_node.setdefault(session, []).append(found)
    return nodes


def explain_session(
    session: str, nodes: Nodes, world_size: int | None
) -> tuple[Explanation, list[ShardFile]]:
    """Explain one session on the nodes; return also the files of its shards."""
    found = {label: sessions.get(session, []) for label, sessions in nodes.items()}
    every = [one for of_node in found.values() for one in of_node]
    trusts = Trusts.of(one.trusts for one in every)
    explanation = explain_inventory(
        Inventory.found(
            {label: [s.record for one in of for s in one.shards] for label, of in found.items()},
            [lineage for one in every for lineage in one.noted],
            SCHEMES,
            trusts,
        ),
        world_size,
        {label: [bad for one in of for bad in one.bad] for label, of in found.items()},
        max_attempts=trusts.most_starts,
        # Whether the job's manager was made with elastic=True is not in its store.
        is_elastic=True,
    )
    return explanation, [shard for one in every for shard in one.shards]
