"""Messages about long waits for other ranks: whom a rank waits for, and how long it has."""

from __future__ import annotations

import logging
import time

__all__ = ["Patience"]

logger = logging.getLogger(__name__)

_SILENT_S = 5.0


class Patience:
    """Back-off of the messages about one wait: the first soon, the next when it is twice as long.

    Args:
        rank: The rank that waits, as a rank of the job.
        what: What it waits to do, as an infinitive.
        level: Level of the messages.
    """

    def __init__(self, rank: int, what: str, level: int = logging.WARNING) -> None:
        self._rank, self._what, self._level = rank, what, level
        self._began = time.monotonic()
        self._next_s = _SILENT_S

    @property
    def left_s(self) -> float:
        """Seconds until the next message is due; 0 once it is."""
        return max(0.0, self._began + self._next_s - time.monotonic())

    def tell(self, whom: str) -> None:
        """Log the wait.

        Args:
            whom: The ranks that are waited for, in words.
        """
        waited_s = time.monotonic() - self._began
        self._next_s = 2 * waited_s
        logger.log(
            self._level,
            "rank %d has waited %.0f s to %s, for %s",
            *(self._rank, waited_s, self._what, whom),
        )
