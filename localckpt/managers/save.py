"""One save of one rank, from its capture to its end on all ranks.

    captured -> local -> protected -> complete | failed

Training waits for ``captured``. The rest is carried out by a queue behind training (``request``),
or at once (``run``). The methods of :class:`Save` stand in this order.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch.profiler import record_function

from localckpt.async_save.callers import HandedOver
from localckpt.async_save.request import AsyncCall, AsyncRequest, Ticket, runs_in_trainer
from localckpt.availability.coverage import SaveOutcome
from localckpt.availability.durability import Durability, SaveVerdict, judge_save
from localckpt.availability.retention import Metrics
from localckpt.errors import (
    AbortedError,
    CheckpointingException,
    DivergenceError,
    PeerLostError,
    SaveFailedError,
)
from localckpt.events.event import Outcome, Tier
from localckpt.events.stream import SaveRecord
from localckpt.failure_texts import described, with_class
from localckpt.ids import SAVES_AN_ATTEMPT, CkptID, Generation, ShardIdentity
from localckpt.managers.capture import StateCapture
from localckpt.managers.context import Context
from localckpt.managers.copies import Replication
from localckpt.managers.prefetch import Prefetches
from localckpt.managers.repair import Repairs
from localckpt.managers.replica_check import divergence_error
from localckpt.managers.reports import SaveReport
from localckpt.ranks.deadline import answered, begin
from localckpt.ranks.failure import Attempt, Failure
from localckpt.ranks.ranks import shaped
from localckpt.state_dict.basic import wrapped
from localckpt.state_dict.parts import Agreed
from localckpt.state_dict.replica_digests import PartDigest, replica_digests, tensor_views
from localckpt.storage.store import Slot
from localckpt.storage.write import replace_file
from localckpt.threads import SerialThread, Task

logger = logging.getLogger(__name__)

# Longest that training waits for the file of a launcher.
_NOTING_S = 5.0


def _kept(text: str) -> str:
    """Return advice for a failure: what is kept, which its text may say already."""
    kept = "T" if "are as they were" in text else "Older checkpoints are as they were; t"
    return f"{kept}raining can go on and save again"


class Save:
    """One save of one rank; times are those of ``time.monotonic()``.

    The slot of this rank's own shard is the first of ``slots``. ``error`` is the text of the first
    error here, which is told when all finalize. ``ticket`` is the place of the save in a queue of
    this library, and ``handed_over`` the work that a queue of another one waits for.
    """

    def __init__(
        self,
        saves: Saves,
        identity: ShardIdentity,
        called: float,
        waited_s: float,
        metrics: Metrics | None = None,
    ) -> None:
        context = saves.context
        self._saves = saves
        self._context = context
        self._metrics = metrics
        self._metric: float | None = None
        self.identity = identity
        self.slots: list[Slot] = []
        self.error: str | None = None
        self.bad: str | None = None
        self._compares_replicas = saves.compares_replicas(identity.generation)
        self._replicas: list[PartDigest] | None = None
        self._divided: tuple[Agreed, ...] = ()
        self.ticket: Ticket | None = None
        self.is_scheduled = self.is_complete = False
        self.handed_over: HandedOver | None = None
        self._finalizer: weakref.ref[Callable[[], None]] | None = None
        self._previous_iteration = context.epoch.newest_iteration
        self.replication = Replication(context.strategy, context.options, identity)
        self._verdict: SaveVerdict | None = None
        self._called = self._captured = self._returned = called
        self._durable: float | None = None
        self._record = SaveRecord(context.events, identity.iteration, called)
        self._record.waited_s = waited_s

    # Captured.

    def capture(self, state: Any) -> None:
        """Capture the state, and begin to copy it; errors are told when all finalize."""
        context, iteration = self._context, self.identity.iteration
        self._saves.in_flight.append(self)
        context.checkpoints.under_way.append(iteration)
        context.epoch.newest_iteration = iteration
        own: Slot | None = None
        began = time.monotonic()
        with Attempt() as capturing:
            captures = self._saves.capture
            with record_function("localckpt.stage"):
                own, self._divided = captures.capture(
                    *(wrapped(state), self.identity),
                    is_sent=self._saves.is_protected,
                    # Whole tensors are compared.
                    node_ranks=() if self._compares_replicas else captures.node_ranks(),
                )
            self.slots.append(own)
            if self._compares_replicas:
                own.hold("comparison")
            self._captured = time.monotonic()
            # The wait for a buffer that an older save has counts as well.
            self._record.waited_s += own.reserved_at - began
            self._record.copied = own.reserved_at, self._captured
            self._record.nbytes = own.nbytes
        with Attempt() as copying:
            # Also without an image: the ranks that were to get copies are not left waiting.
            if self._saves.is_protected:
                with record_function("localckpt.replicate"):
                    self.replication.begin(context.store, own, capturing.error_text)
            if capturing.succeeded and not self.replication.comes_later:
                self._take_copies()
            best = context.options.retention.best
            if best is not None and self.identity.rank == 0:
                self._metric = best.value(self._metrics)
        if (failure := capturing.failure or copying.failure) is not None:
            self.note_error(failure)
        # Else these variables would keep the error, and the error its frames, alive.
        del capturing, copying, failure
        self._metrics = None
        self._returned = time.monotonic()

    # Carried out at once, or by a queue behind training.

    def run(self) -> None:
        """Carry the save out at once, and agree with the other ranks on its outcome."""
        self.is_scheduled = True
        outcome = None
        with Attempt() as keeping:
            self.carry_out()
            outcome = self.outcome().to_json()
        try:
            self._agree("save", keeping, outcome)
        except PeerLostError as error:
            self.fail(error)
            raise
        except CheckpointingException as error:
            self.roll_back(error)
            advice = _kept(error.text)
            raise Failure.of(error).error().advised("save", advice) from error.__cause__
        finally:
            self._record.note_blocking()

    def request(self, finalize: Callable[[], None]) -> AsyncRequest:
        """Return a request that carries the save out behind training.

        A queue of this library judges the outcomes of all ranks together with the ends of the call.
        It keeps ``finalize`` as long as it has the request: see :attr:`is_forgotten`.
        """
        self._finalizer = weakref.ref(finalize)
        # A user's hooks are asked what they hold in the trainer's thread only.
        is_judged = self._context.images is not None
        call = AsyncCall(
            self.carry_out,
            report_fn=(lambda: self.outcome().to_json()) if is_judged else None,
            judge_fn=judge_save if is_judged else None,
            verdict_fn=self._take_verdict if is_judged else None,
            iteration=self.identity.iteration,
            name="save",
            failure_fns=[self.fail],
            stop_fns=[self._saves.stop_waiting],
            waits_for_fn=self.replication.waits_for,
            scheduled_fn=self._take_ticket,
            # A request that is frozen twice is written once.
            hand_over=cache(self._hand_over),
        )
        self._record.note_blocking()
        return AsyncRequest(call, (), [finalize])

    @property
    def is_forgotten(self) -> bool:
        """True once no queue, nor anybody else, has the request."""
        return self._finalizer is None or self._finalizer() is None

    def _take_ticket(self, ticket: Ticket) -> None:
        self.ticket, self.is_scheduled = ticket, True

    def _hand_over(self) -> Callable[[], None]:
        """Carry the save out in a thread; return what a foreign queue's process waits for it by."""
        self.is_scheduled = True
        self.handed_over = HandedOver(self._run_here, self._context.options.timeout)
        self._saves.foreign.submit(self.handed_over.task)
        return self.handed_over.function

    def _run_here(self) -> str | None:
        try:
            self.carry_out()
        except Exception as error:  # noqa: BLE001 - raised on every rank when all finalize
            self.note_error(error)
        return self.error

    def _take_verdict(self, fields: Any) -> None:
        self._verdict = SaveVerdict.from_json(fields)

    @runs_in_trainer
    def carry_out(self) -> None:
        self.keep_local()
        # Not after it was given up.
        if any(save is self for save in self._saves.in_flight):
            self.protect()

    # Local.

    def keep_local(self) -> None:
        """Commit the captured state; raises what the store, or the user's hook, raises."""
        self.is_scheduled = True
        for slot in self.slots:
            slot.await_digests()
        try:
            self._check()
            if (metric := self._measured(self._metric)) is not None:
                # Other nodes note it when the save is complete.
                self._context.store.claim.note_trust(self.identity.checkpoint, metric=metric)
            self._context.store.commit(self.slots)
            self._digest_replicas()
        except Exception:
            # The save is not over while other ranks send to it.
            self.replication.wait()
            raise

    def _check(self) -> None:
        """Run the user's check on the captured state, and note a bad state before its commit."""
        check = self._context.options.check
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

    def _measured(self, metric: float | None) -> tuple[str, float] | None:
        best = self._context.options.retention.best
        if best is None or metric is None:
            return None
        return best.metric, metric

    def _mark_bad(self, why: str) -> None:
        self._context.store.claim.note_trust(self.identity.checkpoint, mark="bad", why=why)

    # Protected.

    def protect(self) -> None:
        """Commit the pieces of other ranks, which ends this rank's part. May be called twice."""
        if self._durable is not None:
            return
        self._digest_replicas()
        if self.replication.comes_later:
            captured = len(self.slots)
            try:
                self._take_copies()
            except Exception as error:  # noqa: BLE001 - raised on every rank when all finalize
                self.note_error(error)
            self._context.store.commit(self.slots[captured:])
        self._durable = time.monotonic()

    def _digest_replicas(self) -> None:
        if self._compares_replicas and self._replicas is None and self.slots:
            with self.slots[0].reading() as image:
                self._replicas = replica_digests(image)
            self.slots[0].end_hold("comparison")

    def _take_copies(self) -> None:
        self.slots += self.replication.finish()
        # Now that all slots of this rank are reserved.
        self._saves.check_space()

    def outcome(self) -> SaveOutcome:
        """Return the outcome of the save on this rank, for the verdict of all ranks."""
        missing: list[CkptID] = []
        context, identity = self._context, self.identity
        with Attempt() as finishing:
            if self.handed_over is not None:
                self.error = self.error or self.handed_over.await_error()
            self.protect()
            holds = context.store.holds
            missing += [s.identity.ckpt_id for s in self.slots if not holds(s.identity)]
        spares = self._saves.prefetches.look()
        return SaveOutcome(
            identity.iteration,
            identity.generation,
            self.error or finishing.error_text,
            tuple(missing),
            tuple(self.replication.kept),
            context.checkpoints.copies_wanted(identity.rank),
            self.replication.group,
            self.bad,
            tuple((part.set_id, part.digest) for part in self._replicas or ()),
            self._divided,
            self._metric,
            self._saves.repairs.wanted(),
            context.checkpoints.found(),
            self.slots[0].nbytes if self.slots else 0,
            spares,
            self._saves.prefetches.places() if spares else (),
        )

    # Complete, or failed.

    def finalize(self) -> Durability:
        """Complete the save, or roll it back, as all ranks do; all ranks call it."""
        identity = self.identity
        if (verdict := self._verdict) is None:
            # The queue is a foreign one, or has not asked the other ranks.
            outcome = self.outcome().to_json()
            try:
                verdict = self._agree("finalize", Attempt(), outcome)
            except CheckpointingException as error:
                self.fail(error)
                raise
        self._context.checkpoints.remove(identity.checkpoint)
        self._context.checkpoints.agree_on(verdict.found)
        if not verdict.parts_fit:
            self._saves.capture.divide_no_more("; ".join(verdict.problems))
        bad, failed = verdict.bad, self._failure(verdict)
        if isinstance(failed, DivergenceError) and not self._saves.is_divergence_fatal:
            bad, failed = str(failed), None
        if failed is not None:
            # Never lowered: a later save may be under way, and no number is used twice.
            epoch = self._context.epoch
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
        self._saves.repairs.begin(verdict.lacking)
        self._saves.prefetches.begin(identity.checkpoint, verdict.prefetches)
        return verdict.reached

    def _failure(self, verdict: SaveVerdict) -> SaveFailedError | None:
        """Make the error of a save that failed, or whose replicas differ; ``None`` for neither."""
        iteration, saves, context = self.identity.iteration, self._saves, self._context
        if verdict.reached is None:
            problems = "; ".join(verdict.problems)
            failed = SaveFailedError(f"the save of iteration {iteration} failed: {problems}")
            failed.is_mismatched = verdict.is_mismatched
            return failed.advised("save", _kept(problems))
        if self._compares_replicas:
            saves.has_diverged = verdict.divergence is not None
        if verdict.divergence is None:
            return None
        return divergence_error(
            *(context.ranks, context.events, iteration, verdict.divergence, self._replicas or []),
            is_kept=not saves.is_divergence_fatal,
        )

    def _agree(self, step: str, attempt: Attempt, outcome: Any) -> SaveVerdict:
        phase = f"{step} iteration {self.identity.iteration}"
        self._verdict = self._context.ranks.decide(
            phase, attempt.of(outcome), judge_save, kind=step, read=SaveVerdict.from_json
        )
        assert self._verdict is not None
        return self._verdict

    def _complete(
        self, reached: Durability, bad: str | None, metric: tuple[str, float] | None
    ) -> None:
        context, identity = self._context, self.identity
        checkpoints, iteration = context.checkpoints, identity.iteration
        if bad is not None:
            logger.warning("iteration %d is marked bad: %s", iteration, bad)
            checkpoints.note(identity.checkpoint, mark="bad", why=bad)
        if metric is not None:
            checkpoints.note(identity.checkpoint, metric=metric)
        checkpoints.add(identity.checkpoint, reached)
        slots, prune = self._all_slots(), self._saves.retire(iteration)

        def settle() -> None:
            if bad is None:
                context.resuming.note_progress(iteration)
            else:
                # On all nodes, since the node of the rank that found it may be lost.
                self._mark_bad(bad)
            context.store.release(slots)
            prune()

        tier: Tier = "replicated" if reached.survives_node_loss else "local"
        self._end("retire what is older than", settle, durable=self._durable, tier=tier)
        if bad is None:
            self._saves.note_iteration(iteration)
        self.is_complete = True

    def roll_back(self, error: BaseException | None = None) -> None:
        """Remove what this rank has written, so that the iteration can be saved again.

        Without an error it is a save that nobody carries out.
        """
        context, iteration = self._context, self.identity.iteration
        self.replication.wait()
        if context.epoch.newest_iteration == iteration:
            context.epoch.newest_iteration = self._previous_iteration
        slots = self._all_slots()

        def remove() -> None:
            context.store.discard(slots)
            context.store.clean_up_failed_save(iteration)

        self._end("remove", remove, outcome="failed", error=error)

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
        self.replication.wait()
        release = partial(self._context.store.release, self._all_slots())
        self._end("release", release, outcome="unknown")

    def _end(
        self,
        what: str,
        settle: Callable[[], None],
        *,
        durable: float | None = None,
        tier: Tier | None = None,
        outcome: Outcome | None = None,
        error: BaseException | None = None,
    ) -> None:
        """Forget the save, and do in this node's store what its end asks for.

        The storage may never answer, which changes nothing of the end that all ranks know of.
        """
        context, iteration = self._context, self.identity.iteration
        for slot in self._all_slots():
            slot.end_hold("comparison")
        self._saves.in_flight = [other for other in self._saves.in_flight if other is not self]
        # A queue keeps its last error, whose frames keep the save.
        self.ticket = None
        context.checkpoints.forget(iteration)
        try:
            if context.images is None:
                # A user's hooks are called in the trainer's thread only.
                settle()
            else:
                waits_s, is_to_stop = context.ranks.timeout_s, self._saves.is_to_stop
                answered(
                    f"{what} iteration {iteration} in", "its store", waits_s, settle, is_to_stop
                )
        except AbortedError as aborted:
            logger.info("could not %s iteration %d: %s", what, iteration, aborted)
        except Exception:
            logger.exception(
                "rank %d could not %s iteration %d", self.identity.rank, what, iteration
            )
        self._record.note_end(durable=durable, tier=tier, outcome=outcome, error=error)

    def report(self) -> SaveReport:
        return SaveReport(
            self.identity.iteration,
            self.slots[0].nbytes if self.slots else 0,
            self._captured - self._called,
            self.replication.seconds,
            self._returned - self._called,
            None if self._durable is None else self._durable - self._called,
            self.replication.sent_nbytes,
            self.slots[0].written_nbytes if self.slots else None,
        )

    def _all_slots(self) -> list[Slot]:
        checkpoint = self.identity.checkpoint
        return [s for s in self._context.store.slots if s.identity.checkpoint == checkpoint]

    def note_error(self, error: Exception) -> None:
        """Log an error of this rank, and keep its text for the outcome; the first one counts."""
        logger.error(
            "rank %d cannot save iteration %d: %s",
            self.identity.rank,
            self.identity.iteration,
            # The text alone, since a handler that keeps the exception keeps the image's memory.
            described(error),
            exc_info=None if isinstance(error, CheckpointingException) else error,
        )
        # What went wrong first is why; what follows from it says less.
        self.error, self.slots = self.error or with_class(error), []
        self.replication.forget_error()


