"""Events of one save of one rank: what training waited for, what came behind it, and the end."""

from __future__ import annotations

import time

from localckpt.events.event import Name, Outcome, Tier
from localckpt.events.stream import EventStream


class SaveRecord:
    """Times of one save, by ``time.monotonic()``, and its bytes on this rank, for its events."""

    def __init__(
        self, events: EventStream, step: int, began: float, tier: Tier | None = None
    ) -> None:
        self._events = events
        self._step = step
        self._began = began
        self._tier = tier
        self.waited_s = 0.0
        self.copied: tuple[float, float] | None = None
        self.went_on: float | None = None
        self.nbytes = 0

    def note_blocking(self) -> None:
        self.went_on = time.monotonic()
        self._emit("blocking", self._began, self.went_on, nbytes=self.nbytes or None)
        self._emit("wait_prev", self._began, self._began + self.waited_s)
        if self.copied is not None:
            self._emit("d2h", *self.copied, nbytes=self.nbytes or None)

    def note_end(
        self,
        *,
        durable: float | None,
        tier: Tier | None,
        outcome: Outcome | None = None,
        error: BaseException | None = None,
    ) -> None:
        """Note how it ended, and when all that this rank keeps was durable, if it was."""
        went_on, nbytes = self.went_on or self._began, self.nbytes or None
        details = {"blocking_s": went_on - self._began, "wait_prev_s": self.waited_s}
        if self.copied is not None:
            details["d2h_s"] = self.copied[1] - self.copied[0]
        if durable is not None and durable > went_on:
            details["background_s"] = durable - went_on
            self._emit("background", went_on, durable, nbytes=nbytes)
        self._events.emit(
            "save",
            began=self._began,
            ended=durable,
            step=self._step,
            nbytes=nbytes,
            tier=tier,
            outcome=outcome,
            error=error,
            details=details,
        )

    def _emit(self, name: Name, began: float, ended: float, nbytes: int | None = None) -> None:
        self._events.emit(
            name, began=began, ended=ended, step=self._step, nbytes=nbytes, tier=self._tier
        )
