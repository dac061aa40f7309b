"""One save of one rank, from its capture to its end on all ranks.

    captured -> local -> protected -> complete | failed

Training waits for ``captured``. The rest is carried out by a queue behind training (``request``),
or at once (``run``). The methods of :class:`Save` stand in this order.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, SupportsFloat

from torch.profiler import record_function

from localckpt.async_save.request import AsyncRequest, runs_in_trainer
from localckpt.availability.coverage import SaveOutcome
from localckpt.availability.durability import Durability, SaveVerdict, judge_save
from localckpt.errors import (
    CheckpointingException,
    DivergenceError,
    PeerLostError,
    SaveFailedError,
)
from localckpt.events.event import Tier
from localckpt.events.saves import SaveRecord
from localckpt.failure_texts import described, with_class
from localckpt.ids import CkptID, ShardIdentity
from localckpt.managers.carrier import Carrier
from localckpt.managers.parts import Parts
from localckpt.managers.replicator import Replication
from localckpt.managers.reports import SaveReport
from localckpt.ranks.failure import Attempt, Failure
from localckpt.state_dict.basic import wrapped
from localckpt.state_dict.parts import Agreed
from localckpt.state_dict.replica_digests import PartDigest, replica_digests
from localckpt.state_dict.views import tensor_views
from localckpt.storage.hooks import commit_here
from localckpt.storage.slot import Slot
from localckpt.trust import Mark, Measured

__all__ = ["Save"]

logger = logging.getLogger(__name__)


def _kept(text: str) -> str:
    """Return advice for a failure: what is kept, which its text may say already."""
    kept = "T" if "are as they were" in text else "Older checkpoints are as they were; t"
    return f"{kept}raining can go on and save again"


class Save:
    """One save of one rank. Times are those of ``time.monotonic()``.

    Args:
        parts: Parts of the manager.
        identity: Identity of this rank's shard.
        called: Time of the trainer's call of ``save``.
        waited_s: Seconds that the call has waited for older saves since.
        metrics: Metrics that were given with the save; those of the first rank count.

    Attributes:
        slots: Slots of the pieces that this rank keeps, the slot of its own shard first.
        error: Text of this rank's first error, which is reported when the save is finalized.
        bad: Reason why the state of this rank is bad, according to its check.
        carrier: Carrier of the save.
        is_complete: True once all ranks have agreed that the save is complete.
    """

    def __init__(
        self,
        parts: Parts,
        identity: ShardIdentity,
        called: float,
        waited_s: float,
        metrics: Mapping[str, SupportsFloat] | None = None,
    ) -> None:
        self._parts = parts
        self._metrics = metrics
        self._metric: float | None = None
        self.identity = identity
        self.slots: list[Slot] = []
        self.error: str | None = None
        self.bad: str | None = None
        self._compares_replicas = parts.replica_check.is_due(identity.generation)
        self._replicas: list[PartDigest] | None = None
        self._divided: tuple[Agreed, ...] = ()
        self.carrier = Carrier(parts)
        self.is_complete = False
        self._is_returned = False
        # True if other ranks may know how the save ended on this rank.
        self._is_reported = False
        self._previous_iteration = parts.epoch.newest_iteration
        self._replication = Replication(identity)
        self._verdict: SaveVerdict | None = None
        self._called = self._captured = self._returned = called
        self._durable: float | None = None
        self._record = SaveRecord(parts.events, identity.iteration, called)
        self._record.waited_s = waited_s

    # Captured.

    def capture(self, state: Any) -> None:
        """Capture the state, and begin to copy it to other ranks.

        An error is reported when all ranks finalize, so that none is left waiting for this one.
        """
        parts, iteration = self._parts, self.identity.iteration
        parts.in_flight.add(self)
        parts.checkpoints.under_way.append(iteration)
        parts.epoch.newest_iteration = iteration
        try:
            self._capture(state)
            if not self._replication.comes_later:
                self._take_copies()
            best = parts.options.retention.best
            if best is not None and self.identity.rank == 0:
                self._metric = best.value(self._metrics)
        except Exception as error:  # noqa: BLE001 - raised on every rank when all finalize
            self.note_error(error)
        self._metrics = None
        self._returned = time.monotonic()

    def _capture(self, state: Any) -> None:
        parts = self._parts
        is_sent = parts.replicator is not None
        began = time.monotonic()
        try:
            with record_function("localckpt.stage"):
                own, self._divided = parts.capture.capture(
                    *(wrapped(state), self.identity), is_sent=is_sent, neighbours=self._neighbours()
                )
        except Exception as error:
            if parts.replicator is not None:
                # The ranks that were to get copies are not left waiting.
                parts.replicator.begin(self._replication, parts.store, None, described(error))
            raise
        self.slots.append(own)
        if self._compares_replicas:
            own.hold("comparison")
        self._captured = time.monotonic()
        # The wait for a buffer that an older save has counts as well.
        self._record.waited_s += own.reserved_at - began
        self._record.copied = own.reserved_at, self._captured
        self._record.nbytes = own.nbytes
        if parts.replicator is not None:
            with record_function("localckpt.replicate"):
                parts.replicator.begin(self._replication, parts.store, own)

    def _neighbours(self) -> tuple[int, ...]:
        """Return the ranks that this save divides equal tensors among.

        A save that compares replicas divides nothing, since whole tensors are compared.
        """
        if self._compares_replicas:
            return ()
        parts = self._parts
        return parts.capture.neighbours(parts.epoch.nodes, self.identity.rank)

    # Carried out at once, or by a queue behind training.

    def run(self) -> None:
        """Carry the save out at once, and agree with the other ranks on its outcome.

        Raises:
            CheckpointingException: Writing failed on some rank; the same on every rank.
            PeerLostError: A rank did not answer in time. The save is rolled back, unless its
                outcome is unknown here.
        """
        self.carrier.is_scheduled = True
        outcome = None
        with Attempt() as keeping:
            self.keep_local()
            self.protect()
            outcome = self.outcome().to_json()
        try:
            self._agree("save", keeping, outcome)
        except PeerLostError as error:
            self.fail(error)
            raise
        except CheckpointingException as error:
            self.roll_back(error)
            advice = _kept(str(error))
            raise Failure.of(error).error().advised("save", advice) from error.__cause__
        finally:
            self._record.note_blocking()

    def request(self, finalize: Callable[[], None]) -> AsyncRequest:
        """Return a request that carries the save out behind training; see :class:`Carrier`."""
        request = self.carrier.request(self, finalize)
        self._is_returned = True
        self._record.note_blocking()
        return request

    # Local.

    @runs_in_trainer
    def keep_local(self) -> None:
        """Commit the captured state; raises what the store, or the user's hook, raises."""
        self.carrier.is_scheduled = True
        for slot in self.slots:
            slot.await_digests()
        try:
            self._check()
            if (measured := self._measured(self._metric)) is not None:
                # Other nodes note it when the save is complete.
                self._parts.store.claim.note_measured(measured)
            commit_here(self._parts.store, self._parts.hooks, self.slots)
            self._digest_replicas()
        except BaseException as error:
            if not isinstance(error, Exception):
                # After an interrupt this rank waits for no other rank.
                self.stop_waiting()
            # The save is not over while other ranks send to it.
            self._await_exchanged()
            raise

    def _check(self) -> None:
        """Run the user's check on the captured state, and note a bad state before its commit."""
        check = self._parts.options.check
        if check is None or not self.slots:
            return
        try:
            with self.slots[0].reading() as image:
                self.bad = check(tensor_views(image)) or None
        except Exception as error:
            logger.exception("the check of iteration %d failed", self.identity.iteration)
            # Not the error itself: its frames keep the memory of the image.
            raise CheckpointingException(
                f"the check of the state raised {with_class(error)}"
            ) from None
        if self.bad is not None:
            self._mark_bad(self.bad)

    def _measured(self, metric: float | None) -> Measured | None:
        best = self._parts.options.retention.best
        if best is None or metric is None:
            return None
        return Measured(self.identity.checkpoint, best.metric, metric)

    def _mark_bad(self, why: str) -> None:
        mark = Mark(self.identity.checkpoint, "bad", why)
        self._parts.store.claim.note_mark(mark)

    # Protected.

    def protect(self) -> None:
        """Commit the pieces of other ranks, which ends this rank's part. May be called twice."""
        if self._durable is not None:
            return
        self._digest_replicas()
        if self._replication.comes_later:
            captured = len(self.slots)
            try:
                self._take_copies()
            except Exception as error:  # noqa: BLE001 - raised on every rank when all finalize
                self.note_error(error)
            commit_here(self._parts.store, self._parts.hooks, self.slots[captured:])
        self._durable = time.monotonic()

    def _digest_replicas(self) -> None:
        """Compute the digests of replicated tensors, if this save compares replicas."""
        if self._compares_replicas and self._replicas is None and self.slots:
            with self.slots[0].reading() as image:
                self._replicas = replica_digests(image)
            self.slots[0].end_hold("comparison")

    def _take_copies(self) -> None:
        if self._parts.replicator is not None:
            self.slots += self._parts.replicator.finish(self._replication)
        # Now that all slots of this rank are reserved.
        if self._parts.space is not None:
            self._parts.space.check(self._parts.epoch.nodes)

    def outcome(self) -> SaveOutcome:
        """Return the outcome of the save on this rank, for the verdict of all ranks."""
        missing: list[CkptID] = []
        parts, identity = self._parts, self.identity
        with Attempt() as finishing:
            if (handed_over := self.carrier.take_handed_over()) is not None:
                self.error = self.error or handed_over.await_error()
            # A foreign queue that did not freeze the request has not called protect().
            self.protect()
            missing += [s.identity.ckpt_id for s in self.slots if not parts.store.holds(s.identity)]
        return SaveOutcome(
            identity.iteration,
            identity.generation,
            self.error or finishing.error_text,
            tuple(missing),
            tuple(self._replication.kept),
            parts.checkpoints.copies_wanted(identity.rank),
            self._replication.group,
            self.bad,
            tuple((part.set_id, part.digest) for part in self._replicas or ()),
            self._divided,
            self._metric,
        )

    # Complete, or failed.

    def finalize(self) -> Durability:
        """Complete the save, or roll it back, as all ranks do; all ranks call it.

        Returns:
            The durability that the save has reached.

        Raises:
            SaveFailedError: The save failed on some rank; the same on every rank.
            DivergenceError: Replicas differ, and that is an error; the same on every rank.
            PeerLostError: A rank did not answer in time. The save is rolled back, unless its
                outcome is unknown here.
        """
        identity = self.identity
        if (verdict := self._verdict) is None:
            # The queue is a foreign one, or has not asked the other ranks.
            outcome = self.outcome().to_json()
            try:
                verdict = self._agree("finalize", Attempt(), outcome)
            except CheckpointingException as error:
                self.fail(error)
                raise
        self._parts.checkpoints.remove(identity.checkpoint)
        if not verdict.parts_fit:
            self._parts.capture.divide_no_more("; ".join(verdict.problems))
        bad, failed = verdict.bad, self._failure(verdict)
        if isinstance(failed, DivergenceError) and not self._parts.replica_check.is_error:
            bad, failed = str(failed), None
        if failed is not None:
            # Never lowered: a later save may be under way, and no number is used twice.
            epoch = self._parts.epoch
            epoch.generation = max(epoch.generation, verdict.generation)
            if verdict.is_mismatched:
                epoch.place_again()
            try:
                self.roll_back(failed)
                raise failed
            finally:
                # Else this variable would keep the error, and the error its frames, alive.
                del failed
        assert verdict.reached is not None, "without a failure the save is complete"
        self._complete(verdict.reached, bad, self._measured(verdict.metric))
        return verdict.reached

    def _failure(self, verdict: SaveVerdict) -> SaveFailedError | None:
        """Make the error of a save that failed, or whose replicas differ; ``None`` for neither."""
        iteration, check = self.identity.iteration, self._parts.replica_check
        if verdict.reached is None:
            problems = "; ".join(verdict.problems)
            failed = SaveFailedError(f"the save of iteration {iteration} failed: {problems}")
            failed.is_mismatched = verdict.is_mismatched
            return failed.advised("save", _kept(problems))
        if self._compares_replicas:
            check.note(verdict.divergence)
        if verdict.divergence is None:
            return None
        return check.describe(iteration, verdict.divergence, self._replicas or [])

    def _agree(self, step: str, attempt: Attempt, outcome: Any) -> SaveVerdict:
        ranks, phase = self._parts.ranks, f"{step} iteration {self.identity.iteration}"
        self._is_reported = ranks.world_size > 1
        self._verdict = ranks.agree(
            *(phase, attempt, outcome, judge_save), kind=step, read=SaveVerdict.from_json
        )
        assert self._verdict is not None
        return self._verdict

    def take_verdict(self, fields: Any) -> None:
        """Take the verdict on the save, as JSON fields; the same on all ranks."""
        self._verdict = SaveVerdict.from_json(fields)

    def _complete(self, reached: Durability, bad: str | None, measured: Measured | None) -> None:
        parts, iteration = self._parts, self.identity.iteration
        parts.checkpoints.forget(iteration)
        if bad is not None:
            logger.warning("iteration %d is marked bad: %s", iteration, bad)
            parts.checkpoints.marks[self.identity.checkpoint] = Mark(
                self.identity.checkpoint, "bad", bad
            )
        parts.checkpoints.add(self.identity.checkpoint, reached, measured)
        try:
            if bad is not None:
                # On all nodes, since the node of the rank that found it may be lost.
                self._mark_bad(bad)
            parts.store.release(self._all_slots())
            parts.hooks._cleanup(iteration)
            parts.note_metrics()
            if not parts.store.keeps_images:
                # Hooks keep older checkpoints as they choose.
                del parts.checkpoints.complete[1:]
        except Exception:
            # The save is complete on all ranks, whatever becomes of older ones on this rank.
            logger.exception("rank %d could not mark or prune checkpoints", self.identity.rank)
        if bad is None:
            parts.resuming.note_progress(iteration)
        self._end()
        self.is_complete = True
        tier: Tier = "replicated" if reached.survives_node_loss else "local"
        self._record.note_end(durable=self._durable, tier=tier)

    def roll_back(self, error: BaseException | None = None) -> None:
        """Remove what this rank has written, so that the iteration can be saved again.

        Args:
            error: Error of the save; ``None`` for a save that nobody carries out.
        """
        parts, identity = self._parts, self.identity
        self._await_exchanged()
        self._end()
        parts.checkpoints.forget(identity.iteration)
        if parts.epoch.newest_iteration == identity.iteration:
            parts.epoch.newest_iteration = self._previous_iteration
        try:
            parts.store.discard(self._all_slots())
            parts.hooks._cleanup_failed_save(identity.iteration)
        except Exception:
            # Every rank is about to raise the error of the save, which this one must not replace.
            logger.exception(
                "rank %d could not remove iteration %d", identity.rank, identity.iteration
            )
        self._record.note_end(durable=None, tier=None, outcome="failed", error=error)

    def fail(self, error: BaseException) -> None:
        """End the save after an error that all ranks raise, or this one alone.

        A failure that the ranks have agreed on is final, so what was written is removed. If this
        rank does not know the verdict, the save may be complete, and everything stays.
        """
        if isinstance(error, PeerLostError) and error.outcome_unknown:
            self.leave()
        else:
            self.roll_back(error)

    def leave(self) -> None:
        """End the save and keep what was written: other ranks may have found it complete."""
        self._await_exchanged()
        self._end()
        self._parts.store.release(self._all_slots())
        self._parts.checkpoints.forget(self.identity.iteration)
        self._record.note_end(durable=None, tier=None, outcome="unknown")

    def clean_up_interrupted(self) -> None:
        """Leave the save, or roll it back, once a call of the manager was interrupted."""
        if self._is_reported:
            self.leave()
        elif not self._is_returned:
            self.roll_back()
        # The queue finalizes a save whose request was returned.

    def report(self) -> SaveReport:
        """Return a report of the save so far."""
        return SaveReport(
            self.identity.iteration,
            self.slots[0].nbytes if self.slots else 0,
            self._captured - self._called,
            self._replication.seconds,
            self._returned - self._called,
            None if self._durable is None else self._durable - self._called,
            self._replication.sent_nbytes,
        )

    def _all_slots(self) -> list[Slot]:
        """Return all slots of this save, filled or not."""
        checkpoint = self.identity.checkpoint
        return [s for s in self._parts.store.slots if s.identity.checkpoint == checkpoint]

    def _end(self) -> None:
        for slot in self._all_slots():
            slot.end_hold("comparison")
        self._parts.in_flight.remove(self)
        self.carrier.end()

    def _await_exchanged(self) -> None:
        """Wait until nothing is sent or received for this save, or the deadlines have passed."""
        if self._parts.replicator is not None:
            self._parts.replicator.await_exchanged(self._replication)

    def stop_waiting(self) -> None:
        """End the exchange with other ranks, which may not come any more."""
        if self._parts.replicator is not None:
            self._parts.replicator.cancel()

    def waits_for(self) -> str:
        """Describe which other ranks this rank's save waits for; empty for none."""
        if self._parts.replicator is None:
            return ""
        return self._parts.replicator.waits_for(self._replication)

    def note_error(self, error: Exception) -> None:
        """Log an error of this rank, and keep its text for the outcome; the first one counts."""
        logger.error(
            "rank %d cannot save iteration %d: %s",
            self.identity.rank,
            self.identity.iteration,
            # The text alone, since a handler that keeps the exception keeps the image's memory.
            described(error),
            exc_info=not isinstance(error, CheckpointingException),
        )
        # What went wrong first is why; what follows from it says less.
        self.error, self.slots = self.error or with_class(error), []
        if self._replication.task is not None and self._replication.task.done():
            # The task may hold this error, whose frames hold this save.
            self._replication.task = None
