"""Why a restart loads the checkpoint that it loads, for people: a pure function of who holds what.

What makes a checkpoint complete is said in ``coverage.py`` alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from localckpt.availability.coverage import complete_checkpoints, judge_newest, judge_nodes
from localckpt.availability.inventory import Inventory
from localckpt.availability.lineage_tree import Branch, branches, tree
from localckpt.availability.ordering import newest_first
from localckpt.availability.recoverable import breaking_sets, computable
from localckpt.errors import MismatchError
from localckpt.ids import (
    MOST_DIGITS,
    MOST_RANKS,
    Checkpoint,
    Generation,
)
from localckpt.storage.names import shard_named
from localckpt.storage.store import Stored
from localckpt.trust import Choice, Mark, Trust, choose, resumed_in_vain

__all__ = ["Explanation", "Lack", "Standing", "explain", "ranges"]

_WIDTH = 100
_SHOWN = 12


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
        keys = {node: _key(number) for number, node in enumerate(self.nodes)}
        lines = [f"{key:3} {node}" for node, key in keys.items()]
        for block in _matrix(self.checkpoints, keys):
            lines += ["", *block]
        lines += ["", *_verdict(self), *_rejections(self, keys), *_losses(self, keys)]
        if self.drained:
            drained = ranges(checkpoint.iteration for checkpoint in self.drained)
            lines.append(f"Drained to shared storage, too: {drained}")
        # Earlier versions told nothing of their epochs.
        known = any(branch.origin is not None for branch in self.lineages)
        if known and sum(bool(branch.iterations) for branch in self.lineages) > 1:
            lines += ["Lineages:", *tree(self.lineages)]
        for node, files in self.bad.items():
            lines += [f"Not counted, on {keys[node]}: {file}" for file in files]
        return "\n".join(lines)


def explain(
    inventory: Inventory,
    world_size: int | None = None,
    bad: Mapping[str, Sequence[Stored]] | None = None,
    *,
    max_attempts: int | None = None,
    current: Checkpoint | None = None,
    is_elastic: bool = False,
) -> Explanation:
    """Say which checkpoint a restart would load, and why none that is newer.

    Args:
        inventory: What each node holds of one session, by the nodes' names for people.
        world_size: With how many ranks the restart would be; ``None`` for as many as saved it.
        bad: Files of each node that cannot be counted, each told of with the shard that its name
            speaks of.
        max_attempts, current: As for :func:`localckpt.trust.choose`.
        is_elastic: Whether the restart loads what another number of ranks saved.
    """
    bad = bad or {}
    nodes = tuple(dict.fromkeys([*inventory.ranks_on, *bad]))
    complete = complete_checkpoints(inventory)
    choice = choose(complete, inventory.trust, max_attempts, current)
    newest = choice.usable[0] if choice.usable else None
    breaking = _breaking(newest, inventory, nodes) if newest else ()
    least_nodes = _least_nodes(breaking)
    refusal = None
    if world_size is not None and newest is not None:
        try:
            judge_newest(choice.usable, world_size, is_elastic=is_elastic)
            judge_nodes(newest, world_size, least_nodes)
        except MismatchError as error:
            refusal = str(error)
    held = {checkpoint: inventory.holders(checkpoint) for checkpoint in inventory.checkpoints}
    damaged = _damaged(bad)
    standings = [
        replace(
            _standing(
                checkpoint, held, damaged, checkpoint in complete, computable(checkpoint, inventory)
            ),
            resumed=inventory.trust.count(checkpoint),
            mark=inventory.trust.marks.get(checkpoint),
            passed_over=_why_passed_over(checkpoint, choice, inventory.trust),
        )
        for checkpoint in newest_first([*held, *_by_name(damaged, held)], inventory.lineages)
    ]
    return Explanation(
        nodes,
        tuple(standings),
        newest,
        refusal,
        breaking,
        {node: tuple(files) for node, files in bad.items() if files},
        branches((standing.checkpoint for standing in standings), inventory.lineages),
        tuple(s.checkpoint for s in standings if s.checkpoint in inventory.trust.drained),
        least_nodes=least_nodes,
        reshards=newest is not None and world_size not in (None, newest.world_size),
    )


def ranges(numbers: Iterable[int]) -> str:
    """Numbers for people: ``0-3,6``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else f"{r[0]}" for r in runs)


_Held = Mapping[Checkpoint, Mapping[int, Sequence[str]]]
"""Nodes, by checkpoint and rank."""
_Damaged = Mapping[tuple[int, int, Generation], Sequence[tuple[str, str]]]
"""(node, what is wrong), by iteration, rank and generation."""


def _damaged(bad: Mapping[str, Sequence[Stored]]) -> _Damaged:
    damaged: dict[tuple[int, int, Generation], list[tuple[str, str]]] = {}
    for node, files in bad.items():
        for file in files:
            # The name alone says what a file was: what the header claims may be damaged, too.
            if file.problem is not None and (shard := shard_named(file.name)) is not None:
                damaged.setdefault(shard, []).append((node, file.problem.text))
    return damaged


