"""Complete checkpoints of a job, from its saves and from the inventory of its nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from localckpt.availability.durability import Durability, Found, durability_found, spared
from localckpt.availability.inventory import Inventory
from localckpt.availability.ordering import newest_first
from localckpt.availability.retention import Retention, Retirement
from localckpt.ids import Checkpoint
from localckpt.lineage import EpochId, Lineage, Point
from localckpt.replication.base import ReplicationStrategy
from localckpt.trust import Mark, Trusts


class JobCheckpoints:
    """Complete checkpoints of one job, and the level of each; the same on all ranks.

    Attributes:
        complete: Those that a restart tries, the newest first.
        exhausted: Others that are complete, which the job was resumed from in vain too often, and
            why they are passed over.
        trusts: Trust in checkpoints. Which are drained to shared storage is known, beside those of
            this start of the job, as far as a look has told.
        under_way: Iterations that are captured, and not finalized.
        lineages: Lineages of the epochs, as far as they have any.
        seen: What was complete at the last look at all nodes; ``None`` before the first.
        job_has_looked: Whether the job asked what there is, or said what it resumes from. Then it
            knows what it gives up.
    """

    def __init__(self, redundancy: ReplicationStrategy) -> None:
        self._redundancy = redundancy
        self.complete: list[Checkpoint] = []
        self.exhausted: dict[Checkpoint, str] = {}
        self.trusts = Trusts()
        self.under_way: list[int] = []
        self._reached: dict[Checkpoint, Durability] = {}
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
            replace(durability, level="drained") if self.trusts[c].is_drained else durability
            for c, durability in reached
        ]

    def take_in(self, found: Found) -> None:
        """Take in the checkpoints that a look at all nodes found."""
        self.complete = list(found.complete)
        self.exhausted = dict(found.exhausted)
        # This job's notes may be under way. A mark counts only as it is noted.
        own = {c: replace(self.trusts[c], mark=None, why="") for c in self.complete}
        self.trusts = Trusts.of([found.trusts, own])
        self._reached.update(found.complete)
        self.lineages |= {lineage.epoch: lineage for lineage in found.lineages}
        # The job goes back from what it passes over, too.
        seen = (*found.complete, *found.quarantined, *found.exhausted)
        self.seen = [Point(c.generation.epoch_id, c.iteration) for c in seen]

    def began(self, lineage: Lineage) -> None:
        """Take in the lineage of the saves from here on."""
        self._lineage = self.lineages[lineage.epoch] = lineage

    def refresh(self, checkpoint: Checkpoint, inventory: Inventory) -> None:
        protection = self._redundancy.protection
        self._reached[checkpoint] = durability_found(checkpoint, inventory, protection)

    @property
    def metrics(self) -> dict[Checkpoint, tuple[str, float]]:
        metrics = ((c, self.trusts[c].metric) for c in self.complete)
        return {c: metric for c, metric in metrics if metric is not None}

    def note(self, checkpoint: Checkpoint, **changes: Any) -> None:
        """Note fields of the trust in a checkpoint."""
        trust = replace(self.trusts[checkpoint], **changes)
        self.trusts = Trusts({**self.trusts, checkpoint: trust})

    def add(self, checkpoint: Checkpoint, reached: Durability) -> None:
        self.complete = newest_first({*self.complete, checkpoint}, self.lineages)
        self._reached = {c: self._reached[c] for c in self.complete if c in self._reached}
        self._reached[checkpoint] = reached

    def forget(self, iteration: int) -> None:
        """Forget an iteration under way, which is finalized or never will be."""
        self.under_way = [other for other in self.under_way if other != iteration]

    def remove(self, checkpoint: Checkpoint) -> None:
        self.complete = [other for other in self.complete if other != checkpoint]
        self.exhausted.pop(checkpoint, None)

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

        Returns ``None`` if nothing may go.
        """
        lineage, count = self._lineage if self.job_has_looked else None, retention.last or 1
        passed = Retirement(saved, lineage, frozenset())
        own = [checkpoint for checkpoint in self.complete if passed.takes(checkpoint)]
        bad = [checkpoint for checkpoint in own if self.trusts[checkpoint].mark == "bad"]
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
        self.trusts = Trusts({c: self.trusts[c] for c in self.complete if c in self.trusts})
        return retirement

    def _best(
        self, sound: Sequence[Checkpoint], retention: Retention, lineage: Lineage | None
    ) -> list[Checkpoint]:
        """Return the checkpoints with the best metric, but for those that the job gave up."""
        if retention.best is None:
            return []
        metrics = {
            c: dict([metric])
            for c in sound
            if (metric := self.trusts[c].metric)
            and (lineage is None or not lineage.gives_up(c.generation.epoch_id, c.iteration))
        }
        return retention.best.of(metrics)

    def _newest_good(
        self, kept: Sequence[Checkpoint], older: Sequence[Checkpoint]
    ) -> list[Checkpoint]:
        """Return the newest checkpoint that is marked good, unless a kept one is."""
        if any(self.trusts[checkpoint].mark == "good" for checkpoint in kept):
            return []
        return [checkpoint for checkpoint in older if self.trusts[checkpoint].mark == "good"][:1]

    def marked(self, mark: Mark) -> list[Checkpoint]:
        return [checkpoint for checkpoint in self.complete if self.trusts[checkpoint].mark == mark]
