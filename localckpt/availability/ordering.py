"""Order of checkpoints by lineage: pure functions with the same result on all ranks.

An epoch gives up the complete checkpoints that could have been loaded when it began and that have
higher iterations than the one it resumed from: the job went back on purpose. Nothing else overrules
a checkpoint. All other checkpoints, of any epochs, are compared by iteration.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from localckpt.ids import Checkpoint
from localckpt.lineage import EpochId, Lineage

Lineages = Mapping[EpochId, Lineage]
"""Lineages of epochs, as far as a shard or a note tells them."""


def newest_first(checkpoints: Iterable[Checkpoint], lineages: Lineages) -> list[Checkpoint]:
    """Sort checkpoints in the order in which a restart tries them; a total order.

    The checkpoints that no other overrules come first, by descending iteration. The remaining ones
    follow, sorted among themselves in the same way. One that lacks shards still overrules those
    that its epoch gave up.
    """
    left, ordered = set(checkpoints), list[Checkpoint]()
    while left:
        dead = overruled(left, lineages)
        ordered += sorted(left - dead, key=_key, reverse=True)
        left = dead
    return ordered


def overruled(checkpoints: Iterable[Checkpoint], lineages: Lineages) -> set[Checkpoint]:
    """Return the checkpoints given up by the epoch of another one that is not overruled itself."""
    by_epoch: dict[EpochId, list[Checkpoint]] = {}
    for checkpoint in checkpoints:
        by_epoch.setdefault(checkpoint.generation.epoch_id, []).append(checkpoint)
    dead: set[Checkpoint] = set()
    standing: list[EpochId] = []
    # Only an epoch with a higher number can give up a checkpoint, so these are decided first.
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
    """Return the newest checkpoint of each epoch whose lineage is unrelated to ``newest``.

    Two checkpoints are unrelated if neither is an ancestor of the other, and neither's epoch gave
    the other up. Epochs without a lineage are left out, and so are epochs that may be ancestors of
    ``newest`` beyond the end of its cut lineage.
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
    return lineage is not None and lineage.gives_up(epoch, checkpoint.iteration)


def _key(checkpoint: Checkpoint) -> tuple[int, int, int, int]:
    # The values after the iteration only make the order total.
    epoch, sequence = checkpoint.generation
    return checkpoint.iteration, epoch, sequence, checkpoint.world_size
