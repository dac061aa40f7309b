"""Explanation of a restart's choice: the pieces of a session on each node, and the reasons.

``explain.py`` finds them, ``explanation_text.py`` puts them into words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from localckpt.availability.explanation_text import text_of
from localckpt.availability.lineage_tree import Branch
from localckpt.availability.retention import metrics_to_json
from localckpt.ids import Checkpoint
from localckpt.storage.store import Stored
from localckpt.trust import Mark, Measured

__all__ = ["Explanation", "Lack", "Standing"]


@dataclass(frozen=True, slots=True)
class Lack:
    """Shards that a checkpoint lacks, all for one reason."""

    ranks: tuple[int, ...]
    why: str
    nodes: tuple[str, ...] = ()
    """Nodes on which what is no good lies."""

    def to_json(self) -> dict[str, Any]:
        return {"ranks": list(self.ranks), "why": self.why, "nodes": list(self.nodes)}


@dataclass(frozen=True, slots=True)
class Standing:
    """One checkpoint of which at least one shard is left, or a file that bears a shard's name.

    Attributes:
        checkpoint: Which one.
        holders: For each rank, the nodes that hold its shard.
        damaged: For each rank, the nodes with a file that bears the shard's name and is no good.
        is_complete: Whether every shard can be had.
        lacks: Why not.
        computed: Ranks whose shards no node holds and that are computed, each with the kind of the
            pieces that they are computed from.
        is_by_name: Whether no header tells of it any more, only the names of its files. Its number
            of ranks is that of the same attempt's other checkpoints; without any, there may be more
            ranks than the names tell of.
        resumed: Number of starts of the job that resumed from it and made no progress.
        mark: Its mark, ``None`` for none.
        measured: Its metric, by which the job keeps the best, ``None`` for none.
        passed_over: Why a restart does not take it, complete or not, by what is known of it beside
            its shards; empty if it may.
    """

    checkpoint: Checkpoint
    holders: tuple[tuple[str, ...], ...]
    damaged: tuple[tuple[str, ...], ...]
    is_complete: bool
    lacks: tuple[Lack, ...]
    is_by_name: bool = False
    computed: Mapping[int, str] = field(default_factory=dict)
    resumed: int = 0
    mark: Mark | None = None
    passed_over: str = ""
    measured: Measured | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            **_checkpoint_json(self.checkpoint),
            "complete": self.is_complete,
            "holders": [list(nodes) for nodes in self.holders],
            "damaged": [list(nodes) for nodes in self.damaged],
            "lacks": [lack.to_json() for lack in self.lacks],
            "by_name": self.is_by_name,
            "computed": sorted(self.computed),
            "resumed": self.resumed,
            "mark": self.mark and self.mark.kind,
            "mark_why": self.mark.why if self.mark else "",
            "passed_over": self.passed_over,
            "metrics": metrics_to_json(
                {self.measured.metric: self.measured.value} if self.measured else {}
            ),
        }


@dataclass(frozen=True, slots=True)
class Explanation:
    """Pieces that all nodes have, and what a restart makes of them. ``str()`` is for people.

    Attributes:
        nodes: The nodes that were asked.
        checkpoints: What is left, be it damaged, the newest first.
        newest: The newest complete checkpoint that is not passed over.
        refusal: Why a restart raises an error instead of loading it.
        breaking: The smallest sets of nodes with which ``newest`` would be lost: every set of nodes
            that breaks it contains one of them, and none contains another.
        bad: What each node has that is not counted.
        lineages: Which epoch resumed from which; each stands behind the one that it comes from.
        drained: Checkpoints that were drained to shared storage.
        least_nodes: Number of nodes on which ``newest`` at least is, with no more of its pieces
            than it needs: a restart on fewer nodes does not have it.
        reshards: Whether it is loaded by another number of ranks than have saved it.
    """

    nodes: tuple[str, ...]
    checkpoints: tuple[Standing, ...]
    newest: Checkpoint | None
    refusal: str | None
    breaking: tuple[tuple[str, ...], ...]
    bad: Mapping[str, tuple[Stored, ...]]
    lineages: tuple[Branch, ...] = ()
    drained: tuple[Checkpoint, ...] = ()
    least_nodes: int = 0
    reshards: bool = False

    @property
    def loads(self) -> Checkpoint | None:
        """Checkpoint that a restart loads."""
        return self.newest if self.refusal is None else None

    @property
    def survives_any(self) -> int:
        """Number of nodes that may be lost, whichever they are, without losing ``newest``."""
        return min(map(len, self.breaking), default=1) - 1

    @property
    def may_be_lost_alone(self) -> tuple[str, ...]:
        """Nodes that ``newest`` does not need as long as all others are there."""
        if self.newest is None:
            return ()
        needed = set(self.breaking)
        return tuple(node for node in self.nodes if (node,) not in needed)

    def to_json(self) -> dict[str, Any]:
        """Plain data; keys are only ever added."""
        return {
            "nodes": list(self.nodes),
            "loads": None if self.loads is None else _checkpoint_json(self.loads),
            "newest_complete": None if self.newest is None else _checkpoint_json(self.newest),
            "refusal": self.refusal,
            "checkpoints": [standing.to_json() for standing in self.checkpoints],
            "survives_any": self.survives_any,
            "may_be_lost_alone": list(self.may_be_lost_alone),
            "breaking": [list(nodes) for nodes in self.breaking],
            "bad": {node: list(map(str, files)) for node, files in self.bad.items()},
            "lineages": [branch.to_json() for branch in self.lineages],
            "drained": [_checkpoint_json(checkpoint) for checkpoint in self.drained],
            "least_nodes": self.least_nodes,
            "reshards": self.reshards,
        }

    def __str__(self) -> str:
        return text_of(self)


def _checkpoint_json(checkpoint: Checkpoint) -> dict[str, int]:
    epoch, sequence = checkpoint.generation
    return {
        "iteration": checkpoint.iteration,
        "epoch": epoch,
        "sequence": sequence,
        "world_size": checkpoint.world_size,
    }