def _by_name(damaged: _Damaged, held: Collection[Checkpoint]) -> list[Checkpoint]:
    """Checkpoints that have damaged files and no others."""
    known = {(checkpoint.iteration, checkpoint.generation) for checkpoint in held}
    # The number of ranks is the same for all that a job saves between two starts.
    world_sizes = {checkpoint.generation.epoch_id: checkpoint.world_size for checkpoint in held}
    ranks: dict[tuple[int, Generation], int] = {}
    for iteration, rank, generation in damaged:
        what = iteration, generation
        most = world_sizes.get(generation.epoch_id, MOST_RANKS)
        # No header has longer numbers: no name that has them was given by a store.
        if what not in known and rank < most and max(iteration, *generation) < 10**MOST_DIGITS:
            ranks[what] = max(ranks.get(what, 0), rank + 1)
    return [
        Checkpoint(generation, iteration, world_sizes.get(generation.epoch_id, least))
        for (iteration, generation), least in ranks.items()
    ]


def _standing(
    checkpoint: Checkpoint,
    held: _Held,
    damaged: _Damaged,
    is_complete: bool,
    computed: Mapping[int, str],
) -> Standing:
    ranks = range(checkpoint.world_size)
    of_ranks = held.get(checkpoint, {})
    holders = [tuple(of_ranks.get(rank, ())) for rank in ranks]
    bad = [damaged.get((checkpoint.iteration, r, checkpoint.generation), ()) for r in ranks]
    lacks: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    if not is_complete:
        others = [
            (other, shards)
            for other, shards in held.items()
            if other.iteration == checkpoint.iteration and other != checkpoint
        ]
        for rank in ranks:
            if not holders[rank] and rank not in computed:
                reason = _reason(bad[rank], [(o, s[rank]) for o, s in others if rank in s])
                lacks.setdefault(reason, []).append(rank)
    return Standing(
        checkpoint,
        tuple(holders),
        tuple(tuple(dict.fromkeys(node for node, _ in copies)) for copies in bad),
        is_complete,
        tuple(Lack(tuple(on), why, nodes) for (why, nodes), on in lacks.items()),
        checkpoint not in held,
        computed,
    )


def _why_passed_over(checkpoint: Checkpoint, choice: Choice, trust: Trust) -> str:
    why = {**choice.quarantined, **choice.exhausted}
    if checkpoint in why:
        return why[checkpoint]
    # The number of ranks of one that only names tell of is not known.
    of = checkpoint.iteration, checkpoint.generation
    marked = trust.marked("quarantined").values()
    return next(
        (m.why for m in marked if (m.checkpoint.iteration, m.checkpoint.generation) == of), ""
    )


def _reason(
    damaged: Sequence[tuple[str, str]], others: Sequence[tuple[Checkpoint, Sequence[str]]]
) -> tuple[str, tuple[str, ...]]:
    """Why a shard cannot be had, and the nodes with what is there in its place."""
    if damaged:
        copies = "1 copy" if len(damaged) == 1 else f"{len(damaged)} copies"
        why = "; ".join(dict.fromkeys(text for _, text in damaged))
        return f"{copies}, {why}", tuple(dict.fromkeys(node for node, _ in damaged))
    if others:
        generations = ", ".join(sorted({str(other.generation) for other, _ in others}))
        nodes = tuple(dict.fromkeys(node for _, on in others for node in on))
        return f"only of another attempt, generation {generations}", nodes
    return "on no node", ()


def _breaking(
    checkpoint: Checkpoint, inventory: Inventory, nodes: Sequence[str]
) -> tuple[tuple[str, ...], ...]:
    """A checkpoint is lost exactly when some rank's shard is."""
    place = {node: number for number, node in enumerate(nodes)}
    numbers = (sorted(place[n] for n in lost) for lost in breaking_sets(checkpoint, inventory))
    return tuple(
        tuple(nodes[number] for number in lost)
        for lost in sorted(numbers, key=lambda numbers: (len(numbers), numbers))
    )


def _least_nodes(breaking: Sequence[Sequence[str]]) -> int:
    """Number of nodes that a checkpoint surely needs: one of each of some disjoint sets."""
    needed = 0
    used: set[str] = set()
    for lost in breaking:
        if used.isdisjoint(lost):
            used.update(lost)
            needed += 1
    return needed


def _matrix(standings: Sequence[Standing], keys: Mapping[str, str]) -> list[list[str]]:
    """Lines of a table, in blocks that fit on a page. Ranks that do not differ share a column."""
    if not standings:
        return []
    ranks = range(max(len(s.holders) for s in standings))
    cells = [[_cell(s, rank, keys) for s in standings] for rank in ranks]
    left = [
        _padded(["iteration", *(str(s.checkpoint.iteration) for s in standings)]),
        _padded(["generation", *(str(s.checkpoint.generation) for s in standings)]),
        _padded(["complete", *("yes" if s.is_complete else "no" for s in standings)]),
    ]
    columns = [
        _padded([f"rank {ranges(numbers)}", *column])
        for column, numbers in groupby(ranks, key=lambda rank: cells[rank])
    ]
    blocks: list[list[list[str]]] = []
    for column in columns:
        if not blocks or sum(len(c[0]) + 2 for c in [*blocks[-1], column]) > _WIDTH:
            blocks.append([*left])
        blocks[-1].append(column)
    return [["  ".join(row).rstrip() for row in zip(*b, strict=True)] for b in blocks]


