"""Durability of each checkpoint: captured, kept on its own nodes, and on how many others.

Pure functions of what the ranks said when they finalized a save, and of what their nodes hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Literal

from localckpt.availability.coverage import SaveOutcome, save_problems
from localckpt.availability.inventory import Inventory
from localckpt.availability.recoverable import least_losses
from localckpt.ids import Checkpoint, Generation, Group

__all__ = [
    "Durability",
    "SaveVerdict",
    "durability_found",
    "durability_saved",
    "judge_save",
    "spared",
]

Level = Literal["captured", "local", "replicated"]


@dataclass(frozen=True, slots=True)
class Durability:
    """Durability of one iteration.

    Attributes:
        iteration: Its number.
        level: ``"captured"`` in memory of its ranks, ``"local"`` once every rank's shard is kept on
            a node, ``"replicated"`` once every shard is on two nodes or more.
        copies: On how many nodes each shard is at least, the owner's included; 0 while captured. A
            shard that can be computed after the loss of any m nodes counts as m + 1 copies.
        wanted: On how many each is to be.
        lacking: How many shards are on fewer nodes than wanted.
    """

    iteration: int
    level: Level
    copies: int
    wanted: int
    lacking: int = 0

    @property
    def survives_node_loss(self) -> bool:
        """True if any one node may be lost."""
        return self.level == "replicated"

    @property
    def reached(self) -> str:
        """The level, and on how many nodes of how many."""
        alone = self.level != "replicated" and self.wanted < 2
        return self.level if alone else f"{self.level}, {self.copies} of {self.wanted}"

    def __str__(self) -> str:
        lacking = f": {self.lacking} shards lack copies" if self.lacking else ""
        return f"iteration {self.iteration} is {self.reached}{lacking}"


@dataclass(frozen=True, slots=True)
class SaveVerdict:
    """Outcome of a save on all ranks.

    Attributes:
        problems: Why it is not complete; empty when it is.
        generation: The highest that any rank has used.
        reached: How far it has climbed; ``None`` when it is not complete.
    """

    problems: tuple[str, ...]
    generation: Generation
    reached: Durability | None = None

    def to_json(self) -> list[Any]:
        return [self.problems, self.generation, self.reached and astuple(self.reached)]

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> SaveVerdict:
        problems, generation, reached = fields
        durability = Durability(*reached) if reached else None
        return cls(tuple(problems), Generation(*generation), durability)


def judge_save(told: Sequence[Any]) -> list[Any]:
    """Judge a save by its outcomes on all ranks, and give the verdict, both in JSON."""
    outcomes = [SaveOutcome.from_json(fields) for fields in told]
    problems = tuple(save_problems(outcomes))
    reached = None if problems else durability_saved(outcomes[0].iteration, outcomes)
    return SaveVerdict(problems, max(o.generation for o in outcomes), reached).to_json()


def durability_saved(iteration: int, outcomes: Sequence[SaveOutcome]) -> Durability:
    """Of a save that is complete, by what each rank says that it keeps."""
    kept = Counter(owner for outcome in outcomes for owner in outcome.kept)
    pieces = Counter(outcome.group for outcome in outcomes if outcome.group is not None)
    for group, count in pieces.items():
        # Each that is missing may be the one that counts.
        spare = max(0, group.spare - (len(group.ranks) - count))
        kept.update(dict.fromkeys(group.ranks, spare))
    copies = [1 + kept[rank] for rank in range(len(outcomes))]
    return _judged(iteration, copies, [outcome.wanted for outcome in outcomes])


def durability_found(
    checkpoint: Checkpoint,
    inventory: Inventory,
    protection: Mapping[int, Group],
) -> Durability:
    """Of a complete checkpoint, by what the nodes hold.

    Args:
        checkpoint: Which.
        inventory: What each node holds.
        protection: For each rank the group that is to protect its shard, if there is one.
    """
    ranks = range(checkpoint.world_size)
    # A shard is on as many nodes as must be lost to lose it.
    held = least_losses(checkpoint, inventory)
    return _judged(
        checkpoint.iteration,
        [held[rank] for rank in ranks],
        [1 + (protection[rank].spare if rank in protection else 0) for rank in ranks],
    )


def spared(
    kept: Iterable[Checkpoint],
    older: Iterable[Checkpoint],
    standing: Mapping[Checkpoint, Durability],
) -> list[Checkpoint]:
    """Checkpoints that stay beside those that are kept, so that one survives a lost node.

    Args:
        kept: The newest ones.
        older: Those that would go, the newest first.
        standing: How far each has climbed, as far as known.

    Returns:
        The newest of the older that survives the loss of a node, if none that is kept does.
    """

    def survives(checkpoint: Checkpoint) -> bool:
        known = standing.get(checkpoint)
        return known is not None and known.survives_node_loss

    return [] if any(map(survives, kept)) else list(filter(survives, older))[:1]


def _judged(iteration: int, copies: Sequence[int], wanted: Iterable[int]) -> Durability:
    pairs = list(zip(copies, wanted, strict=True))
    fewest, of = min(pairs, key=lambda pair: (pair[0], -pair[1]))
    lacking = sum(has < wants for has, wants in pairs)
    return Durability(iteration, "replicated" if fewest > 1 else "local", fewest, of, lacking)
