"""A KeyboardInterrupt at a chosen moment, as Ctrl-C, a signal handler or a notebook raises it."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

__all__ = ["Interrupter"]

T = TypeVar("T")


class Interrupter:
    """Interrupts calls of the main thread at random moments.

    Args:
        seed: Of the moments.
        again_s: Interrupt a call again and again at this interval, in seconds; 0 for once.
    """

    def __init__(self, seed: int, again_s: float = 0.0) -> None:
        self._random = random.Random(seed)
        self._again_s = again_s
        self._usual_s: dict[str, float] = {}
        self._armed = False
        self._raised = 0
        self.interrupts = 0
        """How many of them were left with an interrupt."""

    def call(self, name: str, function: Callable[[], T]) -> T | None:
        """Interrupt a call at a random moment of the time that calls of its name take.

        Returns:
            What it returned; ``None`` if it was interrupted.
        """
        self._raised = 0
        after_s = max(1e-6, self._random.uniform(0.0, self._usual_s.get(name, 0.05)))
        before = signal.signal(signal.SIGALRM, self._interrupt)
        began = time.monotonic()
        try:
            try:
                self._armed = True
                signal.setitimer(signal.ITIMER_REAL, after_s, self._again_s)
                result = function()
            finally:
                self._armed = False
        except BaseException as error:
            # Libraries that call back may make another error of it, as torch.save() does.
            if not self._raised or not _comes_of_interrupt(error):
                raise
            self.interrupts += 1
            return None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)
        self._usual_s[name] = time.monotonic() - began
        return result

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        # Not in the call above, which could not be left in order then.
        if self._armed and frame is not None and frame.f_code is not Interrupter.call.__code__:
            self._raised += 1
            raise KeyboardInterrupt


def _comes_of_interrupt(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False
