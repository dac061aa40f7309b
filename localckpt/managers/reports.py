"""A save while it is under way, and what a manager tells of its last save and its last load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from localckpt.async_save.foreign import ForeignOutcome
from localckpt.async_save.request import Ticket
from localckpt.ids import ParityGroup, Series, ShardIdentity
from localckpt.managers.shelf import StagedShard
from localckpt.threads import Task

__all__ = ["LoadReport", "SaveReport", "SaveUnderWay"]


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
        skipped: Nothing was saved, because older saves still used all staging buffers.
    """

    iteration: int
    nbytes: int
    stage_s: float
    replicate_s: float | None
    stall_s: float
    durable_s: float | None = None
    skipped: bool = False

    @classmethod
    def of_skipped(cls, iteration: int) -> SaveReport:
        return cls(iteration, 0, 0.0, None, 0.0, skipped=True)

    def __str__(self) -> str:
        if self.skipped:
            return f"iteration {self.iteration}: skipped"
        speed = _speed(self.nbytes, self.stage_s)
        steps = [f"{self.nbytes} bytes, staged in {self.stage_s:.3f} s ({speed})"]
        if self.replicate_s is not None:
            steps.append(f"replicated in {self.replicate_s:.3f} s")
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
        source: ``"own node"``, ``"peer rank <n>"``, or ``"parity"``.
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
        parity_nbytes: The parity that this rank keeps of other ranks' images; 0 without.
    """

    image_nbytes: int
    replicas: int
    staging_nbytes: int
    kept_nbytes: int
    shared: bool
    parity_nbytes: int = 0

    @classmethod
    def of(
        cls,
        images: Mapping[Series, int],
        rank: int,
        staging_nbytes: int,
        kept_nbytes: int,
        *,
        shared: bool,
    ) -> MemoryPlan:
        """The plan of a rank for images of these sizes."""
        replicas = sum(not series.is_parity and series.rank != rank for series in images)
        parity_nbytes = images.get(Series(rank, is_parity=True), 0)
        own_nbytes = images[Series(rank)]
        return cls(own_nbytes, replicas, staging_nbytes, kept_nbytes, shared, parity_nbytes)

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.staging_nbytes + self.kept_nbytes

    def __str__(self) -> str:
        parity = f", {self.parity_nbytes / 1e6:.1f} MB of parity," if self.parity_nbytes else ""
        return (
            f"an image of {self.image_nbytes / 1e6:.1f} MB{parity} and {self.replicas} replicas of "
            f"other ranks' take {self.nbytes / 1e6:.1f} MB of "
            f"{'shared' if self.shared else 'private'} memory, {self.kept_nbytes / 1e6:.1f} MB of "
            f"it to keep checkpoints in"
        )


@dataclass(eq=False)
class SaveUnderWay:
    """One save between its call and its end; times by ``time.monotonic()``.

    Attributes:
        ticket: Its place in a queue of ours; ``None`` in no queue, or in a foreign one.
        is_scheduled: Whether somebody carries it out: a queue, or who called its function.
        is_returned: Whether ``save`` has returned its request.
        is_told: Whether other ranks may have learned how it ended here.
        is_finalized: Whether all ranks have agreed that it is complete.
        shards: What this rank keeps, its own first.
        copies: What comes of replicating it.
        copies_come_later: Whether that is behind training.
        kept: Ranks whose shards have come here and are kept, too.
        group: The ranks whose parity is kept here, too.
        outcome: What the process of a foreign queue tells of it; ``None`` in a queue of ours.
        here: What this process does of it for a foreign queue.
    """

    identity: ShardIdentity
    called: float
    previous_iteration: int
    shards: list[StagedShard] = field(default_factory=list)
    copies: Task[list[StagedShard]] | None = None
    copies_come_later: bool = False
    kept: list[int] = field(default_factory=list)
    group: ParityGroup | None = None
    ticket: Ticket | None = None
    is_scheduled: bool = False
    is_returned: bool = False
    is_told: bool = False
    is_finalized: bool = False
    outcome: ForeignOutcome | None = None
    here: Task[None] | None = None
    error: str | None = None
    staged: float = 0.0
    replicate_s: float | None = None
    returned: float = 0.0
    durable: float | None = None

    def take_ticket(self, ticket: Ticket) -> None:
        """Note the place in a queue of ours, which carries the save out."""
        self.ticket, self.is_scheduled = ticket, True

    def report(self) -> SaveReport:
        """What there is to tell so far."""
        return SaveReport(
            self.identity.iteration,
            self.shards[0].nbytes if self.shards else 0,
            self.staged - self.called if self.shards else 0.0,
            self.replicate_s,
            self.returned - self.called,
            None if self.durable is None else self.durable - self.called,
        )


def _speed(nbytes: int, seconds: float) -> str:
    return f"{nbytes / max(seconds, 1e-9) / 1e9:.2f} GB/s"
