"""Identities of shards and other pieces.

Plain values, without torch: they are sent between processes, and stored in file headers and in the
small records that ranks exchange.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from localckpt.errors import MismatchError
from localckpt.lineage import MOST_DIGITS as MOST_DIGITS
from localckpt.lineage import EpochId, Lineage

SAVES_AN_ATTEMPT = 2**28
"""Step of sequence numbers: an attempt numbers its saves from a random multiple of this."""

_LONE_SAVES = 1 << 10

MOST_RANKS = 1 << 20
"""Limit of a claimed world size, far above any job: code that checks all shards loops up to it."""

SHARD_KIND = "shard"
"""Kind of a piece that is a rank's shard."""


class CkptID(NamedTuple):
    """Name of one rank's shard; equals the plain tuple ``(iteration, rank, session_id)``."""

    iteration: int
    rank: int
    session_id: str


class Generation(NamedTuple):
    """Number of a save: the attempt (one start of the job) and the save's number in it.

    ``epoch`` is higher than that of any store when the attempt began. ``sequence`` counts the saves
    of the attempt from a random start. Neither orders checkpoints of different attempts.
    """

    epoch: int
    sequence: int

    @property
    def epoch_id(self) -> EpochId:
        return EpochId(self.epoch, self.sequence // SAVES_AN_ATTEMPT)

    def next(self) -> Generation:
        return Generation(self.epoch, self.sequence + 1)

    def beyond(self) -> Generation:
        """Return a generation that no rank has used, whatever few saves it made alone."""
        return Generation(self.epoch, (self.sequence // _LONE_SAVES + 1) * _LONE_SAVES)

    def __str__(self) -> str:
        return f"{self.epoch}.{self.sequence % SAVES_AN_ATTEMPT}"


class Piece(NamedTuple):
    """One thing that a node can hold of a checkpoint: a rank's shard, or redundancy data.

    Its images at different iterations have about the same size, and reuse the same buffers.
    """

    rank: int
    kind: str = SHARD_KIND

    @property
    def is_shard(self) -> bool:
        return self.kind == SHARD_KIND


@dataclass(frozen=True, slots=True)
class ShardIdentity:
    """Identity of one piece of one checkpoint, stored in the image's header.

    ``lineage`` is stored with the identity but is no part of it.
    """

    session_id: str
    generation: Generation
    iteration: int
    rank: int
    world_size: int
    kind: str = SHARD_KIND
    lineage: Lineage | None = field(default=None, compare=False, repr=False)

    @property
    def ckpt_id(self) -> CkptID:
        return CkptID(self.iteration, self.rank, self.session_id)

    @property
    def checkpoint(self) -> Checkpoint:
        return Checkpoint(self.generation, self.iteration, self.world_size)

    @property
    def piece(self) -> Piece:
        return Piece(self.rank, self.kind)

    @property
    def is_shard(self) -> bool:
        return self.kind == SHARD_KIND

    def of_kind(self, kind: str) -> ShardIdentity:
        return replace(self, kind=kind)

    @property
    def seed(self) -> str:
        generation = f"{self.generation.epoch}.{self.generation.sequence}"
        kind = "" if self.is_shard else f"{self.kind}/"
        return f"{kind}{generation}/{self.iteration}/{self.rank}/{self.session_id}"

    def __str__(self) -> str:
        kind = "" if self.is_shard else f"the {self.kind} of "
        return (
            f"{kind}iteration {self.iteration} of rank {self.rank} (session {self.session_id!r}, "
            f"generation {self.generation})"
        )


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The shards of all ranks at one iteration and generation."""

    generation: Generation
    iteration: int
    world_size: int

    def shard(self, rank: int, session_id: str) -> ShardIdentity:
        return ShardIdentity(session_id, self.generation, self.iteration, rank, self.world_size)


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that protect each other's shards, in the redundancy scheme's order.

    ``tolerated`` members, any of them, may be lost. Raises MismatchError for impossible numbers.
    """

    ranks: tuple[int, ...]
    tolerated: int
    kind: str = SHARD_KIND

    def __post_init__(self) -> None:
        # type(), because isinstance(True, int) holds.
        if set(map(type, (*self.ranks, self.tolerated))) != {int}:
            raise MismatchError(
                "the ranks of a group, and how many of them may be lost, are whole numbers"
            )
        # Only a group of one rank protects nothing.
        if not min(1, len(self.ranks) - 1) <= self.tolerated < len(self.ranks):
            raise MismatchError(
                f"it says that {self.tolerated} of a group of {len(self.ranks)} ranks may be lost"
            )
        if len(set(self.ranks)) < len(self.ranks) or not (
            0 <= min(self.ranks) <= max(self.ranks) < MOST_RANKS
        ):
            raise MismatchError(
                f"it says that a group has the ranks {self.ranks!r:.200}: they must be different, "
                f"and from 0 to {MOST_RANKS - 1}"
            )


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """A stored piece, the size of its image and, unless it is a shard, the group it protects."""

    identity: ShardIdentity
    nbytes: int
    group: Group | None = None
