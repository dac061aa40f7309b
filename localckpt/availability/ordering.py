"""Order of checkpoints by lineage: pure functions of what the nodes hold, the same on all ranks.

An epoch gives up the complete checkpoints that were there to be loaded when it began and that lie
above the iteration it resumed from: the job went back on purpose. Only that overrules a checkpoint.
All others, of whatever epochs, are compared by iteration.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from localckpt.ids import Checkpoint
from localckpt.lineage import EpochId, Lineage

__all__ = ["Lineages", "newest_first", "overruled", "unrelated"]

Lineages = Mapping[EpochId, Lineage]
"""Lineages of epochs. Epochs whose files were written by earlier versions are not in it."""


def newest_first(checkpoints: Iterable[Checkpoint], lineages: Lineages) -> list[Checkpoint]:
    """Checkpoints in the order in which a restart tries them; a total order.

    First those that none of the others overrules, by iteration. Then, in the same way, what remains
    of the others.

    Args:
        checkpoints: Of one session. One that lacks shards still overrules what it gave up.
        lineages: Of their epochs.
    """
    left, ordered = set(checkpoints), list[Checkpoint]()
    while left:
        dead = overruled(left, lineages)
        ordered += sorted(left - dead, key=_key, reverse=True)
        left = dead
    return ordered


def overruled(checkpoints: Iterable[Checkpoint], lineages: Lineages) -> set[Checkpoint]:
    """Those that the epoch of another one has given up, which is itself not overruled."""
    by_epoch: dict[EpochId, list[Checkpoint]] = {}
    for checkpoint in checkpoints:
        by_epoch.setdefault(checkpoint.generation.epoch_id, []).append(checkpoint)
    dead: set[Checkpoint] = set()
    standing: list[EpochId] = []
    # An epoch can give up only what has a lower number, so its own fate is decided by then.
    for epoch in sorted(by_epoch, reverse=True):
        alive = [
            checkpoint
            for checkpoint in by_epoch[epoch]
            if not any(_gives_up(later, checkpoint, lineages) for later in standing)
        ]
        dead.update(set(by_epoch[epoch]).difference(alive))
        if alive:
            standing.append(epoch)
    return dead


def unrelated(
    newest: Checkpoint, others: Iterable[Checkpoint], lineages: Lineages
) -> list[Checkpoint]:
    """Newest checkpoint of each lineage that knows nothing of the one that is taken.

    That is: neither is an ancestor of the other, and neither gave the other up. Epochs of earlier
    versions, and those of which a lineage that is cut may descend, are left out.
    """
    epoch = newest.generation.epoch_id
    mine = lineages.get(epoch)
    found: dict[EpochId, Checkpoint] = {}
    for other in others:
        of = other.generation.epoch_id
        theirs = lineages.get(of)
        if mine is None or theirs is None or of == epoch or of in found:
            continue
        related = (
            mine.descends_from(of, other.iteration)
            or theirs.descends_from(epoch, newest.iteration)
            or mine.gives_up(of, other.iteration)
            or theirs.gives_up(epoch, newest.iteration)
            or (mine.is_cut and of.number < mine.ancestors[-1].epoch.number)
        )
        if not related:
            found[of] = other
    return list(found.values())


def _gives_up(later: EpochId, checkpoint: Checkpoint, lineages: Lineages) -> bool:
    epoch = checkpoint.generation.epoch_id
    if epoch.number >= later.number:
        return False
    lineage = lineages.get(later)
    if lineage is None:
        # Earlier versions recorded no lineage, and took every later epoch to overrule.
        return epoch not in lineages
    return lineage.gives_up(epoch, checkpoint.iteration)


def _key(checkpoint: Checkpoint) -> tuple[int, int, int, int]:
    # All but the iteration only makes the order total.
    epoch, sequence = checkpoint.generation
    return checkpoint.iteration, epoch, sequence, checkpoint.world_size
