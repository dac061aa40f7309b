"""Messages about long waits for other ranks: whom a rank waits for, and how long it has."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

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

    def left_s(self, whom: Callable[[], str]) -> float:
        """Log the wait if it is time; return the seconds until the next message.

        Args:
            whom: Returns the ranks that are waited for, in words.
        """
        waited_s = time.monotonic() - self._began
        if waited_s >= self._next_s:
            self._next_s = 2 * waited_s
            logger.log(
                self._level,
                "rank %d has waited %.0f s to %s, for %s",
                *(self._rank, waited_s, self._what, whom()),
            )
        return self._next_s - waited_s
