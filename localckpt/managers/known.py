"""What a manager knows of its checkpoints, from its saves and from what the nodes held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from localckpt.ids import Checkpoint
from localckpt.lineage import EpochId, Lineage, Point
from localckpt.managers.coverage import SaveOutcome
from localckpt.managers.durability import Durability, durability_found, durability_saved, spared
from localckpt.managers.holdings import Holdings
from localckpt.managers.ordering import newest_first
from localckpt.replication.base import ReplicationStrategy

__all__ = ["KnownCheckpoints", "Retirement"]


@dataclass(frozen=True, slots=True)
class Retirement:
    """Which checkpoints may go.

    Attributes:
        up_to: Those of no greater iteration,
        lineage: and those that this lineage has given up, if the job knew of them,
        but: except these.
    """

    up_to: int
    lineage: Lineage | None
    but: frozenset[Checkpoint]

    def takes(self, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint goes."""
        epoch, iteration = checkpoint.generation.epoch_id, checkpoint.iteration
        given_up = self.lineage is not None and self.lineage.gives_up(epoch, iteration)
        return checkpoint not in self.but and (iteration <= self.up_to or given_up)


class KnownCheckpoints:
    """The complete checkpoints of one job, and how far each has climbed; the same on all ranks.

    Args:
        strategy: Says who keeps copies for whom.

    Attributes:
        complete: The newest first.
        under_way: Iterations that are captured, and not finalized.
        lineages: Lineages of the epochs, as far as they have any.
        seen: What was complete at the last look at all nodes; ``None`` before the first.
        job_has_looked: Whether the job asked what there is, or said what it resumes from. Then it
            knows what it gives up.
    """

    def __init__(self, strategy: ReplicationStrategy) -> None:
        self._strategy = strategy
        self.complete: list[Checkpoint] = []
        self.under_way: list[int] = []
        self._reached: dict[Checkpoint, Durability] = {}
        self.lineages: dict[EpochId, Lineage] = {}
        self.seen: list[Point] | None = None
        self.job_has_looked = False
        self._lineage: Lineage | None = None

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

    def found(self, complete: Sequence[Checkpoint], holdings: Holdings) -> None:
        """Take in what a look at all nodes found complete, the newest first."""
        self.complete = list(complete)
        self.lineages = {**self.lineages, **holdings.lineages}
        self.seen = [Point(c.generation.epoch_id, c.iteration) for c in complete]

    def began(self, lineage: Lineage) -> None:
        """Take in the lineage of the saves from here on."""
        self._lineage = self.lineages[lineage.epoch] = lineage

    def take_stock(self, checkpoint: Checkpoint, holdings: Holdings) -> None:
        """See from what the nodes hold how far one has climbed."""
        self._reached[checkpoint] = durability_found(
            checkpoint, holdings, self._strategy.keepers, self._strategy.parity
        )

    def add(self, checkpoint: Checkpoint, outcomes: Sequence[SaveOutcome]) -> Durability:
        """One that was saved is complete, by what all ranks said."""
        self.complete = newest_first({*self.complete, checkpoint}, self.lineages)
        self._reached = {c: self._reached[c] for c in self.complete if c in self._reached}
        reached = self._reached[checkpoint] = durability_saved(checkpoint.iteration, outcomes)
        return reached

    def forget(self, iteration: int) -> None:
        """One that was under way will not be finalized."""
        self.under_way = [other for other in self.under_way if other != iteration]

    def remove(self, checkpoint: Checkpoint) -> None:
        """One is not, or not yet, among the complete ones."""
        self.complete = [known for known in self.complete if known != checkpoint]

    def keep(self, saved: int, count: int) -> Retirement | None:
        """Forget all but the newest, and what must stay beside them.

        Beside them stays the newest that survives the loss of a node, if none of them does; and
        what other lineages have that is newer by iteration, unless the job gave it up knowingly.

        Args:
            saved: The iteration that was saved last.
            count: How many of the newest are kept.

        Returns:
            What may go on each rank; ``None`` if there are not so many.
        """
        lineage = self._lineage if self.job_has_looked else None
        passed = Retirement(saved, lineage, frozenset())
        own = [known for known in self.complete if passed.takes(known)]
        kept, older = own[:count], own[count:]
        if len(kept) < count:
            return None
        stays = spared(kept, older, self._reached)
        up_to = min(known.iteration for known in kept)
        retirement = Retirement(up_to, lineage, frozenset((*kept, *stays)))
        self.complete = [known for known in self.complete if not retirement.takes(known)]
        return retirement
