"""The last save of a job that is asked to stop, as far as there is time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from localckpt.checkpointer.record import RunRecord
from localckpt.checkpointer.tiers import NodeTier, SharedTier
from localckpt.errors import CheckpointingException, PeerLostError
from localckpt.ranks.deadline import Deadline
from localckpt.ranks.ranks import Ranks

__all__ = ["LastSave"]

logger = logging.getLogger(__name__)

_LOOK_S = 0.005
# For ranks that have the same time to stop in, and do not begin to stop at the same moment.
_AGREEING_S = 10.0


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

    def run(
        self,
        step: int,
        begin: Callable[[], None],
        finalize: Callable[[], None],
        begin_shared: Callable[[], None],
    ) -> bool:
        """Save the state of a step to the nodes, and then to shared storage.

        Args:
            step: The step.
            begin: Begins the save to the nodes.
            finalize: Finalizes the saves to the nodes that are over on all ranks.
            begin_shared: Begins the save to shared storage.

        Returns:
            Whether the time was over before all was complete; the same on all ranks, unless some
            are lost.
        """
        until = time.monotonic() + self._grace_s
        is_shared_late = False
        try:
            # Twice: a save before it may have failed, or the first attempt, on all ranks.
            for _ in range(2):
                begin()
                with self._record.stream.timed("wait", step):
                    while self._nodes.is_busy and time.monotonic() < until:
                        finalize()
                        time.sleep(_LOOK_S)
            is_late = self._is_on_any_rank(self._nodes.is_busy)
            if self._shared is not None and not is_late:
                begin_shared()
                with self._record.stream.timed("wait", step):
                    while self._shared.is_busy and time.monotonic() < until:
                        time.sleep(_LOOK_S)
                is_late = is_shared_late = self._is_on_any_rank(self._shared.is_busy)
        except CheckpointingException as error:
            # The job ends, whatever becomes of this save.
            logger.error("the last save has failed: %s", error)
            is_busy = self._nodes.is_busy or (self._shared is not None and self._shared.is_busy)
            is_late = is_busy or isinstance(error, PeerLostError)
        if self._nodes.newest != step:
            logger.error("step %d is not safe on the nodes after %g s", step, self._grace_s)
        if is_shared_late:
            logger.error("step %d is not on shared storage after %g s", step, self._grace_s)
        return is_late

    def _is_on_any_rank(self, is_late: bool) -> bool:
        """Return whether time is over for some rank, so that all go on in the same way."""
        deadline = Deadline.after(_AGREEING_S)
        return self._ranks.decide("stop in time", lambda: is_late, any, deadline=deadline)
