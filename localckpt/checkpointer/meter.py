"""Times of the steps of a training loop, and what saves take from them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from localckpt.checkpointer.cadence import Costs

__all__ = ["Meter"]

_RECENT = 50


class Meter:
    """Clock of one rank's training loop.

    A step is timed from the end of one call of the checkpointer to the beginning of the next.
    Steps beside which a save is written are kept apart: what they take longer is a cost of saving.
    The first save does not count: training waits there for memory that later saves use again.
    """

    def __init__(self) -> None:
        self._left: float | None = None
        self._undisturbed: deque[float] = deque(maxlen=_RECENT)
        self._beside: list[float] = []
        self._waited_s = 0.0
        self._save_s: float | None = None
        self._is_first_save = True

    def enter(self, *, is_beside_save: bool) -> float:
        """Note that a step has ended; the time now, by the monotonic clock."""
        now = time.monotonic()
        if self._left is not None:
            (self._beside if is_beside_save else self._undisturbed).append(now - self._left)
        return now

    def leave(self, entered: float, *, is_save: bool) -> None:
        """Note that the next step begins.

        Args:
            entered: What :meth:`enter` gave.
            is_save: Whether the time since then was spent on a save.
        """
        self._left = time.monotonic()
        if is_save:
            self._waited_s += self._left - entered

    def end_save(self) -> None:
        """Note that no save is under way any more: what the last one cost is known."""
        slower_s = 0.0
        if self._beside and self._undisturbed:
            usual_s = _median(tuple(self._undisturbed))
            slower_s = max(0.0, sum(self._beside) - usual_s * len(self._beside))
        if not self._is_first_save:
            self._save_s = self._waited_s + slower_s
        self._is_first_save = False
        self._beside.clear()
        self._waited_s = 0.0

    def costs(self) -> Costs:
        """Return the costs that are known so far."""
        # Copies, since another thread asks.
        steps = tuple(self._undisturbed) or tuple(self._beside)
        return Costs(_median(steps) if steps else None, self._save_s)


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
