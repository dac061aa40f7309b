"""Schedule of a training loop: the steps of the next saves, and of the next pulse."""

from __future__ import annotations

from localckpt.checkpointer.cadence import Every
from localckpt.checkpointer.pulse import Plan

__all__ = ["Schedule"]

_NEVER = 1 << 62
# The first pulse is to know how long a step takes.
_STEPS_BEFORE_PULSE = 2


class Schedule:
    """Steps at which something is to be done; the same on all ranks.

    They follow from the number of the step and from plans alone. A save, or a step, that one rank
    made alone changes nothing for longer than until the next plan.

    Args:
        every: Cadence of saves to the nodes.
        shared_every: Cadence of saves to shared storage; ``None`` for no shared storage.

    Attributes:
        due: First step at which something is to be done. Nothing is due before :meth:`begin`.
    """

    def __init__(self, every: Every, shared_every: Every | None) -> None:
        self._steps = every.steps
        self._shared_steps = None if shared_every is None else shared_every.steps
        self._next_save = self._next_shared_save = self._next_pulse = self.due = _NEVER
        # Steps of the last saves, or the step that the job was resumed from; the shared one second.
        self.saved = -1, -1

    def begin(self, resumed_from: int) -> None:
        """Schedule what follows the step that the job was resumed from, -1 for none."""
        self.saved = resumed_from, resumed_from
        self._next_save = _after(resumed_from, self._steps)
        self._next_shared_save = _after(resumed_from, self._shared_steps)
        self._next_pulse = resumed_from + _STEPS_BEFORE_PULSE
        self._find_due()

    def end(self) -> None:
        """Schedule nothing any more."""
        self._next_save = self._next_shared_save = self._next_pulse = self.due = _NEVER

    def follow(self, plan: Plan, step: int, *, may_save: bool) -> None:
        """Schedule what all ranks have decided in this step.

        Args:
            plan: The decision.
            step: Number of the step.
            may_save: Whether a save may begin to find out what one costs, if that is not known.
        """
        self._next_pulse = step
        # Saves may have begun since the pulse of this plan.
        saved, shared_saved = self.saved
        if self._steps is None:
            if plan.interval is not None:
                self._next_save = max(saved, plan.saved) + plan.interval
            elif may_save:
                self._next_save = step
        if self._shared_steps is None and plan.shared_interval is not None:
            last = max(shared_saved, plan.shared_saved)
            self._next_shared_save = last + plan.shared_interval
        self._find_due()

    def note_failure(self) -> None:
        """Note that a save to the nodes failed: where the cadence is measured, a plan follows."""
        if self._steps is None:
            self._next_save = _NEVER
            self._find_due()

    def is_save_due(self, step: int) -> bool:
        """Return whether a save to the nodes is due."""
        return step >= self._next_save

    def is_shared_save_due(self, step: int) -> bool:
        """Return whether a save to shared storage is due."""
        return step >= self._next_shared_save

    def is_pulse_due(self, step: int) -> bool:
        """Return whether the ranks are to plan again."""
        return step >= self._next_pulse

    def note_save(self, step: int) -> None:
        """Note that a save to the nodes was begun."""
        self.saved = step, self.saved[1]
        self._next_save = _after(step, self._steps)
        self._find_due()

    def note_shared_save(self, step: int) -> None:
        """Note that a save to shared storage was begun."""
        self.saved = self.saved[0], step
        self._next_shared_save = _after(step, self._shared_steps)
        self._find_due()

    def note_pulse(self) -> None:
        """Note that a pulse was begun; the next one is that of its plan."""
        self._next_pulse = _NEVER
        self._find_due()

    def _find_due(self) -> None:
        self.due = min(self._next_save, self._next_shared_save, self._next_pulse)


def _after(step: int, steps: int | None) -> int:
    """Step of the next save: with a cadence in steps, the number of steps is a multiple of it.

    Other cadences wait for a plan.
    """
    return _NEVER if steps is None else step + steps - (step + 1) % steps
