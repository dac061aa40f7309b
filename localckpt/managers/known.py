"""What a manager knows of its checkpoints, from its saves and from what the nodes held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from localckpt.ids import Checkpoint
from localckpt.managers.coverage import SaveOutcome
from localckpt.managers.durability import Durability, durability_found, durability_saved, spared
from localckpt.managers.holdings import Holdings
from localckpt.replication.base import ReplicationStrategy

__all__ = ["KnownCheckpoints", "Retirement"]


Version = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Retirement:
    """Which checkpoints may go.

    Attributes:
        older_than: Those of versions below this one,
        but: except these,
        not_below: and those below this.
    """

    older_than: Version
    but: frozenset[Version]
    not_below: Version


class KnownCheckpoints:
    """The complete checkpoints of one job, and how far each has climbed; the same on all ranks.

    Args:
        strategy: Says who keeps copies for whom.

    Attributes:
        complete: The newest first.
        under_way: Iterations that are captured, and not finalized.
    """

    def __init__(self, strategy: ReplicationStrategy) -> None:
        self._strategy = strategy
        self.complete: list[Checkpoint] = []
        self.under_way: list[int] = []
        self._reached: dict[Checkpoint, Durability] = {}
        self._has_looked = False

    def copies_wanted(self, rank: int) -> int:
        """On how many nodes a rank's shard is to be, its own included."""
        return 1 + (self._strategy.parity or len(self._strategy.keepers.get(rank, ())))

    @property
    def lacking(self) -> int:
        """How many shards of the newest one have fewer copies than asked for."""
        newest = self._reached.get(self.complete[0]) if self.complete else None
        return 0 if newest is None else newest.lacking

    def status(self, rank: int) -> list[Durability]:
        """How far all have climbed, as a rank sees it, the newest first."""
        captured = [
            Durability(iteration, "captured", 0, self.copies_wanted(rank))
            for iteration in reversed(self.under_way)
        ]
        return captured + [self._reached[c] for c in self.complete if c in self._reached]

    def found(self, complete: Sequence[Checkpoint]) -> None:
        """What a look at all nodes found complete, the newest first."""
        self.complete = list(complete)
        self._has_looked = True

    def take_stock(self, checkpoint: Checkpoint, holdings: Holdings) -> None:
        """See from what the nodes hold how far one has climbed."""
        self._reached[checkpoint] = durability_found(
            checkpoint, holdings, self._strategy.keepers, self._strategy.parity
        )

    def add(self, checkpoint: Checkpoint, outcomes: Sequence[SaveOutcome]) -> Durability:
        """One that was saved is complete, by what all ranks said."""
        self.complete = sorted(
            {*self.complete, checkpoint}, key=lambda known: known.version, reverse=True
        )
        self._reached = {c: self._reached[c] for c in self.complete if c in self._reached}
        reached = self._reached[checkpoint] = durability_saved(checkpoint.iteration, outcomes)
        return reached

    def forget(self, iteration: int) -> None:
        """One that was under way will not be finalized."""
        self.under_way = [other for other in self.under_way if other != iteration]

    def remove(self, checkpoint: Checkpoint) -> None:
        """One is not, or not yet, among the complete ones."""
        self.complete = [known for known in self.complete if known != checkpoint]

    def keep(self, count: int) -> Retirement | None:
        """Forget all but the newest, and what must stay beside them.

        Beside them stays the newest that survives the loss of a node, if none of them does.

        Args:
            count: How many of the newest are kept.

        Returns:
            What may go on each rank; ``None`` if there are not so many.
        """
        kept, older = self.complete[:count], self.complete[count:]
        if len(kept) < count:
            return None
        stays = spared(kept, older, self._reached)
        self.complete = [*kept, *stays]
        reached = [self._reached[known] for known in kept if known in self._reached]
        safe = stays or any(known.survives_node_loss for known in reached)
        # Whether a checkpoint of an earlier attempt survives, only who has looked knows.
        unknown = not safe and not self._has_looked and any(known.lacking for known in reached)
        return Retirement(
            older_than=kept[-1].version,
            but=frozenset(known.version for known in stays),
            not_below=(kept[-1].version[0], 0, 0, 0) if unknown else (0, 0, 0, 0),
        )