class Saves:
    """Saves of one manager: those in flight, and what makes them.

    Attributes:
        in_flight: Saves that are captured and not finalized, the oldest first; the same on all
            ranks.
        has_diverged: Whether the last save that compared replicas found a difference; the same on
            all ranks.
        has_checked_space: Whether the room in the store was checked.
        foreign: Carries out the saves that queues of other libraries have.
        is_to_stop: Tells whether the job is to stop, so that nothing is to wait for storage.
    """

    def __init__(
        self, context: Context, is_to_stop: Callable[[], bool], *, is_protected: bool
    ) -> None:
        self.context, self.is_to_stop = context, is_to_stop
        self.in_flight: list[Save] = []
        self.capture, self.repairs = StateCapture(context), Repairs(context)
        self.prefetches = Prefetches(context)
        self.is_protected = is_protected
        self.is_divergence_fatal = context.options.on_divergence == "error"
        self.has_diverged = False
        self.foreign = SerialThread("localckpt-foreign")
        self.has_checked_space = False
        file = context.options.iteration_file
        self._iteration_file = None if file is None else Path(file).absolute()
        self._noting: Task[None] | None = None
        self._has_warned = False

    # Which may begin.

    def give_up_forgotten(self, iteration: int) -> None:
        """Give up the saves that no queue will finalize, before an iteration is saved."""
        gone = [save for save in self.in_flight if save.is_forgotten]
        for save in gone:
            if save.is_scheduled:
                # Its queue was left with an error. It may be complete: find_latest() will tell.
                save.leave()
        if never := [save for save in gone if not save.is_scheduled]:
            for save in reversed(never):
                save.roll_back()
            raise never_scheduled(
                never, f"Nothing was begun of iteration {iteration}, which can be saved now."
            )

    def admit(self, iteration: int, is_async: bool) -> bool:
        """Return whether one more save may begin; the same on all ranks, which all call it.

        Only polls finalize saves otherwise, and there may be fewer polls than saves: checkpoints
        that nobody prunes, and the memory of their images, would pile up. So older saves are
        finalized here as far as they must be.
        """
        if (images := self.context.images) is None:
            return True
        if self.context.options.on_busy == "wait" or not is_async:
            while self._is_full and self._finalize_oldest():
                pass
            waiting = self.not_scheduled()
            if self._is_full and waiting and images.is_busy():
                raise never_scheduled(
                    waiting,
                    f"They have all buffers, so nothing was begun of iteration {iteration}.",
                )
            return True
        over_on_all, busy, waiting_for = self.context.ranks.decide(
            "see whether buffers are free",
            lambda: [images.is_busy(), self._over_here()],
            _judge_busy,
            read=shaped((int, [int], [int])),
        )
        # What is over on all ranks is finalized here, before anything is skipped because of it.
        for _ in range(over_on_all):
            if self._is_full:
                self._finalize_oldest()
        ranks = sorted({*busy, *(waiting_for if self._is_full else ())})
        if ranks:
            logger.warning(
                "iteration %d is not saved: the %d staging buffers of rank%s %s are busy with "
                "older saves",
                *(iteration, images.num_buffers),
                *("s"[: len(ranks) > 1], ", ".join(map(str, ranks))),
            )
        return not ranks

    def not_scheduled(self) -> list[Save]:
        return [save for save in self.in_flight if not save.is_scheduled]

    def require_none(self, what: str) -> None:
        if self.in_flight:
            iterations = [save.identity.iteration for save in self.in_flight]
            raise CheckpointingException(
                f"cannot {what} while the saves of iterations {iterations} are in "
                f"flight: finalize them first "
                f"(AsyncCallsQueue.maybe_finalize_async_calls(blocking=True))"
            )

    @property
    def _limited(self) -> list[Save]:
        """Saves that count; a foreign queue finalizes its own by itself."""
        return [save for save in self.in_flight if save.handed_over is None]

    @property
    def _is_full(self) -> bool:
        """True if as many saves are in flight as may be; the same on all ranks."""
        images = self.context.images
        return images is not None and len(self._limited) >= images.num_buffers

    def _over_here(self) -> int:
        """Count the oldest saves that are over on this rank."""
        count = 0
        for save in self._limited:
            if save.ticket is None or not save.ticket.is_over():
                break
            count += 1
        return count

    def _finalize_oldest(self) -> bool:
        """Finalize the oldest save, unless a foreign queue has it; return whether that was done."""
        oldest = self._limited[0]
        if oldest.ticket is None:
            return False
        oldest.ticket.finalize()
        # A queue that was left with an error meanwhile has finalized nothing.
        return oldest not in self.in_flight

    # What they share.

    def compares_replicas(self, generation: Generation) -> bool:
        """Return whether a save compares replicas, as all do after one that differed."""
        every = self.context.options.check_replicas
        if every is None or self.context.ranks.world_size < 2:
            return False
        return self.has_diverged or generation.sequence % SAVES_AN_ATTEMPT % every == 0

    def check_space(self) -> None:
        """Check the room in the first save, once all images of this rank are known."""
        if self.has_checked_space or (images := self.context.images) is None:
            return
        rank, nodes = images.rank, self.context.epoch.nodes
        # One more than are kept is there while it is written.
        images.check_space(self.context.options.retention.most + 1, nodes.count(nodes[rank]))
        self.has_checked_space = True

    def retire(self, saved: int) -> Callable[[], None]:
        """Forget what is older than a complete iteration; return what prunes it here."""
        context = self.context
        checkpoints, nodes, retention = (
            context.checkpoints,
            context.epoch.nodes,
            context.options.retention,
        )
        if (images := context.images) is None:
            # Hooks keep older checkpoints as they choose.
            del checkpoints.complete[1:]
            return partial(context.store.clean_up, saved)
        here = [rank for rank, node in enumerate(nodes) if node == nodes[images.rank]]
        over = checkpoints.keep(saved, retention)
        kept = sorted({checkpoint.iteration for checkpoint in checkpoints.complete})
        is_leader = images.rank == here[0]
        metrics = checkpoints.metrics if retention.best is not None and is_leader else None

        def prune() -> None:
            if over is not None:
                began = time.monotonic()
                # Ranks whose folders this one cleans up now run on other nodes.
                adopted = images.claim.ranks() - set(here) if is_leader else set[int]()
                if images.prune(lambda shard: over.takes(shard.checkpoint), adopted):
                    context.events.emit("pruned", began=began, step=saved, details={"kept": kept})
            if metrics is not None:
                # All of them, since the node may have taken the place of another one. Saves under
                # way may have noted theirs.
                context.store.claim.keep_metrics(metrics, checkpoints.under_way)

        return prune

    def note_iteration(self, iteration: int) -> None:
        """Write a complete iteration to the launcher's file, on the first rank of each node."""
        path, rank, nodes = self._iteration_file, self.context.ranks.rank, self.context.nodes
        is_stuck = self._noting is not None and not self._noting.done()
        if path is None or nodes.index(nodes[rank]) != rank or is_stuck:
            return
        # Others may read it, as they may read that of Megatron-LM.
        write = partial(replace_file, path, b"%d\n" % iteration, 0o644, f".new-{rank}")
        try:
            self._noting = begin(write, "localckpt-iteration-file")
            self._noting.take_result(min(_NOTING_S, self.context.ranks.timeout_s))
        except (OSError, CheckpointingException) as error:
            level, self._has_warned = logging.DEBUG if self._has_warned else logging.WARNING, True
            logger.log(level, "a launcher may take the job for stuck: %s: %s", path, error)

    def stop_waiting(self) -> None:
        """End the exchange with other ranks, which may not come any more."""
        if self.is_protected:
            self.context.strategy.give_up()

    def closing_steps(self) -> Iterable[Callable[[], object]]:
        """Yield what ends all work, in the order in which it has to be done."""
        yield self.repairs.close
        yield self.prefetches.close
        yield from (save.replication.wait for save in self.in_flight)
        yield self.foreign.close
        yield from (save.handed_over.close for save in self.in_flight if save.handed_over)
        yield self._forget_all

    def _forget_all(self) -> None:
        # Memory that is being filled, as when a capture was interrupted.
        unfilled = [slot for slot in self.context.store.slots if slot.source is None]
        self.context.store.discard(unfilled)
        for save in self.in_flight:
            self.context.checkpoints.forget(save.identity.iteration)
        self.in_flight = []


def never_scheduled(saves: list[Save], consequence: str) -> CheckpointingException:
    """Make the error for requests that no queue was given."""
    iterations = ", ".join(str(save.identity.iteration) for save in saves)
    many = len(saves) > 1
    return CheckpointingException(
        f"the request{'s' * many} that save() returned for iteration{'s' * many} {iterations} "
        f"{'were' if many else 'was'} never scheduled, so nobody writes "
        f"{'them' if many else 'it'}: hand what save(..., is_async=True) returns to "
        f"queue.schedule_async_request(), on every rank, before the next save. {consequence} "
        f"Checkpoints saved before are as they were"
    )


def _judge_busy(reports: list[list[int]]) -> list[Any]:
    """Count the saves that are over on all ranks; list busy ranks, and ranks with none over."""
    busy = [rank for rank, (is_busy, _) in enumerate(reports) if is_busy]
    waiting = [rank for rank, (_, over) in enumerate(reports) if not over]
    return [min(over for _, over in reports), busy, waiting]
