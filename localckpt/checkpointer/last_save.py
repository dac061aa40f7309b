"""The last save of a job that is asked to stop, as far as there is time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from math import inf

from localckpt.checkpointer.record import RunRecord
from localckpt.checkpointer.tiers import NodeTier, SharedTier
from localckpt.errors import CheckpointingException, PeerLostError
from localckpt.failure_texts import described
from localckpt.ranks.deadline import begin as begin_task
from localckpt.ranks.deadline import end_waits_by
from localckpt.ranks.patience import Patience
from localckpt.ranks.ranks import Ranks
from localckpt.threads import exit_by
from localckpt.waiting import wait_until

__all__ = ["LastSave"]

logger = logging.getLogger(__name__)

_LOOK_S = 0.005
# After the time to stop in: for ranks to agree that it is over, and then to close.
_AGREEING_S, _CLOSING_S = 0.5, 0.5


class LastSave:
    """The save of the step after which a job stops; all ranks make it.

    Args:
        nodes: Where it goes first.
        shared: Where it goes then, since the nodes may go with the job.
        ranks: The ranks of the job.
        record: Record for the time that ranks wait.
        grace_s: Time to stop in, in seconds.
    """

    def __init__(
        self,
        nodes: NodeTier,
        shared: SharedTier | None,
        ranks: Ranks,
        record: RunRecord,
        grace_s: float,
    ) -> None:
        self._nodes = nodes
        self._shared = shared
        self._ranks = ranks
        self._record = record
        self._grace_s = grace_s
        self._until = inf

    def run(
        self,
        step: int,
        begin: Callable[[], None],
        finalize: Callable[[], None],
        begin_shared: Callable[[], None],
        *,
        is_new: bool,
    ) -> bool:
        """Save the state of a step, and wait for it as long as there is time.

        Args:
            step: The step.
            begin: Begins the save to the nodes.
            finalize: Finalizes the saves to the nodes that are over on all ranks.
            begin_shared: Begins the save to shared storage.
            is_new: Whether the job has made a step; else there is nothing to save.

        Returns:
            Whether the time was over before all was complete; the same on all ranks, unless some
            are lost.
        """
        self.begin()
        patience = self._ranks.patience(f"save step {step}, the last")
        is_late = is_on_shared = False
        if not is_new:
            return False
        try:
            # Twice: a save before it may have failed, or the first attempt, on all ranks.
            for _ in range(2):
                if is_late := not self._can_begin():
                    break
                begin()
                with self._record.stream.timed("wait", step):
                    while self._nodes.is_busy and self._left_s > 0:
                        finalize()
                        patience.left_s(self._nodes.waits_for)
                        time.sleep(_LOOK_S)
                is_late = self._is_on_any_rank(self._nodes.is_busy)
                if is_late or self._nodes.newest == step:
                    break
            if self._shared is not None and not is_late:
                with self._record.stream.timed("wait", step):
                    # An older save is waited for as well.
                    is_late = self._is_on_any_rank(not self._await_shared(patience))
                    if not is_late:
                        begin_shared()
                        is_late = self._is_on_any_rank(not self._await_shared(patience))
                        is_on_shared = not is_late and self._shared.has_saved(step)
        except CheckpointingException as error:
            # The job ends, whatever becomes of this save.
            logger.error("the last save has failed: %s", described(error))
            is_busy = self._nodes.is_busy or (self._shared is not None and self._shared.is_busy)
            is_late = is_busy or isinstance(error, PeerLostError)
        if self._nodes.newest != step:
            logger.error("step %d is not safe on the nodes after %g s", step, self._grace_s)
        if self._shared is not None and not is_on_shared:
            logger.error("step %d is not on shared storage after %g s", step, self._grace_s)
        return is_late

    def await_in_time(self, are_over: Callable[[], bool]) -> bool:
        """Wait for saves under way as long as there is time; return whether they are over."""
        self.begin()
        if not (ended := wait_until(are_over, self._left_s)):
            logger.error("saves under way are not over after %g s, and are given up", self._grace_s)
        return ended

    def end(self, close: Callable[[], None]) -> None:
        """Close what a stopped job has open, and leave what is not closed in time to its exit."""
        closing = begin_task(close)
        try:
            closing.take_result(max(0.0, self._until + _AGREEING_S + _CLOSING_S - time.monotonic()))
        except TimeoutError:
            logger.error("storage does not answer: what is open is closed by the process's exit")
        finally:
            end_waits_by(inf)

    @property
    def has_begun(self) -> bool:
        """True if the time to stop in runs."""
        return self._until < inf

    def begin(self) -> None:
        """Begin to count the time to stop in. May be called twice.

        From here on no wait of this process, nor its exit, lasts much longer than that.
        """
        if not self.has_begun:
            self._until = time.monotonic() + self._grace_s
            end_waits_by(self._until + _AGREEING_S)
            exit_by(self._until + _AGREEING_S + _CLOSING_S)

    @property
    def _left_s(self) -> float:
        return max(0.0, self._until - time.monotonic())

    def _can_begin(self) -> bool:
        """Wait for room; whether there is, and the nodes' storage answers, on all ranks."""

        def wait() -> bool:
            is_free = wait_until(lambda: self._nodes.has_room, self._left_s)
            return is_free and self._nodes.answers(self._left_s)

        can: bool = self._ranks.decide("make room for the last save", wait, all)
        return can

    def _await_shared(self, patience: Patience) -> bool:
        assert self._shared is not None
        shared = self._shared
        return patience.until(lambda: not shared.is_busy, self._left_s, shared.waits_for)

    def _is_on_any_rank(self, is_late: bool) -> bool:
        """Return whether time is over for some rank, so that all go on in the same way."""
        return self._ranks.decide("stop in time", lambda: is_late, any)
