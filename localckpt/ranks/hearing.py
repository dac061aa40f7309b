"""Hears, while a rank does its part of a round, that another rank has ended the round."""

from __future__ import annotations

from collections.abc import Callable

from localckpt.errors import PeerLostError
from localckpt.ranks.deadline import begin
from localckpt.ranks.deciding import Deciding
from localckpt.threads import Latch

__all__ = ["Hearing"]


class Hearing:
    """A thread that waits for the verdict on a round, until this rank has done its part.

    A verdict that is there before is a failure, and this rank's part is in vain.

    Args:
        deciding: This rank's part in the rounds.
        number: Of the round.
        what: What the ranks do together.
        in_vain: Called once there is a verdict, or the job's store cannot be reached.

    Raises:
        CheckpointingException: No thread can be had.

    Attributes:
        has_verdict: Whether there is a verdict.
        error: Why that cannot be known.
    """

    def __init__(
        self, deciding: Deciding, number: int, what: str, in_vain: Callable[[], None]
    ) -> None:
        self._deciding = deciding
        self._number = number
        self._what = what
        self._in_vain = in_vain
        self._over = Latch()
        self.has_verdict = False
        self.error: PeerLostError | None = None
        begin(self._hear)

    def end(self) -> None:
        """End the wait: this rank has done its part."""
        self._over.set()

    def _hear(self) -> None:
        try:
            self.has_verdict = self._deciding.hear(self._number, self._what, self._over)
        except PeerLostError as error:
            self.error = error
        if self.has_verdict or self.error is not None:
            self._in_vain()
