"""Findings of a look at all nodes, as the root tells them to every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from localckpt.availability.coverage import complete_checkpoints, describe_incomplete
from localckpt.availability.durability import Durability, durability_found
from localckpt.availability.inventory import Inventory
from localckpt.ids import Checkpoint, Generation, Group
from localckpt.lineage import Lineage

__all__ = ["Found"]


@dataclass(frozen=True, slots=True)
class Found:
    """Pieces that the nodes hold, as far as every rank needs to know them.

    Attributes:
        complete: The complete checkpoints, the newest first, and how far each has climbed.
        lineages: Lineages of the epochs.
        incomplete: Why the others are not complete, if none is; empty if there is none at all.
    """

    complete: Mapping[Checkpoint, Durability]
    lineages: Sequence[Lineage]
    incomplete: str

    def to_json(self) -> list[Any]:
        complete = [
            [checkpoint.generation, checkpoint.iteration, checkpoint.world_size, astuple(reached)]
            for checkpoint, reached in self.complete.items()
        ]
        return [complete, [lineage.to_json() for lineage in self.lineages], self.incomplete]

    @classmethod
    def among(cls, inventory: Inventory, protection: Mapping[int, Group]) -> Found:
        """Find what is complete.

        Args:
            inventory: What each node holds.
            protection: As for :func:`durability_found`.
        """
        complete = {
            checkpoint: durability_found(checkpoint, inventory, protection)
            for checkpoint in complete_checkpoints(inventory)
        }
        lacking = bool(inventory.checkpoints) and not complete
        incomplete = describe_incomplete(inventory) if lacking else ""
        return cls(complete, [*inventory.lineages.values()], incomplete)

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> Found:
        complete, lineages, incomplete = fields
        return cls(
            {
                Checkpoint(Generation(*generation), iteration, world_size): Durability(*reached)
                for generation, iteration, world_size, reached in complete
            },
            [Lineage.from_json(lineage) for lineage in lineages],
            incomplete,
        )
