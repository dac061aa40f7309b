"""Finds why a restart loads the checkpoint that it loads: a pure function of who holds what.

What makes a checkpoint complete is said in ``coverage.py`` alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from localckpt.availability.coverage import complete_checkpoints, judge_newest, judge_nodes
from localckpt.availability.explanation import Explanation, Lack, Standing
from localckpt.availability.inventory import Inventory
from localckpt.availability.lineage_tree import branches
from localckpt.availability.ordering import newest_first
from localckpt.availability.recoverable import breaking_sets, computable
from localckpt.errors import MismatchError
from localckpt.ids import MOST_DIGITS, MOST_RANKS, Checkpoint, Generation
from localckpt.storage.names import shard_named
from localckpt.storage.store import Stored
from localckpt.trust import Choice, Trust, choose

__all__ = ["explain"]


def explain(
    inventory: Inventory,
    world_size: int | None = None,
    bad: Mapping[str, Sequence[Stored]] | None = None,
    *,
    max_attempts: int | None = None,
    is_elastic: bool = False,
) -> Explanation:
    """Say which checkpoint a restart would load, and why none that is newer.

    Args:
        inventory: What each node holds of one session, by the nodes' names for people.
        world_size: With how many ranks the restart would be; ``None`` for as many as saved it.
        bad: Files of each node that cannot be counted, each told of with the shard that its name
            speaks of.
        max_attempts: As for :func:`localckpt.trust.choose`.
        is_elastic: Whether the restart loads what another number of ranks saved.
    """
    bad = bad or {}
    nodes = tuple(dict.fromkeys([*inventory.ranks_on, *bad]))
    complete = complete_checkpoints(inventory)
    choice = choose(complete, inventory.trust, max_attempts)
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
            measured=inventory.trust.measured.get(checkpoint),
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
