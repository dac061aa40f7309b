"""Coverage: checkpoints and saves that are complete, and the order of checkpoints by lineage.

An epoch gives up the complete checkpoints that it could have loaded and that have higher iterations
than the one it resumed from: the job went back on purpose. All others are compared by iteration.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from localckpt.availability.inventory import Inventory
from localckpt.availability.plain import Record
from localckpt.availability.prefetch import SpareRecord
from localckpt.availability.recoverable import computable
from localckpt.errors import MismatchError
from localckpt.failure_texts import ranks_named, said_by
from localckpt.ids import Checkpoint, CkptID, Generation, Group
from localckpt.lineage import EpochId, Lineage

Division = tuple[tuple[tuple[int, ...], int], ...]
"""Ranks that divide what they have equal, each set with a digest of what must be alike on them."""


def complete_checkpoints(inventory: Inventory) -> list[Checkpoint]:
    """Return the checkpoints whose shards are all held or can be computed, the newest first."""
    # Sorted with the incomplete ones, since these can overrule checkpoints that they gave up.
    held = {
        checkpoint: _available(checkpoint, inventory)
        for checkpoint in newest_first(inventory.checkpoints, inventory.lineages)
    }
    return [
        checkpoint
        for checkpoint, shards in held.items()
        # The cheap comparison first: never loop up to a huge world size that a header claims.
        if len(shards) >= checkpoint.world_size and not _lacking(checkpoint, shards)
    ]


def describe_incomplete(inventory: Inventory) -> str:
    lines = [
        f"iteration {checkpoint.iteration} (generation {checkpoint.generation}, "
        f"{_ranks(checkpoint.world_size)}) lacks the shards of ranks {', '.join(map(str, gone))}"
        for checkpoint in newest_first(inventory.checkpoints, inventory.lineages)
        if (gone := _lacking(checkpoint, _available(checkpoint, inventory)))
    ]
    return "; ".join(lines) or "no shard of this session was found on any node"


def describe_choice(taken: Checkpoint, others: Sequence[Checkpoint]) -> str:
    left = ", ".join(
        f"iteration {other.iteration} of epoch {other.generation.epoch_id}" for other in others
    )
    return (
        f"iteration {taken.iteration} of epoch {taken.generation.epoch_id} is taken, and {left} is "
        f"left: the job went on without knowing of it, and the greater iteration counts. See "
        f"explain(), and load(iteration=) if the other one is wanted"
    )


def _available(checkpoint: Checkpoint, inventory: Inventory) -> set[int]:
    return inventory.shards(checkpoint).keys() | computable(checkpoint, inventory).keys()


def _lacking(checkpoint: Checkpoint, held: Container[int]) -> list[int]:
    return [rank for rank in range(checkpoint.world_size) if rank not in held]


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


class JoinRecord(NamedTuple):
    session_id: str
    world_size: int
    format_version: str
    failure_domain: str
    newest_epoch: int
    owner: str = ""
    """Process that owns the rank's store."""
    draw: int = 0
    """Random number; that of rank 0 identifies this attempt among all others."""
    is_elastic: bool = False
    """Whether the rank loads what another number of ranks saved."""


def judge_join(records: Sequence[JoinRecord]) -> None:
    """Raise MismatchError, with the ranks of each value, if the ranks were started differently."""
    for what, values in (
        ("session_id", [r.session_id for r in records]),
        ("world size", [r.world_size for r in records]),
        ("format version", [r.format_version for r in records]),
        ("elastic", [r.is_elastic for r in records]),
    ):
        if len(set(values)) > 1:
            raise MismatchError(
                f"the ranks of this job do not have the same {what}: {_by_value(values)}. Start "
                f"all of them alike; nothing was changed"
            )


def judge_resumed(reports: Sequence[Any]) -> None:
    """Raise MismatchError unless all ranks resume from the same iteration and lineage."""
    points = [iteration for iteration, _ in reports]
    if any(other != reports[0] for other in reports):
        raise MismatchError(
            f"the ranks of this job do not begin from the same iteration of the same lineage: "
            f"{_by_value(points)}. Call begin() alike on all ranks; nothing was changed"
        )


def judge_newest(
    complete: Sequence[Checkpoint], world_size: int, *, is_elastic: bool = False
) -> None:
    """Raise MismatchError if another number of ranks saved the first complete checkpoint."""
    if complete and complete[0].world_size != world_size and not is_elastic:
        raise MismatchError(
            f"the newest checkpoint, iteration {complete[0].iteration}, was saved by "
            f"{_ranks(complete[0].world_size)}, and this job has {world_size}. Start with "
            f"{_ranks(complete[0].world_size)}, make the manager with elastic=True, or load from "
            f"shared storage and save on from there; the session_id may stay. Nothing was changed"
        )


