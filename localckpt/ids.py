"""What a shard is called and how shards are ordered.

Plain values, without torch: they cross process borders, stand in file headers and in the small
records that ranks exchange.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = [
    "MOST_DIGITS",
    "MOST_RANKS",
    "SAVES_AN_ATTEMPT",
    "Checkpoint",
    "CkptID",
    "Generation",
    "ShardIdentity",
    "ShardRecord",
]

SAVES_AN_ATTEMPT = 2**28
"""The numbers of an attempt's saves begin at a multiple of it, drawn at random."""

MOST_DIGITS = 19
"""No number of an identity has more digits."""

MOST_RANKS = 1 << 20
"""Far above any job: whoever looks for the shards of all ranks counts up to what is claimed."""


class CkptID(NamedTuple):
    """Names one rank's shard. Equals the plain tuple ``(iteration, rank, session_id)``."""

    iteration: int
    rank: int
    session_id: str


class Generation(NamedTuple):
    """Which attempt of the job wrote a shard.

    ``epoch`` is one more than the highest that any store knew when the job (re)started,
    ``sequence`` counts the saves of that job, from a number that is drawn when it starts.
    """

    epoch: int
    sequence: int

    def next(self) -> Generation:
        """That of the next save."""
        return Generation(self.epoch, self.sequence + 1)

    def __str__(self) -> str:
        """The epoch and the number of the save, for people: without what was drawn."""
        return f"{self.epoch}.{self.sequence % SAVES_AN_ATTEMPT}"


@dataclass(frozen=True, slots=True)
class ShardIdentity:
    """Everything that tells one shard from another; kept in the image's header."""

    session_id: str
    generation: Generation
    iteration: int
    rank: int
    world_size: int

    @property
    def ckpt_id(self) -> CkptID:
        return CkptID(self.iteration, self.rank, self.session_id)

    @property
    def checkpoint(self) -> Checkpoint:
        """What it is a shard of."""
        return Checkpoint(self.generation, self.iteration, self.world_size)

    @property
    def seed(self) -> str:
        """Seeds the digests of its blocks."""
        generation = f"{self.generation.epoch}.{self.generation.sequence}"
        return f"{generation}/{self.iteration}/{self.rank}/{self.session_id}"

    @property
    def version(self) -> tuple[int, int, int, int]:
        """Order among checkpoints: a later attempt beats a higher iteration of an older one.

        The world size only makes the order total, so that all ranks come to the same one.
        """
        return (
            self.generation.epoch,
            self.iteration,
            self.generation.sequence,
            self.world_size,
        )

    def __str__(self) -> str:
        return (
            f"iteration {self.iteration} of rank {self.rank} (session {self.session_id!r}, "
            f"generation {self.generation})"
        )


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


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """A shard that is kept somewhere, and the size of its image."""

    identity: ShardIdentity
    nbytes: int
