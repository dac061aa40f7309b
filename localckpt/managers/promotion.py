"""One promotion: a complete checkpoint of the nodes is drained to shared storage behind training.

    held -> drained | failed

The manager of the shared storage does the work, from the images on the nodes. Here they are held,
so that no rank prunes them, until all ranks have finalized the promotion in the same poll.
"""

from __future__ import annotations

import logging
from typing import Protocol

from localckpt.async_save.request import AsyncCall, AsyncRequest, runs_in_trainer
from localckpt.availability.retention import Metrics
from localckpt.errors import (
    CheckpointingException,
    MismatchError,
    NoReplicasAvailableError,
    StorageError,
)
from localckpt.failure_texts import described
from localckpt.ids import Checkpoint
from localckpt.managers.context import JobCheckpoints
from localckpt.storage.kept_shard import KeptShard

logger = logging.getLogger(__name__)


class Draining(Protocol):
    """Drain that is under way on this rank."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the end of the drain; raises its error, or TimeoutError."""

    def stop(self) -> None:
        """End the drain soon, from any thread."""

    def waits_for(self) -> str: ...


class DrainTarget(Protocol):
    """Manager of a shared storage, as :class:`GlobalCheckpointManager`; all ranks call alike."""

    def drain(
        self,
        shard: KeptShard,
        *,
        rate_limit: float | None = None,
        metrics: Metrics | None = None,
    ) -> Draining: ...

    def note_drained(self, iteration: int) -> None: ...


class Promotion:
    def __init__(
        self,
        shard: KeptShard,
        target: DrainTarget,
        checkpoints: JobCheckpoints,
        rate_limit: float | None,
        metrics: Metrics | None,
    ) -> None:
        self._checkpoint = shard.identity.checkpoint
        self._claim, self._target, self._checkpoints = shard.store.claim, target, checkpoints
        self.is_over = False
        # Before anything reads it.
        checkpoints.hold(self._checkpoint)
        try:
            self._drain = target.drain(shard, rate_limit=rate_limit, metrics=metrics)
        except BaseException:
            self._release()
            raise

    def request(self) -> AsyncRequest:
        """Make a request that waits for the drain in its queue, and finalizes the promotion."""
        call = AsyncCall(
            self._await_drained,
            failure_fns=[lambda error: self._give_up()],
            stop_fns=[self._drain.stop],
            waits_for_fn=self._drain.waits_for,
            name="promote",
        )
        return AsyncRequest(call, (), [self._finalize])

    @runs_in_trainer
    def _await_drained(self) -> None:
        self._drain.wait()
        try:
            # Here, behind training.
            self._claim.note_drained(self._checkpoint, self._checkpoints.complete)
        except StorageError as error:
            logger.warning(
                "iteration %d is drained, which the next start is not told by this node: %s",
                *(self._checkpoint.iteration, error),
            )

    def _finalize(self) -> None:
        if not self.is_over:
            iteration = self._checkpoint.iteration
            self._target.note_drained(iteration)
            self._checkpoints.note(self._checkpoint, is_drained=True)
            self._release()
            logger.info("iteration %d is drained", iteration)

    def _give_up(self) -> None:
        self._drain.stop()
        self._release()

    def stop(self) -> None:
        self._drain.stop()

    def close(self, timeout_s: float) -> None:
        """End the drain, and wait, up to a deadline, until nothing reads the store."""
        if self.is_over:
            return
        self._drain.stop()
        try:
            self._drain.wait(timeout_s)
        except (CheckpointingException, TimeoutError) as error:
            iteration = self._checkpoint.iteration
            logger.warning("iteration %d was not drained: %s", iteration, described(error))
        self._release()

    def _release(self) -> None:
        if not self.is_over:
            self.is_over = True
            self._checkpoints.release(self._checkpoint)


def promotable(iteration: int, checkpoints: JobCheckpoints, world_size: int) -> Checkpoint:
    """Choose the checkpoint of an iteration that can be promoted; the same on all ranks."""
    found = [c for c in checkpoints.complete if c.iteration == iteration]
    if not found and iteration in checkpoints.under_way:
        raise CheckpointingException(
            f"iteration {iteration} cannot be promoted yet: its save is not finalized. Finalize it "
            f"first (AsyncCallsQueue.maybe_finalize_async_calls). Nothing was drained"
        )
    if not found:
        there = ", ".join(str(c.iteration) for c in checkpoints.complete[:10])
        raise NoReplicasAvailableError(
            f"iteration {iteration} cannot be promoted: it is not complete on the nodes, or is not "
            f"kept any more; complete are: {there or 'none'}. Nothing was drained"
        )
    checkpoint = found[0]
    if checkpoint.world_size != world_size:
        raise MismatchError(
            f"iteration {iteration} was saved by {checkpoint.world_size} ranks, and this job has "
            f"{world_size}: promote it with as many. Nothing was drained"
        )
    trust = checkpoints.trusts[checkpoint]
    if trust.mark == "bad":
        raise CheckpointingException(
            f"iteration {iteration} is marked bad ({trust.why}), and on shared storage it would "
            f"pass for a good one: promote another. Nothing was drained"
        )
    return checkpoint
