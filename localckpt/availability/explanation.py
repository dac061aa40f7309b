"""Explanation of a restart's choice: the pieces of a session on each node, and the reasons.

Pure functions of an inventory; ``coverage.py`` alone decides which checkpoints are complete. The
second half of this module puts an explanation, and the errors of a load, into words.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from localckpt.availability.coverage import (
    complete_checkpoints,
    describe_incomplete,
    judge_newest,
    judge_nodes,
    newest_first,
)
from localckpt.availability.inventory import Inventory
from localckpt.availability.recoverable import breaking_sets, computable
from localckpt.availability.retention import metrics_to_json
from localckpt.errors import MismatchError
from localckpt.failure_texts import ranges
from localckpt.ids import MOST_DIGITS, MOST_RANKS, Checkpoint, Generation, ShardIdentity
from localckpt.storage.names import shard_named
from localckpt.storage.store import Stored
from localckpt.trust import Choice, Trust, Trusts, choose, resumed_in_vain

_WIDTH = 100
_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Lack:
    """Shards that a checkpoint lacks, all for one reason."""

    ranks: tuple[int, ...]
    why: str
    nodes: tuple[str, ...] = ()
    """Nodes on which what is no good lies."""


@dataclass(frozen=True, slots=True)
class ExplainedCheckpoint:
    """One checkpoint of which at least one shard is left, or a file that bears a shard's name.

    Attributes:
        holders: For each rank, the nodes that hold its shard.
        damaged: For each rank, the nodes with a file that bears the shard's name and is no good.
        computed: Ranks whose shards no node holds and that are computed, each with the kind of the
            pieces that they are computed from.
        is_by_name: Whether no header tells of it any more, only the names of its files. Its number
            of ranks is that of the same attempt's other checkpoints; without any, there may be more
            ranks than the names tell of.
        passed_over: Why a restart does not take it, complete or not; empty if it may.
    """

    checkpoint: Checkpoint
    holders: tuple[tuple[str, ...], ...]
    damaged: tuple[tuple[str, ...], ...]
    is_complete: bool
    lacks: tuple[Lack, ...]
    is_by_name: bool = False
    computed: Mapping[int, str] = field(default_factory=dict)
    trust: Trust = Trust()  # noqa: RUF009 - a frozen value
    passed_over: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            **_checkpoint_json(self.checkpoint),
            "complete": self.is_complete,
            "holders": [list(nodes) for nodes in self.holders],
            "damaged": [list(nodes) for nodes in self.damaged],
            "lacks": [
                {"ranks": [*lack.ranks], "why": lack.why, "nodes": [*lack.nodes]}
                for lack in self.lacks
            ],
            "by_name": self.is_by_name,
            "computed": sorted(self.computed),
            "resumed": self.trust.failed_starts,
            "mark": self.trust.mark,
            "mark_why": self.trust.why,
            "passed_over": self.passed_over,
            "metrics": metrics_to_json(dict([self.trust.metric] if self.trust.metric else [])),
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
        drained: Checkpoints that were drained to shared storage.
        least_nodes: Number of nodes on which ``newest`` at least is, with no more of its pieces
            than it needs: a restart on fewer nodes does not have it.
        reshards: Whether it is loaded by another number of ranks than have saved it.
    """

    nodes: tuple[str, ...]
    checkpoints: tuple[ExplainedCheckpoint, ...]
    newest: Checkpoint | None
    refusal: str | None
    breaking: tuple[tuple[str, ...], ...]
    bad: Mapping[str, tuple[Stored, ...]]
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
        for node, files in self.bad.items():
            lines += [f"Not counted, on {keys[node]}: {file}" for file in files]
        return "\n".join(lines)


def _checkpoint_json(checkpoint: Checkpoint) -> dict[str, int]:
    epoch, sequence = checkpoint.generation
    return {
        "iteration": checkpoint.iteration,
        "epoch": epoch,
        "sequence": sequence,
        "world_size": checkpoint.world_size,
    }


def explain(
    inventory: Inventory,
    world_size: int | None = None,
    bad: Mapping[str, Sequence[Stored]] | None = None,
    *,
    max_attempts: int | None = None,
    is_elastic: bool = False,
) -> Explanation:
    """Say which checkpoint a restart of ``world_size`` ranks would load, and why no newer one."""
    bad = bad or {}
    nodes = tuple(dict.fromkeys([*inventory.ranks_on, *bad]))
    complete = complete_checkpoints(inventory)
    choice = choose(complete, inventory.trusts, max_attempts)
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
        _standing(checkpoint, held, damaged, checkpoint in complete, inventory, choice)
        for checkpoint in newest_first([*held, *_by_name(damaged, held)], inventory.lineages)
    ]
    return Explanation(
        nodes,
        tuple(standings),
        newest,
        refusal,
        breaking,
        {node: tuple(files) for node, files in bad.items() if files},
        tuple(s.checkpoint for s in standings if s.trust.is_drained),
        least_nodes=least_nodes,
        reshards=newest is not None and world_size not in (None, newest.world_size),
    )


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
    inventory: Inventory,
    choice: Choice,
) -> ExplainedCheckpoint:
    computed = {rank: of.kind for rank, of in computable(checkpoint, inventory).items()}
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
    return ExplainedCheckpoint(
        checkpoint,
        tuple(holders),
        tuple(tuple(dict.fromkeys(node for node, _ in copies)) for copies in bad),
        is_complete,
        tuple(Lack(tuple(on), why, nodes) for (why, nodes), on in lacks.items()),
        checkpoint not in held,
        computed,
        inventory.trusts[checkpoint],
        _why_passed_over(checkpoint, choice, inventory.trusts),
    )


