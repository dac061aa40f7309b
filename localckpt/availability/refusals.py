"""Texts of the errors of a load that found no checkpoint: pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from localckpt.availability.coverage import describe_incomplete
from localckpt.availability.explanation import Explanation
from localckpt.availability.inventory import Inventory
from localckpt.ids import Checkpoint, ShardIdentity
from localckpt.storage.names import shard_named

__all__ = ["BadCopy", "why_given_up", "why_not_that", "why_nothing_loads"]


class BadCopy(NamedTuple):
    """Copy of a shard that could not be read."""

    shard: ShardIdentity
    holder: int
    """A rank on the node of the copy."""
    why: str


def why_nothing_loads(
    inventory: Inventory,
    explanation: Explanation,
    unreadable: Sequence[BadCopy],
    nodes: Sequence[str],
) -> str:
    """Return the text of the error that no checkpoint can be loaded.

    ``nodes`` has for each rank the name of its node in the explanation.
    """
    bad = [f"{node}: {file}" for node, files in explanation.bad.items() for file in files]
    quarantined = {
        (node, shard_named(file.name)) for node, files in explanation.bad.items() for file in files
    }
    bad += [
        f"{nodes[holder]}: {shard}: {why}"
        for shard, holder, why in unreadable
        if (nodes[holder], (shard.iteration, shard.rank, shard.generation)) not in quarantined
    ]
    return (
        f"there is no complete checkpoint to load: {describe_incomplete(inventory)}. Looked for on "
        f"{', '.join(explanation.nodes)}."
        + (f" Copies that are no good: {'; '.join(bad)}." if bad else "")
        + " Start from the beginning, or from a checkpoint on shared storage"
    )


def why_given_up(left: Mapping[Checkpoint, str], quarantined: Mapping[Checkpoint, str]) -> str:
    """Return the text of the error that all checkpoints were resumed from in vain too often.

    Those that are left are complete, and not in quarantine; each comes with the reason.
    """
    told = [f"iteration {c.iteration}: {why}, and it is kept" for c, why in left.items()]
    told += [
        f"iteration {c.iteration}: {why}, and it is in quarantine" for c, why in quarantined.items()
    ]
    again = (
        " Once the cause is gone, start with max_attempts=None to resume from the one that is kept."
        if left
        else ""
    )
    return (
        f"no checkpoint on the nodes is left to resume from, and nothing was started over. "
        f"{'; '.join(told)}. That several checkpoints fail alike speaks for the program or its "
        f"data.{again} `localckpt clean --put-back` puts back what is in quarantine; with another "
        f"session_id the job starts from the beginning"
    )


def why_not_that(iteration: int, others: Sequence[int], unreadable: Sequence[BadCopy]) -> str:
    """Return the text of the error that a requested checkpoint cannot be loaded."""
    bad = [f"{shard}, from the node of rank {holder}: {why}" for shard, holder, why in unreadable]
    return (
        f"iteration {iteration} is not complete on the nodes, and nothing else was loaded."
        + (f" Copies that are no good: {'; '.join(bad)}." if bad else "")
        + f" Complete are: {', '.join(map(str, others)) or 'none'}. The command localckpt explain "
        f"says what is missing"
    )
