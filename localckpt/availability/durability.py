"""Durability of each checkpoint: its level, and the number of nodes that hold each shard.

Pure functions of the ranks' reports when a save is finalized, and of the nodes' inventory, of which
the root sends every rank a summary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from localckpt.availability.coverage import (
    SaveOutcome,
    Standing,
    complete_checkpoints,
    describe_incomplete,
    division_problem,
    save_problems,
    why_bad,
)
from localckpt.availability.divergence import Divergence, compare_replicas
from localckpt.availability.inventory import Inventory
from localckpt.availability.plain import Record
from localckpt.availability.prefetch import Prefetch, plan_prefetches
from localckpt.availability.recoverable import least_losses
from localckpt.ids import Checkpoint, Generation, Group
from localckpt.lineage import Lineage
from localckpt.trust import Trusts, choose

Level = Literal["captured", "incomplete", "local", "replicated", "drained"]


@dataclass(frozen=True, slots=True)
class Durability:
    """Durability of one checkpoint.

    Attributes:
        level: ``"captured"`` in memory of its ranks, ``"local"`` once every rank's shard is kept on
            a node, ``"replicated"`` once every shard is on two nodes or more, ``"drained"`` once
            the job has promoted it to shared storage. ``"incomplete"`` if some shard has been lost
            on all nodes since.
        copies: Smallest number of copies of any shard on different nodes, the owner's included; 0
            while captured. A shard that can be computed after the loss of any m nodes counts as
            m + 1 copies.
        lacking: Number of shards with fewer copies than their target.
    """

    iteration: int
    level: Level
    copies: int
    wanted: int
    lacking: int = 0

    @property
    def survives_node_loss(self) -> bool:
        """True if the nodes still have the checkpoint after the loss of any one of them."""
        return self.level == "replicated" or (self.level == "drained" and self.copies > 1)

    @property
    def reached(self) -> str:
        """Text of the level, and of the copies and their target unless the target is one."""
        alone = not self.survives_node_loss and self.wanted < 2
        return self.level if alone else f"{self.level}, {self.copies} of {self.wanted}"

    def __str__(self) -> str:
        lacking = f": {self.lacking} shards lack copies" if self.lacking else ""
        return f"iteration {self.iteration} is {self.reached}{lacking}"


@dataclass(frozen=True, slots=True)
class SaveVerdict(Record):
    """Outcome of a save on all ranks; complete if there are no ``problems``.

    ``generation`` is the highest that any rank has used; ``is_mismatched`` if some saved alone.
    """

    problems: tuple[str, ...]
    generation: Generation
    reached: Durability | None = None
    bad: str | None = None
    divergence: Divergence | None = None
    parts_fit: bool = True
    is_mismatched: bool = False
    metric: float | None = None
    lacking: tuple[Checkpoint, ...] = ()
    found: tuple[Standing, ...] = ()
    prefetches: tuple[Prefetch, ...] = ()


def judge_save(reports: Sequence[Any]) -> list[Any]:
    """Return the verdict on a save from its outcomes on all ranks, both in JSON."""
    outcomes = [SaveOutcome.from_json(fields) for fields in reports]
    problems = tuple(save_problems(outcomes))
    reached = None if problems else durability_saved(outcomes[0].iteration, outcomes)
    generation = max(outcome.generation for outcome in outcomes)
    iterations = {outcome.iteration for outcome in outcomes}
    is_mismatched = len({(outcome.iteration, outcome.generation) for outcome in outcomes}) > 1
    if is_mismatched:
        asked = f"save({min(iterations)})" if len(iterations) > 1 else "each save so far"
        problems = (f"{problems[0]} (was {asked} called on every rank?)",)
        # The rank that saved alone counts more saves than the others.
        generation = generation.beyond()
    divergence = compare_replicas([outcome.replicas for outcome in outcomes])
    first, bad, prefetches = outcomes[0], why_bad(outcomes), tuple[Prefetch, ...]()
    # What a restart would not take is not worth sending.
    if first.spares and not (problems or bad or divergence):
        sizes = [outcome.nbytes for outcome in outcomes]
        prefetches = plan_prefetches(first.spares, first.places, sizes)
    # A rank that could not capture its state has not told what it was to divide.
    fit = (
        any(outcome.error is not None for outcome in outcomes)
        or division_problem([outcome.divided for outcome in outcomes]) is None
    )
    return SaveVerdict(
        *(problems, generation, reached, bad, divergence),
        parts_fit=fit,
        is_mismatched=is_mismatched,
        metric=first.metric,
        lacking=tuple({c: None for outcome in outcomes for c in outcome.lacking}),
        found=_worst([standing for outcome in outcomes for standing in outcome.found]),
        prefetches=prefetches,
    ).to_json()


def _worst(found: Collection[Standing]) -> tuple[Standing, ...]:
    """Take of each checkpoint the worst that any rank has found, as one may know of less."""
    least_first = sorted(found, key=lambda standing: (standing.copies, -standing.lacking))
    worst: dict[Checkpoint, Standing] = {}
    for standing in least_first:
        worst.setdefault(standing.checkpoint, standing)
    return tuple(worst.values())


def durability_saved(iteration: int, outcomes: Sequence[SaveOutcome]) -> Durability:
    kept = Counter(owner for outcome in outcomes for owner in outcome.kept)
    pieces = Counter(outcome.group for outcome in outcomes if outcome.group is not None)
    for group, count in pieces.items():
        # Each missing piece uses up one of the losses that the group survives.
        tolerated = max(0, group.tolerated - (len(group.ranks) - count))
        kept.update(dict.fromkeys(group.ranks, tolerated))
    copies = [1 + kept[rank] for rank in range(len(outcomes))]
    return _judged(iteration, copies, [outcome.wanted for outcome in outcomes])


def durability_found(
    checkpoint: Checkpoint,
    inventory: Inventory,
    protection: Mapping[int, Group],
) -> Durability:
    """Compute the durability of a complete checkpoint, by the groups that are to protect it."""
    ranks = range(checkpoint.world_size)
    # A shard counts as many copies as nodes must be lost to lose it.
    held = least_losses(checkpoint, inventory)
    return _judged(
        checkpoint.iteration,
        [held[rank] for rank in ranks],
        [1 + (protection[rank].tolerated if rank in protection else 0) for rank in ranks],
    )


def _judged(iteration: int, copies: Sequence[int], wanted: Iterable[int]) -> Durability:
    pairs = list(zip(copies, wanted, strict=True))
    fewest, of = min(pairs, key=lambda pair: (pair[0], -pair[1]))
    return durability_at(iteration, fewest, of, sum(has < wants for has, wants in pairs))


def durability_at(iteration: int, copies: int, wanted: int, lacking: int) -> Durability:
    """Make the durability of a saved checkpoint, with the level that its copies give it."""
    level: Level = "replicated" if copies > 1 else "local" if copies else "incomplete"
    return Durability(iteration, level, copies, wanted, lacking)


@dataclass(frozen=True, slots=True)
class Found(Record):
    """Summary of the checkpoints on all nodes, for every rank, in the order of a restart.

    ``complete`` are those that a restart tries, in that order. ``incomplete`` says why none is.
    """

    complete: Mapping[Checkpoint, Durability]
    lineages: Sequence[Lineage]
    incomplete: str
    trusts: Trusts = field(default_factory=Trusts)
    quarantined: Mapping[Checkpoint, str] = field(default_factory=dict)
    exhausted: Mapping[Checkpoint, str] = field(default_factory=dict)

    @classmethod
    def among(
        cls,
        inventory: Inventory,
        protection: Mapping[int, Group],
        max_attempts: int | None = None,
    ) -> Found:
        """Find the complete checkpoints, and choose those that a restart may take."""
        complete = complete_checkpoints(inventory)
        choice = choose(complete, inventory.trusts, max_attempts)
        lacking = bool(inventory.checkpoints) and not complete
        return cls(
            {c: durability_found(c, inventory, protection) for c in choice.usable},
            [*inventory.lineages.values()],
            describe_incomplete(inventory) if lacking else "",
            inventory.trusts,
            choice.quarantined,
            choice.exhausted,
        )
