"""Reports of the last save and the last load, and of the memory that saves take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from localckpt.errors import CheckpointingException
from localckpt.ids import Piece
from localckpt.memory.limits import memory_limits
from localckpt.storage.directory import DirectoryStore


@dataclass(frozen=True, slots=True)
class SaveReport:
    """One save on one rank; times in seconds from the call of ``save``.

    Attributes:
        iteration: What was saved.
        nbytes: Bytes of this rank's image.
        stage_s: Time to capture the state.
        replicate_s: Time to exchange replicas; ``None`` until that is done.
        stall_s: How long training waited for ``save``.
        durable_s: When all that this rank keeps of it was durable; ``None`` until then.
        sent_nbytes: Bytes that this rank sent to others, which keep replicas of its image; ``None``
            until that is done, and where no replicas are kept.
        skipped: Nothing was saved, because older saves still used all staging buffers.
    """

    iteration: int
    nbytes: int
    stage_s: float
    replicate_s: float | None
    stall_s: float
    durable_s: float | None = None
    sent_nbytes: int | None = None
    skipped: bool = False

    def __str__(self) -> str:
        if self.skipped:
            return f"iteration {self.iteration}: skipped"
        speed = _speed(self.nbytes, self.stage_s)
        steps = [f"{self.nbytes} bytes, staged in {self.stage_s:.3f} s ({speed})"]
        if self.replicate_s is not None:
            sent = "" if self.sent_nbytes is None else f" with {self.sent_nbytes} bytes sent"
            steps.append(f"replicated in {self.replicate_s:.3f} s{sent}")
        steps.append(f"training waited {self.stall_s:.3f} s")
        if self.durable_s is not None:
            steps.append(f"durable after {self.durable_s:.3f} s")
        return f"iteration {self.iteration}: {', '.join(steps)}"


@dataclass(frozen=True, slots=True)
class LoadReport:
    """One load on one rank.

    Attributes:
        iteration: What was loaded.
        nbytes: Bytes of this rank's image.
        seconds: From the call of ``load`` to its return.
        source: ``"own node"``, ``"peer rank <n>"``, or the kind of the pieces that it was computed
            from.
    """

    iteration: int
    nbytes: int
    seconds: float
    source: str

    def __str__(self) -> str:
        return (
            f"iteration {self.iteration} from {self.source}: {self.nbytes} bytes in "
            f"{self.seconds:.3f} s ({_speed(self.nbytes, self.seconds)})"
        )


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Host memory that one rank's saves take, in bytes, once all of it is in use.

    Attributes:
        image_nbytes: This rank's image.
        replicas: How many images of other ranks it keeps.
        staging_nbytes: Buffers that saves pass through.
        kept_nbytes: Checkpoints that stay in memory; 0 where they are on disk.
        shared: Whether it is shared memory (``/dev/shm``).
        pieces: Bytes of each other kind of piece that this rank keeps of other ranks' images.
        available_nbytes: Memory that the process could still take when this was asked.
        limit: Name of the limit that leaves no more: the node's memory, a cgroup's, ``RLIMIT_AS``.
    """

    image_nbytes: int
    replicas: int
    staging_nbytes: int
    kept_nbytes: int
    shared: bool
    pieces: Mapping[str, int] = field(default_factory=dict)
    available_nbytes: int = field(default=0, compare=False)
    limit: str = field(default="", compare=False)

    @classmethod
    def of_store(cls, store: DirectoryStore) -> MemoryPlan:
        """The plan of a store's rank."""
        rank, images = store.rank, store.image_nbytes
        if Piece(rank) not in images:
            raise CheckpointingException(
                "nothing is known of the state yet: call warm_up(state) or save() first"
            )
        replicas = sum(piece.is_shard and piece.rank != rank for piece in images)
        pieces = {p.kind: images[p] for p in images if p.rank == rank and not p.is_shard}
        staging_nbytes, kept_nbytes, shared = store.planned_nbytes()
        tightest = min(memory_limits(), key=lambda limit: limit.available_nbytes)
        return cls(
            *(images[Piece(rank)], replicas, staging_nbytes, kept_nbytes, shared, pieces),
            *(tightest.available_nbytes, tightest.name),
        )

    @property
    def nbytes(self) -> int:
        """Staging buffers and kept checkpoints together."""
        return self.staging_nbytes + self.kept_nbytes

    def __str__(self) -> str:
        pieces = "".join(f", {n / 1e6:.1f} MB of {kind}," for kind, n in self.pieces.items())
        return (
            f"an image of {self.image_nbytes / 1e6:.1f} MB{pieces} and {self.replicas} replicas of "
            f"other ranks' take {self.nbytes / 1e6:.1f} MB of "
            f"{'shared' if self.shared else 'private'} memory, {self.kept_nbytes / 1e6:.1f} MB of "
            f"it to keep checkpoints in"
        )


def _speed(nbytes: int, seconds: float) -> str:
    return f"{nbytes / max(seconds, 1e-9) / 1e9:.2f} GB/s"