def _cell(standing: Standing, rank: int, keys: Mapping[str, str]) -> str:
    if rank >= len(standing.holders):
        return ""
    bad = [f"{keys[n]}!" for n in standing.damaged[rank] if n not in standing.holders[rank]]
    kinds = [standing.computed[rank]] if rank in standing.computed else []
    return "+".join([*(keys[node] for node in standing.holders[rank]), *bad, *kinds]) or "none"


def _padded(column: Sequence[str]) -> list[str]:
    width = max(map(len, column))
    return [cell.ljust(width) for cell in column]


def _verdict(explanation: Explanation) -> list[str]:
    if explanation.refusal is not None:
        return [f"A restart is refused: {explanation.refusal}"]
    if explanation.newest is None:
        what = "no checkpoint is complete" if explanation.checkpoints else "no node holds a shard"
        if any(standing.passed_over for standing in explanation.checkpoints):
            what = "what was complete was given up"
        return [f"A restart finds nothing to load: {what}."]
    loads = f"A restart loads {_named(explanation.newest)}."
    if not explanation.reshards:
        return [loads]
    least = explanation.least_nodes
    return [
        f"{loads} Of another number of ranks, it takes load(into=) of a manager with elastic=True, "
        f"or a Checkpointer. Nodes without a rank of the job are not read: it needs "
        + (f"{least} nodes at least." if least > 1 else "a node with its shards at least.")
    ]


def _rejections(explanation: Explanation, keys: Mapping[str, str]) -> list[str]:
    """Why checkpoints that look newer are not loaded."""
    lines = []
    newest = explanation.newest
    is_newer = True
    for standing in explanation.checkpoints:
        what = _named(standing.checkpoint, standing.is_by_name).capitalize()
        is_newer = is_newer and standing.checkpoint != newest
        if is_newer and standing.passed_over:
            lines.append(f"{what} is passed over: {standing.passed_over}.")
        elif is_newer and standing.is_complete:
            lines.append(f"{what} is newer, and would be taken only if there were no other.")
        elif is_newer:
            lines.append(f"{what} {'is newer, and ' if newest else ''}lacks:")
            lines += [
                f"  rank{'s'[: len(lack.ranks) > 1]} {ranges(lack.ranks)}: {lack.why}"
                + (f" ({_joined(lack.nodes, keys)})" if lack.nodes else "")
                for lack in standing.lacks
            ]
        elif newest is not None and standing.checkpoint.iteration > newest.iteration:
            lines.append(
                f"{what} is of an earlier attempt: the job went back, and saved iteration "
                f"{newest.iteration} later."
            )
        if standing.resumed and not standing.passed_over:
            why = resumed_in_vain(standing.resumed)
            lines.append(f"Of iteration {standing.checkpoint.iteration}: {why}.")
        if standing.mark and not standing.passed_over:
            told = f": {standing.mark.why}" if standing.mark.why else ""
            iteration = standing.checkpoint.iteration
            lines.append(f"Iteration {iteration} is marked {standing.mark.kind}{told}.")
    return lines


def _losses(explanation: Explanation, keys: Mapping[str, str]) -> list[str]:
    """Nodes that may be lost before the newest complete checkpoint is."""
    if explanation.newest is None:
        return []
    most, alone = explanation.survives_any, explanation.may_be_lost_alone
    if most:
        survived = "any one node" if most == 1 else f"any {most} nodes"
    elif alone:
        survived = f"one node only if it is {' or '.join(keys[node] for node in alone)}"
    else:
        survived = "no node"
    shown = [_joined(nodes, keys) for nodes in explanation.breaking[:_SHOWN]]
    more = len(explanation.breaking) - len(shown)
    return [
        f"Iteration {explanation.newest.iteration} survives the loss of {survived}. "
        f"It is lost together with {', or '.join(shown)}" + (f", or {more} more." if more else ".")
    ]


def _named(checkpoint: Checkpoint, is_by_name: bool = False) -> str:
    ranks = f"{checkpoint.world_size} rank{'s'[: checkpoint.world_size != 1]}"
    source = "by the names of its files" if is_by_name else ranks
    return f"iteration {checkpoint.iteration} (generation {checkpoint.generation}, {source})"


def _joined(nodes: Iterable[str], keys: Mapping[str, str]) -> str:
    return "+".join(keys[node] for node in nodes)


def _key(number: int) -> str:
    """A, B, ..., Z, AA, AB, ..."""
    before, letter = divmod(number, 26)
    return (_key(before - 1) if before else "") + chr(ord("A") + letter)


def _checkpoint_json(checkpoint: Checkpoint) -> dict[str, int]:
    epoch, sequence = checkpoint.generation
    return {
        "iteration": checkpoint.iteration,
        "epoch": epoch,
        "sequence": sequence,
        "world_size": checkpoint.world_size,
    }
