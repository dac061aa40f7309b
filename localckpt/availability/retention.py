"""Retention: a pure rule for the checkpoints to prune once a newer one is complete."""

from __future__ import annotations

from dataclasses import dataclass

from localckpt.ids import Checkpoint
from localckpt.lineage import Lineage

__all__ = ["Retirement"]


@dataclass(frozen=True, slots=True)
class Retirement:
    """Rule for the checkpoints to prune.

    Attributes:
        up_to: Checkpoints up to this iteration are pruned.
        lineage: Checkpoints that this lineage gave up are pruned, too; ``None`` for none.
        but: Checkpoints that are kept in any case.
        also: Checkpoints that are pruned in any case.
    """

    up_to: int
    lineage: Lineage | None
    but: frozenset[Checkpoint]
    also: frozenset[Checkpoint] = frozenset()

    def takes(self, checkpoint: Checkpoint) -> bool:
        """Return whether a checkpoint is to be pruned."""
        epoch, iteration = checkpoint.generation.epoch_id, checkpoint.iteration
        given_up = self.lineage is not None and self.lineage.gives_up(epoch, iteration)
        is_over = iteration <= self.up_to or given_up
        return checkpoint in self.also or (checkpoint not in self.but and is_over)
