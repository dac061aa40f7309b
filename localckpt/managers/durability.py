"""How far each checkpoint has climbed: captured, kept on its own nodes, and on how many others.

Pure functions of what the ranks said when they finalized a save, and of what their nodes hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from localckpt.ids import Checkpoint
from localckpt.managers.coverage import SaveOutcome
from localckpt.managers.holdings import Holdings
from localckpt.managers.parity_coverage import least_losses
from localckpt.replication.survival import LossChance, loss_of_groups

__all__ = [
    "Durability",
    "chances_of_loss",
    "durability_found",
    "durability_saved",
    "spared",
]

_MOST_LOST = 4

Rung = Literal["captured", "local", "replicated"]


@dataclass(frozen=True, slots=True)
class Durability:
    """Where one iteration stands.

    Attributes:
        iteration: Its number.
        rung: ``"captured"`` in memory of its ranks, ``"local"`` once every rank's shard is kept on
            a node, ``"replicated"`` once every shard is on two nodes or more.
        copies: On how many nodes each shard is at least, the owner's included; 0 while captured.
            With parity as if: of so many nodes any one may stay, and it can be had.
        wanted: On how many each is to be.
        lacking: How many shards are on fewer nodes than wanted.
    """

    iteration: int
    rung: Rung
    copies: int
    wanted: int
    lacking: int = 0

    @property
    def survives_node_loss(self) -> bool:
        """Whether any one node may be lost."""
        return self.rung == "replicated"

    @property
    def reached(self) -> str:
        """The rung, and on how many nodes of how many."""
        alone = self.rung != "replicated" and self.wanted < 2
        return self.rung if alone else f"{self.rung}, {self.copies} of {self.wanted}"

    def __str__(self) -> str:
        lacking = f": {self.lacking} shards lack copies" if self.lacking else ""
        return f"iteration {self.iteration} is {self.reached}{lacking}"


def durability_saved(iteration: int, outcomes: Sequence[SaveOutcome]) -> Durability:
    """Of a save that is complete, by what each rank says that it keeps."""
    kept = Counter(owner for outcome in outcomes for owner in outcome.kept)
    parities = Counter(outcome.group for outcome in outcomes if outcome.group is not None)
    for group, count in parities.items():
        # Each that is missing may be the one that counts.
        spare = max(0, group.parity - (len(group.ranks) - count))
        kept.update(dict.fromkeys(group.ranks, spare))
    copies = [1 + kept[rank] for rank in range(len(outcomes))]
    return _judged(iteration, copies, [outcome.wanted for outcome in outcomes])


def durability_found(
    checkpoint: Checkpoint,
    holdings: Holdings,
    keepers: Mapping[int, Sequence[int]],
    parity: int = 0,
) -> Durability:
    """Of a complete checkpoint, by what the nodes hold.

    Args:
        checkpoint: Which.
        holdings: What each node holds.
        keepers: For each rank those that are to keep a copy of its shard.
        parity: How many parities its group is to have, where there are no copies.
    """
    ranks = range(checkpoint.world_size)
    # A shard is on as many nodes as must be lost to lose it.
    held = least_losses(checkpoint, holdings)
    return _judged(
        checkpoint.iteration,
        [held[rank] for rank in ranks],
        [1 + (parity or len(keepers.get(rank, ()))) for rank in ranks],
    )


def chances_of_loss(
    nodes: Sequence[str],
    keepers: Mapping[int, Sequence[int]],
    parity: int = 0,
    parity_groups: Iterable[Iterable[int]] = (),
) -> list[LossChance]:
    """How likely data is lost with 1, 2, ... nodes, for a checkpoint with all its copies.

    Args:
        nodes: For each rank of the job its node.
        keepers: For each rank those that keep a copy of its shard.
        parity: How many parities each group has, where there are no copies.
        parity_groups: The ranks of each group, each on another node.
    """
    if parity:
        groups = [frozenset(nodes[rank] for rank in ranks) for ranks in parity_groups]
        spare = [parity] * len(groups)
    else:
        groups = [
            frozenset(nodes[keeper] for keeper in (rank, *keepers.get(rank, ())))
            for rank in range(len(nodes))
        ]
        spare = [len(group) - 1 for group in groups]
    most = min(_MOST_LOST, len(set(nodes)))
    return [loss_of_groups(groups, spare, lost) for lost in range(1, most + 1)]


def spared(
    kept: Iterable[Checkpoint],
    older: Iterable[Checkpoint],
    standing: Mapping[Checkpoint, Durability],
) -> list[Checkpoint]:
    """What stays beside the checkpoints that are kept, so that some one survives a lost node.

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
