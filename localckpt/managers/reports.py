"""Reports of the last save and the last load."""

from __future__ import annotations

from dataclasses import dataclass


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
            until that is done, and where no replicas are kept. Blocks of 1 MiB that the peer's
            memory still has from an older save are not sent.
        written_nbytes: Bytes that were written to the file of the image, without the blocks that
            it had already; 0 in shared memory, where images are staged in their files. ``None``
            until that is done.
        skipped: Nothing was saved, because older saves still used all staging buffers.
    """

    iteration: int
    nbytes: int
    stage_s: float
    replicate_s: float | None
    stall_s: float
    durable_s: float | None = None
    sent_nbytes: int | None = None
    written_nbytes: int | None = None
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
            written = (
                "" if not self.written_nbytes else f" with {self.written_nbytes} bytes written"
            )
            steps.append(f"durable after {self.durable_s:.3f} s{written}")
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


def _speed(nbytes: int, seconds: float) -> str:
    return f"{nbytes / max(seconds, 1e-9) / 1e9:.2f} GB/s"
