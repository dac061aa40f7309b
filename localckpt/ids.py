"""Names of shards and other pieces.

Plain values, without torch: they cross process borders, stand in file headers and in the small
records that ranks exchange.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from localckpt.errors import MismatchError
from localckpt.lineage import MOST_DIGITS, EpochId, Lineage

__all__ = [
    "MOST_DIGITS",
    "MOST_RANKS",
    "SAVES_AN_ATTEMPT",
    "SHARD_KIND",
    "Checkpoint",
    "CkptID",
    "Generation",
    "Group",
    "Piece",
    "ShardIdentity",
    "ShardRecord",
]

SAVES_AN_ATTEMPT = 2**28
"""The numbers of an attempt's saves begin at a multiple of it, drawn at random."""

MOST_RANKS = 1 << 20
"""Far above any job: whoever looks for the shards of all ranks counts up to what is claimed."""

SHARD_KIND = "shard"
"""Kind of a piece that is the shard itself."""


class CkptID(NamedTuple):
    """Names one rank's shard. Equals the plain tuple ``(iteration, rank, session_id)``."""

    iteration: int
    rank: int
    session_id: str


class Generation(NamedTuple):
    """Attempt of the job that wrote a shard.

    ``epoch`` is more than the highest that any store knew when the job (re)started, ``sequence``
    counts the saves of that job, from a number that is drawn when it starts. Neither orders
    checkpoints of different attempts: see ``availability/ordering.py``.
    """

    epoch: int
    sequence: int

    @property
    def epoch_id(self) -> EpochId:
        """Identity of the attempt."""
        return EpochId(self.epoch, self.sequence // SAVES_AN_ATTEMPT)

    def next(self) -> Generation:
        """That of the next save."""
        return Generation(self.epoch, self.sequence + 1)

    def __str__(self) -> str:
        """The epoch and the number of the save, for people: without what was drawn."""
        return f"{self.epoch}.{self.sequence % SAVES_AN_ATTEMPT}"


class Piece(NamedTuple):
    """One thing that a node can hold of a checkpoint: a rank's shard, or what it keeps for others.

    A kind is a lowercase word: ``"shard"``, or the name of a redundancy scheme's own pieces. Images
    of the same piece at different iterations are of about one size, and use each other's memory.
    """

    rank: int
    kind: str = SHARD_KIND

    @property
    def is_shard(self) -> bool:
        """True if it is the rank's shard."""
        return self.kind == SHARD_KIND


@dataclass(frozen=True, slots=True)
class ShardIdentity:
    """Everything that tells one piece of a checkpoint from another; kept in the image's header.

    The lineage of the epoch travels with it, and tells nothing apart; files of earlier versions
    have none.
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
        """Checkpoint that it belongs to."""
        return Checkpoint(self.generation, self.iteration, self.world_size)

    @property
    def piece(self) -> Piece:
        """The piece that this is, at one iteration."""
        return Piece(self.rank, self.kind)

    @property
    def is_shard(self) -> bool:
        """True if it is the shard of its rank."""
        return self.kind == SHARD_KIND

    def of_kind(self, kind: str) -> ShardIdentity:
        """Identity of another piece of the same rank and checkpoint."""
        return replace(self, kind=kind)

    @property
    def seed(self) -> str:
        """Seeds the digests of its blocks."""
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
        """Identity of one rank's shard."""
        return ShardIdentity(session_id, self.generation, self.iteration, rank, self.world_size)


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that protect each other's shards.

    Args:
        ranks: The members, in an order that the redundancy scheme gives them.
        spare: Number of members that may be lost, whichever they are.
        kind: Kind of the pieces by which they do.

    Raises:
        MismatchError: No group has such numbers.
    """

    ranks: tuple[int, ...]
    spare: int
    kind: str = SHARD_KIND

    def __post_init__(self) -> None:
        # JSON's true is an int to Python.
        if set(map(type, (*self.ranks, self.spare))) != {int}:
            raise MismatchError(
                "the ranks of a group, and how many of them may be lost, are whole numbers"
            )
        # Only whoever is alone protects nothing.
        if not min(1, len(self.ranks) - 1) <= self.spare < len(self.ranks):
            raise MismatchError(
                f"it says that {self.spare} of a group of {len(self.ranks)} ranks may be lost"
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
    """A piece that is kept somewhere, and the size of its image.

    For a piece that is no shard, the group that it protects.
    """

    identity: ShardIdentity
    nbytes: int
    group: Group | None = None
