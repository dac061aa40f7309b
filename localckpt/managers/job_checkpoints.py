"""Complete checkpoints of a job, from its saves and from the inventory of its nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from localckpt.availability.durability import Durability, durability_found, spared
from localckpt.availability.found import Found
from localckpt.availability.inventory import Inventory
from localckpt.availability.ordering import newest_first
from localckpt.availability.retention import Retention, Retirement
from localckpt.ids import Checkpoint
from localckpt.lineage import EpochId, Lineage, Point
from localckpt.replication.redundancy import Redundancy
from localckpt.trust import Mark, MarkKind, Measured

__all__ = ["JobCheckpoints"]


class JobCheckpoints:
    """Complete checkpoints of one job, and the level of each; the same on all ranks.

    Args:
        redundancy: Protects the job's shards.

    Attributes:
        complete: Those that a restart tries, the newest first.
        exhausted: Others that are complete, which the job was resumed from in vain too often, and
            why they are passed over.
        marks: Marks of checkpoints.
        measured: Metrics of complete checkpoints.
        under_way: Iterations that are captured, and not finalized.
        lineages: Lineages of the epochs, as far as they have any.
        drained: Complete ones that were promoted to shared storage, by this start of the job or, as
            far as a look has told, by one before.
        seen: What was complete at the last look at all nodes; ``None`` before the first.
        job_has_looked: Whether the job asked what there is, or said what it resumes from. Then it
            knows what it gives up.
    """

    def __init__(self, redundancy: Redundancy) -> None:
        self._redundancy = redundancy
        self.complete: list[Checkpoint] = []
        self.exhausted: dict[Checkpoint, str] = {}
        self.marks: dict[Checkpoint, Mark] = {}
        self.measured: dict[Checkpoint, Measured] = {}
        self.under_way: list[int] = []
        self._reached: dict[Checkpoint, Durability] = {}
        self.drained: set[Checkpoint] = set()
        self._held: Counter[Checkpoint] = Counter()
        self.lineages: dict[EpochId, Lineage] = {}
        self.seen: list[Point] | None = None
        self.job_has_looked = False
        self._lineage: Lineage | None = None

    def copies_wanted(self, rank: int) -> int:
        """Target number of copies of a rank's shard; see :class:`Durability`."""
        group = self._redundancy.protection.get(rank)
        return 1 + (0 if group is None else group.tolerated)

    @property
    def lacking(self) -> int:
        """Number of shards of the newest checkpoint that have fewer copies than asked for."""
        newest = self._reached.get(self.complete[0]) if self.complete else None
        return 0 if newest is None else newest.lacking

    def status(self, rank: int) -> list[Durability]:
        """Return the durability of all checkpoints, as a rank sees it, the newest first."""
        captured = [
            Durability(iteration, "captured", 0, self.copies_wanted(rank))
            for iteration in reversed(self.under_way)
        ]
        reached = ((c, self._reached[c]) for c in self.complete if c in self._reached)
        return captured + [
            replace(durability, level="drained") if c in self.drained else durability
            for c, durability in reached
        ]

    def take_in(self, found: Found) -> None:
        """Take in the checkpoints that a look at all nodes found."""
        self.complete = list(found.complete)
        self.exhausted = dict(found.exhausted)
        self.marks = dict(found.trust.marks)
        # This job's notes may be under way.
        measured = {**found.trust.measured, **self.measured}
        self.measured = {c: measured[c] for c in self.complete if c in measured}
        self.drained = {c for c in (*self.drained, *found.trust.drained) if c in self.complete}
        self._reached.update(found.complete)
        self.lineages |= {lineage.epoch: lineage for lineage in found.lineages}
        # The job goes back from what it passes over, too.
        seen = (*found.complete, *found.quarantined, *found.exhausted)
        self.seen = [Point(c.generation.epoch_id, c.iteration) for c in seen]

    def began(self, lineage: Lineage) -> None:
        """Take in the lineage of the saves from here on."""
        self._lineage = self.lineages[lineage.epoch] = lineage

    def refresh(self, checkpoint: Checkpoint, inventory: Inventory) -> None:
        """Refresh the level of a checkpoint from the inventory of the nodes."""
        protection = self._redundancy.protection
        self._reached[checkpoint] = durability_found(checkpoint, inventory, protection)

    def add(
        self, checkpoint: Checkpoint, reached: Durability, measured: Measured | None = None
    ) -> None:
        """Add a checkpoint that was saved and is complete."""
        if measured is not None:
            self.measured = {**self.measured, checkpoint: measured}
        self.complete = newest_first({*self.complete, checkpoint}, self.lineages)
        self._reached = {c: self._reached[c] for c in self.complete if c in self._reached}
        self._reached[checkpoint] = reached

    def forget(self, iteration: int) -> None:
        """Forget an iteration under way, which is finalized or never will be."""
        self.under_way = [other for other in self.under_way if other != iteration]

    def remove(self, checkpoint: Checkpoint) -> None:
        """Take a checkpoint out of the complete ones."""
        self.complete = [other for other in self.complete if other != checkpoint]
        self.exhausted.pop(checkpoint, None)

    def note_drained(self, checkpoint: Checkpoint) -> None:
        """Note that a checkpoint is on shared storage, too."""
        self.drained = self.drained_with(checkpoint)

    def drained_with(self, checkpoint: Checkpoint) -> set[Checkpoint]:
        """Return the drained checkpoints and one more; may be called by another thread."""
        return {c for c in (*self.drained, checkpoint) if c in self.complete}

    def hold(self, checkpoint: Checkpoint) -> None:
        """Keep a checkpoint from being pruned until :meth:`release` was called as often."""
        self._held[checkpoint] += 1

    def release(self, checkpoint: Checkpoint) -> None:
        """Undo one :meth:`hold`; the next save prunes what is over."""
        self._held[checkpoint] -= 1
        self._held += Counter()

    def keep(self, saved: int, retention: Retention) -> Retirement | None:
        """Forget all but the newest checkpoints, and those that must stay beside them.

        Beside them stays the newest that survives the loss of a node, if none of them does; the
        newest that is marked good, if none of them is; those with the best metric, if the job did
        not go back from them; and what other lineages have that is newer by iteration, unless the
        job gave it up knowingly. One that is marked bad counts for nothing, and only the newest of
        them stays, as long as nothing newer is complete. What is held stays in any case.

        Args:
            saved: The iteration that was saved last.
            retention: Rules for the nodes.

        Returns:
            What may go on each rank; ``None`` if there are not so many.
        """
        lineage, count = self._lineage if self.job_has_looked else None, retention.last or 1
        passed = Retirement(saved, lineage, frozenset())
        own = [checkpoint for checkpoint in self.complete if passed.takes(checkpoint)]
        bad = [checkpoint for checkpoint in own if self._is_marked(checkpoint, "bad")]
        sound = [checkpoint for checkpoint in own if checkpoint not in bad]
        kept, older = sound[:count], sound[count:]
        newest = max((checkpoint.iteration for checkpoint in sound), default=-1)
        # Of bad ones that are newer than all others, the newest is the last resort.
        last_bad = [checkpoint for checkpoint in bad if checkpoint.iteration > newest][:1]
        also = frozenset(bad).difference(last_bad, self._held)
        if len(kept) < count:
            if not also:
                return None
            retirement = Retirement(-1, None, frozenset(), also)
        else:
            stays = [*spared(kept, older, self._reached), *self._newest_good(kept, older)]
            stays += self._best(sound, retention, lineage)
            up_to = min(checkpoint.iteration for checkpoint in kept)
            but = frozenset((*kept, *stays, *last_bad, *self._held))
            retirement = Retirement(up_to, lineage, but, also)
        self.complete = [
            checkpoint for checkpoint in self.complete if not retirement.takes(checkpoint)
        ]
        self.measured = {c: note for c, note in self.measured.items() if c in self.complete}
        return retirement

    def _best(
        self, sound: Sequence[Checkpoint], retention: Retention, lineage: Lineage | None
    ) -> list[Checkpoint]:
        """Return the checkpoints with the best metric, but for those that the job gave up."""
        if retention.best is None:
            return []
        metrics = {
            c: {self.measured[c].metric: self.measured[c].value}
            for c in sound
            if c in self.measured
            and (lineage is None or not lineage.gives_up(c.generation.epoch_id, c.iteration))
        }
        return retention.best.of(metrics)

    def _newest_good(
        self, kept: Sequence[Checkpoint], older: Sequence[Checkpoint]
    ) -> list[Checkpoint]:
        """Return the newest checkpoint that is marked good, unless a kept one is."""

        if any(self._is_marked(checkpoint, "good") for checkpoint in kept):
            return []
        return [checkpoint for checkpoint in older if self._is_marked(checkpoint, "good")][:1]

    def marked(self, kind: MarkKind) -> list[Checkpoint]:
        """Return the complete checkpoints with a kind of mark."""
        return [checkpoint for checkpoint in self.complete if self._is_marked(checkpoint, kind)]

    def _is_marked(self, checkpoint: Checkpoint, kind: MarkKind) -> bool:
        return checkpoint in self.marks and self.marks[checkpoint].kind == kind
