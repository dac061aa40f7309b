"""Pauses: polling with back-off for what no thread signals, and the pace of what is sent."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from localckpt.threads import Latch, raise_if_aborted

_SHORTEST_S, _LONGEST_S = 0.0002, 0.25
# With _LONGEST_S, 1,024 ranks that wait for long poll the job's store 4,096 times a second.
_SHARE = 1 / 8


def wait_until(
    has_happened: Callable[[], bool],
    timeout_s: float,
    *,
    shortest_s: float = _SHORTEST_S,
    longest_s: float = _LONGEST_S,
) -> bool:
    """Poll a condition, at growing pauses, until it holds; False if the deadline passed first.

    Raises the error of an :class:`~localckpt.threads.Abort` that the call is made inside of.
    """
    start = time.monotonic()
    while not has_happened():
        raise_if_aborted()
        waited_s = time.monotonic() - start
        if waited_s > timeout_s:
            return False
        time.sleep(min(max(shortest_s, waited_s * _SHARE), longest_s))
    return True


class Pacer:
    """Token bucket: says when the next bytes may be sent or written; for one thread at a time.

    ``rate_limit`` is in bytes a second, each message at once; ``None`` for no limit.
    """

    def __init__(self, rate_limit: float | None = None) -> None:
        self._rate = math.inf if rate_limit is None else rate_limit
        self._next_at = 0.0
        self.stopped, self._lifted = Latch(), Latch()

    def wait(self, nbytes: int) -> None:
        """Return when so many bytes may be sent, or at once when pauses were ended."""
        self.stopped.wait(max(0.0, self._next_at - time.monotonic()), self._lifted)
        self._next_at = max(self._next_at, time.monotonic()) + nbytes / self._rate

    def stop(self) -> None:
        """End all pauses, from another thread too: who sends then finds its connections cut."""
        self.stopped.set()

    def lift(self) -> None:
        """Have no limit from now on; another thread may call it."""
        self._lifted.set()

    def longest_s(self, nbytes: int) -> float:
        """Time that sending so many bytes takes at least, in seconds."""
        return nbytes / self._rate
