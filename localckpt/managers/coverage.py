"""Which checkpoints are complete, and whether a save is: pure functions of the ranks' reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localckpt.errors import MismatchError
from localckpt.ids import CkptID, Generation, ShardIdentity, ShardRecord

__all__ = [
    "Checkpoint",
    "JoinRecord",
    "SaveOutcome",
    "complete_checkpoints",
    "describe_incomplete",
    "held_shards",
    "judge_join",
    "judge_newest",
    "save_problems",
]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The shards of all ranks at one iteration and generation."""

    generation: Generation
    iteration: int
    world_size: int

    @property
    def version(self) -> tuple[int, int, int, int]:
        """Order among checkpoints; see :attr:`ShardIdentity.version`."""
        return self.shard(0, "").version

    def shard(self, rank: int, session_id: str) -> ShardIdentity:
        """What one rank's shard of it is."""
        return ShardIdentity(session_id, self.generation, self.iteration, rank, self.world_size)


def held_shards(
    checkpoint: Checkpoint, holdings: Mapping[int, Sequence[ShardRecord]]
) -> dict[int, list[CkptID]]:
    """The shards of a checkpoint that each rank's node holds."""
    return {
        holder: [
            identity.ckpt_id
            for identity in (record.identity for record in records)
            if identity == checkpoint.shard(identity.rank, identity.session_id)
        ]
        for holder, records in holdings.items()
    }


def _owners(
    holdings: Mapping[int, Sequence[ShardRecord]],
) -> dict[Checkpoint, set[int]]:
    owners: dict[Checkpoint, set[int]] = {}
    for records in holdings.values():
        for record in records:
            i = record.identity
            checkpoint = Checkpoint(i.generation, i.iteration, i.world_size)
            owners.setdefault(checkpoint, set()).add(i.rank)
    return owners


def complete_checkpoints(holdings: Mapping[int, Sequence[ShardRecord]]) -> list[Checkpoint]:
    """Checkpoints of which every rank's shard is held somewhere, the newest first.

    Args:
        holdings: What each rank's node holds.
    """
    found = [
        checkpoint
        for checkpoint, ranks in _owners(holdings).items()
        # Few ranks cannot be all of many: nobody counts up to what a header claims.
        if len(ranks) >= checkpoint.world_size and ranks >= set(range(checkpoint.world_size))
    ]
    return sorted(found, key=lambda c: c.version, reverse=True)


def describe_incomplete(holdings: Mapping[int, Sequence[ShardRecord]]) -> str:
    """One line for each checkpoint that lacks shards, the newest first."""
    lines = []
    for checkpoint, ranks in sorted(_owners(holdings).items(), key=lambda item: item[0].version):
        gone = [rank for rank in range(checkpoint.world_size) if rank not in ranks]
        if gone:
            lines.append(
                f"iteration {checkpoint.iteration} (generation {checkpoint.generation}, "
                f"{_ranks(checkpoint.world_size)}) lacks the shards of ranks "
                f"{', '.join(map(str, gone))}"
            )
    return "; ".join(reversed(lines)) or "no shard of this session was found on any node"


@dataclass(frozen=True, slots=True)
class JoinRecord:
    """What a rank says of itself when the job (re)starts."""

    session_id: str
    world_size: int
    format_version: str
    failure_domain: str
    newest_epoch: int
    owner: str = ""
    """The process that its store belongs to."""
    draw: int = 0
    """A random number; rank 0's tells this attempt from all others."""

    def to_json(self) -> list[Any]:
        return [
            self.session_id,
            self.world_size,
            self.format_version,
            self.failure_domain,
            self.newest_epoch,
            self.owner,
            self.draw,
        ]


def judge_join(records: Sequence[JoinRecord]) -> None:
    """Check what the ranks must have in common.

    Raises:
        MismatchError: It names the ranks on either side.
    """
    for what, values in (
        ("session_id", [r.session_id for r in records]),
        ("world size", [r.world_size for r in records]),
        ("format version", [r.format_version for r in records]),
    ):
        if len(set(values)) > 1:
            raise MismatchError(
                f"the ranks of this job do not have the same {what}: {_by_value(values)}. Start "
                f"all of them alike; nothing was changed"
            )


def judge_newest(complete: Sequence[Checkpoint], world_size: int) -> None:
    """Check that the newest complete checkpoint was saved by as many ranks as there are now.

    Raises:
        MismatchError: It was not; the message says what can be done.
    """
    if complete and complete[0].world_size != world_size:
        raise MismatchError(
            f"the newest checkpoint, iteration {complete[0].iteration}, was saved by "
            f"{_ranks(complete[0].world_size)}, and this job has {world_size}: local shards cannot "
            f"be split anew. Start with {_ranks(complete[0].world_size)}, or restore from shared "
            f"storage and give the job a new session_id. Nothing was changed"
        )


@dataclass(frozen=True, slots=True)
class SaveOutcome:
    """What a rank says when its part of a save is over."""

    iteration: int
    generation: Generation
    error: str | None
    missing: tuple[CkptID, ...]
    kept: tuple[int, ...] = ()
    """Other ranks whose shards it keeps."""
    wanted: int = 1
    """On how many nodes its own shard is to be."""

    def to_json(self) -> list[Any]:
        return [
            self.iteration,
            self.generation,
            self.error,
            self.missing,
            self.kept,
            self.wanted,
        ]

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> SaveOutcome:
        iteration, generation, error, missing, kept, wanted = fields
        return cls(
            iteration,
            Generation(*generation),
            error,
            tuple(CkptID(*ckpt_id) for ckpt_id in missing),
            tuple(kept),
            wanted,
        )


def save_problems(outcomes: Sequence[SaveOutcome]) -> list[str]:
    """Why a save is not complete, naming ranks; empty when it is."""
    problems = []
    for what, values in (
        ("iteration", [str(o.iteration) for o in outcomes]),
        ("save number", [str(o.generation) for o in outcomes]),
    ):
        if len(set(values)) > 1:
            problems.append(f"the ranks saved different {what}s: {_by_value(values)}")
    for rank, outcome in enumerate(outcomes):
        if outcome.error is not None:
            problems.append(f"rank {rank}: {outcome.error}")
        elif outcome.missing:
            shards = ", ".join(
                f"rank {ckpt_id.rank}'s shard of iteration {ckpt_id.iteration}"
                for ckpt_id in outcome.missing
            )
            problems.append(f"rank {rank} was to keep {shards}, and does not have it")
    return problems


def _by_value(values: Sequence[Any]) -> str:
    ranks: dict[Any, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(str(rank))
    return ", ".join(f"{value!r} on rank {'+'.join(on)}" for value, on in ranks.items())


def _ranks(count: int) -> str:
    return f"{count} rank{'s'[: count != 1]}"
