"""Messages about long waits for other ranks: whom a rank waits for, and how long it has."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from localckpt.ranks.deadline import begin
from localckpt.threads import Latch
from localckpt.waiting import wait_until

logger = logging.getLogger(__name__)

_SILENT_S = 5.0


class Patience:
    """Back-off of the messages about one wait, warnings if it began in the main thread."""

    def __init__(self, rank: int, what: str, level: int | None = None) -> None:
        self._rank, self._what = rank, what
        is_training = threading.current_thread() is threading.main_thread()
        self._level = level or (logging.WARNING if is_training else logging.INFO)
        self.renew()

    def renew(self) -> None:
        """Note that what was waited for has come, and that more is waited for."""
        self._began, self._next_s = time.monotonic(), _SILENT_S

    def left_s(self, whom: Callable[[], str]) -> float:
        """Log the wait for ``whom()`` if it is time; return the seconds until the next message."""
        waited_s = time.monotonic() - self._began
        if waited_s >= self._next_s:
            self._next_s = 2 * waited_s
            logger.log(
                self._level,
                "rank %d has waited %.0f s to %s, for %s",
                *(self._rank, waited_s, self._what, whom()),
            )
        return self._next_s - waited_s

    def until(
        self,
        holds: Callable[[], bool],
        timeout_s: float,
        whom: Callable[[], str],
        *,
        longest_s: float = 0.25,
    ) -> bool:
        def is_over() -> bool:
            if not (is_met := holds()):
                self.left_s(whom)
            return is_met

        return wait_until(is_over, timeout_s, longest_s=longest_s)

    def wait(
        self, wait: Callable[[float], bool], timeout_s: float, whom: Callable[[], str]
    ) -> bool:
        """Wait for another thread, logged; ``wait(seconds)`` returns whether it is over."""
        until = time.monotonic() + timeout_s
        while not wait(min(max(0.0, until - time.monotonic()), self.left_s(whom))):
            if time.monotonic() >= until:
                return False
        return True

    @contextmanager
    def beside(self, whom: Callable[[], str]) -> Iterator[None]:
        """Context for waits in C code, which a thread logs."""
        over = Latch()

        def log() -> None:
            while not over.wait(self.left_s(whom)):
                pass

        begin(log)
        try:
            yield
        finally:
            over.set()