def _why_passed_over(checkpoint: Checkpoint, choice: Choice, trusts: Trusts) -> str:
    why = {**choice.quarantined, **choice.exhausted}
    if checkpoint in why:
        return why[checkpoint]
    # The number of ranks of one that only names tell of is not known.
    of, marked = (checkpoint.iteration, checkpoint.generation), trusts.marked("quarantined")
    return next((why for c, why in marked.items() if (c.iteration, c.generation) == of), "")


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
    in_order = sorted(numbers, key=lambda numbers: (len(numbers), numbers))
    return tuple(tuple(nodes[number] for number in lost) for lost in in_order)


def _least_nodes(breaking: Sequence[Sequence[str]]) -> int:
    """Number of nodes that a checkpoint surely needs: one of each of some disjoint sets."""
    needed = 0
    used: set[str] = set()
    for lost in breaking:
        if used.isdisjoint(lost):
            used.update(lost)
            needed += 1
    return needed


def _matrix(standings: Sequence[ExplainedCheckpoint], keys: Mapping[str, str]) -> list[list[str]]:
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


def _cell(standing: ExplainedCheckpoint, rank: int, keys: Mapping[str, str]) -> str:
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
        trust, iteration = standing.trust, standing.checkpoint.iteration
        if trust.failed_starts and not standing.passed_over:
            lines.append(f"Of iteration {iteration}: {resumed_in_vain(trust.failed_starts)}.")
        if trust.mark and not standing.passed_over:
            why = f": {trust.why}" if trust.why else ""
            lines.append(f"Iteration {iteration} is marked {trust.mark}{why}.")
        if trust.metric is not None:
            name, value = trust.metric
            lines.append(
                f"Iteration {iteration} was saved with {name} {value:g}, by which the job keeps "
                f"the best."
            )
    return lines


def _losses(explanation: Explanation, keys: Mapping[str, str]) -> list[str]:
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


class BadCopy(NamedTuple):
    shard: ShardIdentity
    holder: int
    """A rank on the node of the copy."""
    why: str


def why_nothing_loads(
    inventory: Inventory,
    explanation: Explanation,
    unreadable: Sequence[BadCopy],
    nodes: Sequence[str],
) -> str:
    """Return the error text that nothing can be loaded; ``nodes`` are names by rank."""
    bad = [f"{node}: {file}" for node, files in explanation.bad.items() for file in files]
    quarantined = {
        (node, shard_named(file.name)) for node, files in explanation.bad.items() for file in files
    }
    bad += [
        f"{nodes[holder]}: {shard}: {why}"
        for shard, holder, why in unreadable
        if (nodes[holder], (shard.iteration, shard.rank, shard.generation)) not in quarantined
    ]
    return (
        f"there is no complete checkpoint to load: {describe_incomplete(inventory)}. Looked for on "
        f"{', '.join(explanation.nodes)}."
        + (f" Copies that are no good: {'; '.join(bad)}." if bad else "")
        + " Start from the beginning, or from a checkpoint on shared storage"
    )


def why_given_up(left: Mapping[Checkpoint, str], quarantined: Mapping[Checkpoint, str]) -> str:
    """Return the error text that all checkpoints were resumed from in vain too often."""
    told = [f"iteration {c.iteration}: {why}, and it is kept" for c, why in left.items()]
    told += [
        f"iteration {c.iteration}: {why}, and it is in quarantine" for c, why in quarantined.items()
    ]
    again = (
        " Once the cause is gone, start with max_attempts=None to resume from the one that is kept."
        if left
        else ""
    )
    return (
        f"no checkpoint on the nodes is left to resume from, and nothing was started over. "
        f"{'; '.join(told)}. That several checkpoints fail alike speaks for the program or its "
        f"data.{again} `localckpt clean --put-back` puts back what is in quarantine; with another "
        f"session_id the job starts from the beginning"
    )


def why_not_that(iteration: int, others: Sequence[int], unreadable: Sequence[BadCopy]) -> str:
    bad = [f"{shard}, from the node of rank {holder}: {why}" for shard, holder, why in unreadable]
    return (
        f"iteration {iteration} is not complete on the nodes, and nothing else was loaded."
        + (f" Copies that are no good: {'; '.join(bad)}." if bad else "")
        + f" Complete are: {', '.join(map(str, others)) or 'none'}. The command localckpt explain "
        f"says what is missing"
    )
