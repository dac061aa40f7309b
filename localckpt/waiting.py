"""Waits for what does not say that it has happened: by asking again and again, less and less often.

What happens in another thread of this process is waited for with ``threads.py`` instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

__all__ = ["back_off", "wait_until"]

_SHORTEST_S, _LONGEST_S = 0.0002, 0.25
# At 1,024 ranks that wait long, the job's store is asked 4,096 times a second.
_SHARE = 1 / 8


def back_off(
    shortest_s: float = _SHORTEST_S, longest_s: float = _LONGEST_S, share: float = _SHARE
) -> Iterator[float]:
    """Seconds to pause before asking again.

    Args:
        shortest_s, longest_s: The shortest and the longest pause, in seconds.
        share: The pause between these, as a share of the time waited so far.
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
    """Wait until something has happened.

    Args:
        has_happened: Whether it has; asked at least once.
        timeout_s: The longest wait, in seconds.
        shortest_s, longest_s: As for :func:`back_off`.

    Returns:
        Whether it has happened.
    """
    until = time.monotonic() + timeout_s
    pauses = back_off(shortest_s, longest_s)
    while not has_happened():
        if time.monotonic() > until:
            return False
        time.sleep(next(pauses))
    return True
