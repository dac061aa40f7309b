"""Polling with back-off, for conditions that nothing signals.

Waits for another thread of this process use ``threads.py`` instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

_SHORTEST_S, _LONGEST_S = 0.0002, 0.25
# With _LONGEST_S, 1,024 ranks that wait for long poll the job's store 4,096 times a second.
_SHARE = 1 / 8


def back_off(
    shortest_s: float = _SHORTEST_S, longest_s: float = _LONGEST_S, share: float = _SHARE
) -> Iterator[float]:
    """Yield the seconds to pause before each next poll.

    Between its limits a pause is a ``share`` of the time waited so far.
    """
    start = time.monotonic()
    while True:
        waited_s = time.monotonic() - start
        yield min(max(shortest_s, waited_s * share), longest_s)


def wait_until(
    has_happened: Callable[[], bool],
    timeout_s: float,
    *,
    shortest_s: float = _SHORTEST_S,
    longest_s: float = _LONGEST_S,
) -> bool:
    """Poll a condition until it holds; return False if the deadline passed first."""
    until = time.monotonic() + timeout_s
    pauses = back_off(shortest_s, longest_s)
    while not has_happened():
        if time.monotonic() > until:
            return False
        time.sleep(next(pauses))
    return True