def judge_nodes(newest: Checkpoint, world_size: int, least_nodes: int) -> None:
    """Raise MismatchError if as many ranks cannot be on all nodes that a checkpoint needs."""
    if world_size < least_nodes:
        raise MismatchError(
            f"the shards of iteration {newest.iteration} are spread over {least_nodes} nodes at "
            f"least, {_ranks(world_size)} cannot be on all of these, and a node without a rank of "
            f"the job is not read. Start with {least_nodes} ranks or more, one on each node, or "
            f"load from shared storage. Nothing was changed"
        )


class Standing(NamedTuple):
    """Durability of a kept checkpoint as a rank has found it; numbers as in a ``Durability``."""

    checkpoint: Checkpoint
    copies: int
    wanted: int
    lacking: int


@dataclass(frozen=True, slots=True)
class SaveOutcome(Record):
    iteration: int
    generation: Generation
    error: str | None
    missing: tuple[CkptID, ...]
    kept: tuple[int, ...] = ()
    """Other ranks whose shards this rank keeps."""
    wanted: int = 1
    """Target number of copies of this rank's shard; see :class:`Durability`."""
    group: Group | None = None
    """Group for which this rank also keeps a piece of another kind; ``None`` for none."""
    bad: str | None = None
    """Why the state is bad, according to its check; ``None`` if it is not, or has no check."""
    replicas: tuple[tuple[int, int], ...] = ()
    """Sets of ranks, each with the digest of what this rank has in common with them."""
    divided: Division = ()
    """Ranks among which tensors are divided, each with what they must have alike."""
    metric: float | None = None
    """Value of the metric of the retention; ``None`` for none. That of the first rank counts."""
    lacking: tuple[Checkpoint, ...] = ()
    """Kept checkpoints of which this node has lost pieces, or that have too few copies."""
    found: tuple[Standing, ...] = ()
    """Kept checkpoints that a repair has found otherwise than all ranks know."""
    nbytes: int = 0
    """Size of this rank's shard."""
    spares: tuple[SpareRecord, ...] = ()
    """Spares that the first rank sees; none on the others."""
    places: tuple[int, ...] = ()
    """Number of each rank's node, if there are spares."""


def division_problem(divided: Sequence[Division]) -> str | None:
    told = [{tuple(ranks): digest for ranks, digest in of_rank} for of_rank in divided]
    for rank, of_rank in enumerate(told):
        for ranks, digest in of_rank.items():
            other = next((r for r in ranks if told[r].get(ranks) != digest), None)
            if other is not None:
                return (
                    f"ranks {rank} and {other} were to divide what their states say is equal on "
                    f"ranks {', '.join(map(str, ranks))}, and these parts of their states have "
                    f"different keys, shapes or dtypes: mark with replicated() only what all of "
                    f"them have, or give divide_replicated=False"
                )
    return None


def save_problems(outcomes: Sequence[SaveOutcome]) -> list[str]:
    """Return the reasons why a save is not complete, with ranks; empty if it is complete."""
    problems = []
    for what, values in (
        ("iteration", [str(o.iteration) for o in outcomes]),
        ("save number", [str(o.generation) for o in outcomes]),
    ):
        if len(set(values)) > 1:
            problems.append(f"the ranks saved different {what}s: {_by_value(values)}")
    if errors := {rank: o.error for rank, o in enumerate(outcomes) if o.error is not None}:
        problems.append(said_by(errors))
    for rank, outcome in enumerate(outcomes):
        if outcome.error is None and outcome.missing:
            shards = ", ".join(
                f"rank {ckpt_id.rank}'s shard of iteration {ckpt_id.iteration}"
                for ckpt_id in outcome.missing
            )
            problems.append(f"rank {rank} was to keep {shards}, and does not have it")
    if not problems and (apart := division_problem([o.divided for o in outcomes])) is not None:
        problems.append(apart)
    return problems


def why_bad(outcomes: Sequence[SaveOutcome]) -> str | None:
    told = {rank: outcome.bad for rank, outcome in enumerate(outcomes) if outcome.bad is not None}
    return said_by(told) if told else None


def _by_value(values: Sequence[Any]) -> str:
    ranks: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ", ".join(f"{value!r} on {ranks_named(on)}" for value, on in ranks.items())


def _ranks(count: int) -> str:
    return f"{count} rank{'s'[: count != 1]}"
