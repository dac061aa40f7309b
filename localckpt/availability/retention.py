"""Retention: checkpoints that may go once a newer one is complete. A pure function."""

from __future__ import annotations

from dataclasses import dataclass

from localckpt.ids import Checkpoint
from localckpt.lineage import Lineage

__all__ = ["Retirement"]


@dataclass(frozen=True, slots=True)
class Retirement:
    """Checkpoints that may go.

    Attributes:
        up_to: Those of no greater iteration,
        lineage: and those that this lineage has given up, if the job knew of them,
        but: except these.
    """

    up_to: int
    lineage: Lineage | None
    but: frozenset[Checkpoint]

    def takes(self, checkpoint: Checkpoint) -> bool:
        """True if a checkpoint goes."""
        epoch, iteration = checkpoint.generation.epoch_id, checkpoint.iteration
        given_up = self.lineage is not None and self.lineage.gives_up(epoch, iteration)
        return checkpoint not in self.but and (iteration <= self.up_to or given_up)
