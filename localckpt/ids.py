"""What a shard is called.

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
    "MOST_MEMBERS",
    "MOST_PARITIES",
    "MOST_RANKS",
    "SAVES_AN_ATTEMPT",
    "Checkpoint",
    "CkptID",
    "Generation",
    "ParityGroup",
    "Series",
    "ShardIdentity",
    "ShardRecord",
]

SAVES_AN_ATTEMPT = 2**28
"""The numbers of an attempt's saves begin at a multiple of it, drawn at random."""

MOST_RANKS = 1 << 20
"""Far above any job: whoever looks for the shards of all ranks counts up to what is claimed."""

MOST_MEMBERS = 255
"""No parity group has more: so many different powers x has in the field of its arithmetic."""

MOST_PARITIES = 2
"""No parity group has more."""


class CkptID(NamedTuple):
    """Names one rank's shard. Equals the plain tuple ``(iteration, rank, session_id)``."""

    iteration: int
    rank: int
    session_id: str


class Generation(NamedTuple):
    """Which attempt of the job wrote a shard.

    ``epoch`` is more than the highest that any store knew when the job (re)started, ``sequence``
    counts the saves of that job, from a number that is drawn when it starts. Neither orders
    checkpoints of different attempts: see ``managers/ordering.py``.
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


class Series(NamedTuple):
    """What a rank keeps at every save: one rank's shard, or its own parity.

    Images of one series are of about one size, and use each other's memory.
    """

    rank: int
    is_parity: bool = False


@dataclass(frozen=True, slots=True)
class ShardIdentity:
    """Everything that tells one shard from another; kept in the image's header.

    The parity that a rank keeps for its group has an identity of the same form. The lineage of the
    epoch travels with it, and tells nothing apart; files of earlier versions have none.
    """

    session_id: str
    generation: Generation
    iteration: int
    rank: int
    world_size: int
    is_parity: bool = False
    lineage: Lineage | None = field(default=None, compare=False, repr=False)

    @property
    def ckpt_id(self) -> CkptID:
        return CkptID(self.iteration, self.rank, self.session_id)

    @property
    def checkpoint(self) -> Checkpoint:
        """What it is a shard of."""
        return Checkpoint(self.generation, self.iteration, self.world_size)

    @property
    def series(self) -> Series:
        """What it is one of."""
        return Series(self.rank, self.is_parity)

    @property
    def parity(self) -> ShardIdentity:
        """The parity that its rank keeps beside it."""
        return replace(self, is_parity=True)

    @property
    def seed(self) -> str:
        """Seeds the digests of its blocks."""
        generation = f"{self.generation.epoch}.{self.generation.sequence}"
        kind = "parity/" if self.is_parity else ""
        return f"{kind}{generation}/{self.iteration}/{self.rank}/{self.session_id}"

    def __str__(self) -> str:
        kind = "the parity of " if self.is_parity else ""
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
        """What one rank's shard of it is."""
        return ShardIdentity(session_id, self.generation, self.iteration, rank, self.world_size)


@dataclass(frozen=True, slots=True)
class ParityGroup:
    """Ranks that keep parity of each other's shards.

    Args:
        ranks: In the order of their ring.
        parity: How many of them may be lost.

    Raises:
        MismatchError: No group can be so.
    """

    ranks: tuple[int, ...]
    parity: int

    def __post_init__(self) -> None:
        # JSON's true is an int to Python.
        if set(map(type, (*self.ranks, self.parity))) != {int}:
            raise MismatchError("the ranks of a parity group, and its parities, are whole numbers")
        most = min(MOST_PARITIES, len(self.ranks) - 2)
        if not 1 <= self.parity <= most or len(self.ranks) > MOST_MEMBERS:
            raise MismatchError(
                f"a group of {len(self.ranks)} ranks with {self.parity} parities cannot be: there "
                f"are at most {MOST_PARITIES} parities, at least two ranks more than these, and at "
                f"most {MOST_MEMBERS}"
            )
        if len(set(self.ranks)) < len(self.ranks) or not (
            0 <= min(self.ranks) <= max(self.ranks) < MOST_RANKS
        ):
            raise MismatchError(
                f"a parity group has different ranks, from 0 to {MOST_RANKS - 1}: not "
                f"{self.ranks!r:.200}"
            )

    def behind(self, rank: int) -> tuple[int, ...]:
        """The ranks that come before a member in the ring, the nearest first: one a parity.

        It keeps what is needed to tell that their shards are what was lost.
        """
        place = self.ranks.index(rank)
        return tuple(self.ranks[place - step] for step in range(1, self.parity + 1))


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """A shard that is kept somewhere, and the size of its image.

    For parity, the group that it is of.
    """

    identity: ShardIdentity
    nbytes: int
    group: ParityGroup | None = None
