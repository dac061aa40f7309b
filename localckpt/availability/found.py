"""Summary of the pieces on all nodes, which the root sends to every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from localckpt.availability.coverage import complete_checkpoints, describe_incomplete
from localckpt.availability.durability import Durability, durability_found
from localckpt.availability.inventory import Inventory
from localckpt.ids import Checkpoint, Generation, Group
from localckpt.lineage import Lineage
from localckpt.trust import Trust, choose

__all__ = ["Found"]


@dataclass(frozen=True, slots=True)
class Found:
    """Summary of the checkpoints on all nodes, for every rank.

    Attributes:
        complete: The complete checkpoints that a restart tries, in that order, with their
            durability.
        lineages: Lineages of the epochs.
        incomplete: If checkpoints exist but none is complete, a text that says why; else empty.
        trust: Trust in checkpoints.
        quarantined, exhausted: Other complete checkpoints; see :class:`localckpt.trust.Choice`.
    """

    complete: Mapping[Checkpoint, Durability]
    lineages: Sequence[Lineage]
    incomplete: str
    trust: Trust = field(default_factory=Trust)
    quarantined: Mapping[Checkpoint, str] = field(default_factory=dict)
    exhausted: Mapping[Checkpoint, str] = field(default_factory=dict)

    def to_json(self) -> list[Any]:
        return [
            [[*_fields(c), astuple(reached)] for c, reached in self.complete.items()],
            [lineage.to_json() for lineage in self.lineages],
            self.incomplete,
            self.trust.to_json(),
            [[*_fields(c), why] for c, why in self.quarantined.items()],
            [[*_fields(c), why] for c, why in self.exhausted.items()],
        ]

    @classmethod
    def among(
        cls,
        inventory: Inventory,
        protection: Mapping[int, Group],
        max_attempts: int | None = None,
    ) -> Found:
        """Find the complete checkpoints, and choose those that a restart may take.

        Args:
            inventory: Pieces on all nodes.
            protection: As for :func:`durability_found`.
            max_attempts: As for :func:`localckpt.trust.choose`.
        """
        complete = complete_checkpoints(inventory)
        choice = choose(complete, inventory.trust, max_attempts)
        lacking = bool(inventory.checkpoints) and not complete
        return cls(
            {c: durability_found(c, inventory, protection) for c in choice.usable},
            [*inventory.lineages.values()],
            describe_incomplete(inventory) if lacking else "",
            inventory.trust,
            choice.quarantined,
            choice.exhausted,
        )

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> Found:
        complete, lineages, incomplete, trust, quarantined, exhausted = fields
        return cls(
            {_checkpoint(*of): Durability(*reached) for *of, reached in complete},
            [Lineage.from_json(lineage) for lineage in lineages],
            incomplete,
            Trust.from_json(trust),
            {_checkpoint(*of): why for *of, why in quarantined},
            {_checkpoint(*of): why for *of, why in exhausted},
        )


def _fields(checkpoint: Checkpoint) -> list[Any]:
    return [checkpoint.generation, checkpoint.iteration, checkpoint.world_size]


def _checkpoint(generation: Sequence[int], iteration: int, world_size: int) -> Checkpoint:
    return Checkpoint(Generation(*generation), iteration, world_size)
