"""What a manager tells of its last save and its last load."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LoadReport", "SaveReport"]


@dataclass(frozen=True, slots=True)
class SaveReport:
    """One save on one rank; times in seconds from the call of ``save``.

    Attributes:
        iteration: What was saved.
        nbytes: Bytes of this rank's image.
        stage_s: Time to capture the state.
        replicate_s: Time to exchange replicas.
        stall_s: How long training waited for ``save``.
        durable_s: When this rank's shards were durable; ``None`` until they are.
    """

    iteration: int
    nbytes: int
    stage_s: float
    replicate_s: float
    stall_s: float
    durable_s: float | None = None


@dataclass(frozen=True, slots=True)
class LoadReport:
    """One load on one rank.

    Attributes:
        iteration: What was loaded.
        nbytes: Bytes of this rank's image.
        seconds: From the call of ``load`` to its return.
        source: ``"own node"`` or ``"peer rank <n>"``.
    """

    iteration: int
    nbytes: int
    seconds: float
    source: str
