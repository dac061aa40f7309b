"""The queue of calls behind training.

Calls are finalized in the order in which they were scheduled, whoever carries them out, and on
all ranks in the same poll or on none. No poll touches a device.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from localckpt.async_save.callers import (
    OWN_WORK,
    AsyncCaller,
    PendingCall,
    PersistentAsyncCaller,
    TemporalAsyncCaller,
    ThreadAsyncCaller,
)
from localckpt.async_save.processes import NotSendableError
from localckpt.async_save.request import (
    AsyncRequest,
    Ticket,
    function_name,
    must_run_in_trainer,
    run_failure_fns,
    run_stop_fns,
)
from localckpt.errors import CheckpointingException, PeerLostError
from localckpt.interrupted import OfOneProcess, closed_by_interrupts
from localckpt.ranks.deadline import store_errors
from localckpt.ranks.watch import CallVerdict, Watch, Watched

if TYPE_CHECKING:
    import torch.distributed as dist

logger = logging.getLogger(__name__)

# Longest wait for work of this rank that was aborted, and which may be inside of a long write.
_ABORTED_S = 0.2


@dataclass(slots=True, eq=False, kw_only=True)
class _Entry(Watched):
    request: AsyncRequest
    call: PendingCall
    caller: AsyncCaller | None

    def __str__(self) -> str:
        return f"call {self.number} ({self.name})"


class AsyncCallsQueue(OfOneProcess):
    """Runs requests behind training and finalizes them, in order, on all ranks together.

    All ranks schedule the same calls in the same order and poll equally often, blocking in the same
    polls. A poll sends no message; several ranks finalize one or two polls after the call is over
    on all. Used by one thread.

    Args:
        persistent: Send calls that can be pickled to one worker process; else fork one a call.
            Functions marked with :func:`runs_in_trainer` run in a thread of this process.
        timeout_s: The longest that a blocking poll waits for a call, in seconds. A rank's own
            part gets seven tenths of it.
        process_group: The ranks that agree; ``None`` for all.
        nice: How much lower than the trainer's the CPU priority of its processes is.
        idle_io: Whether their disk accesses wait for those of others, where the I/O scheduler
            knows such a class.
    """

    _noun = "queue"
    _after_abort = "close() it, and make another one"

    def __init__(
        self,
        persistent: bool = True,
        *,
        timeout_s: float = 300.0,
        process_group: dist.ProcessGroup | None = None,
        nice: int = 10,
        idle_io: bool = True,
    ) -> None:
        super().__init__()
        self._persistent = persistent
        self._timeout_s = timeout_s
        # They hold no thread and no process until they get a call.
        self._thread = ThreadAsyncCaller(timeout_s=timeout_s)
        self._worker = PersistentAsyncCaller(timeout_s=timeout_s, nice=nice, idle_io=idle_io)
        self._forker = TemporalAsyncCaller(timeout_s=timeout_s, nice=nice, idle_io=idle_io)
        self._callers: list[AsyncCaller] = [self._thread, self._worker, self._forker]
        self._entries: deque[_Entry] = deque()
        self._scheduled = 0
        self._watch = Watch(timeout_s, process_group)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:
            self._leave()

    def warm_up(self) -> None:
        """Start the worker process in the background, so that the first call finds it ready."""
        self._check_usable()
        if self._persistent:
            self._worker.warm_up()

    @closed_by_interrupts
    def schedule_async_request(self, request: AsyncRequest | tuple[Any, ...]) -> int:
        """Begin a call behind training.

        What goes wrong on this rank from here on, the beginning included, is raised on every rank
        when the call's turn to be finalized comes.

        Args:
            request: An :class:`AsyncRequest`, or one of Megatron-Core or NVRx.

        Returns:
            The number of the call.

        Raises:
            CheckpointingException: ``request`` is something else, or this queue is closed.
            MismatchError: The process group, or its members, are not those of the first call.
        """
        self._check_usable()
        self._watch.join()
        request = AsyncRequest.of(request).scheduled(self._scheduled)
        # What the call works on is not kept until it is finalized.
        rest = request._replace(
            async_fn=request.call.without_work(),
            async_fn_args=(),
            async_fn_kwargs={},
            preload_fn=None,
        )

        caller: AsyncCaller | None = None
        try:
            try:
                caller, call = self._begin(request.preload())
            except Exception as error:  # noqa: BLE001 - raised on every rank when it is finalized
                call = PendingCall(function_name(request.async_fn))
                call.end(error)
            own, number = rest.call, rest.call_idx
            entry = _Entry(
                *(number, call.name, call, own.report_fn, own.judge_fn, own.iteration),
                is_urgent=own.is_urgent_fn,
                request=rest,
                call=call,
                caller=caller,
            )
            self._entries.append(entry)
            self._watch.add(entry)
            self._scheduled += 1
        except BaseException:
            # An interrupt closes the queue: a call that has begun is to wait for no other rank.
            run_stop_fns(rest)
            raise
        if (scheduled_fn := request.call.scheduled_fn) is not None:
            scheduled_fn(
                Ticket(lambda: self._are_over(number), lambda: self._finalize_until(number))
            )
        return number

    @closed_by_interrupts
    def maybe_finalize_async_calls(
        self, blocking: bool = False, no_dist: bool = False
    ) -> list[int]:
        """Finalize the calls that are over on all ranks, oldest first.

        Args:
            blocking: Wait for all calls.
            no_dist: Look at this rank only and ask no other.

        Returns:
            The numbers of the calls that were finalized.

        Raises:
            CheckpointingException: A call failed on some rank; the same on every rank. It is out
                of the queue, and the calls after it can be finalized.
            PeerLostError: Some rank did not come in time.
        """
        if not (self._entries or self._interrupted):
            return []
        self._check_usable(also_closed=True)
        if not no_dist:
            self._watch.poll(blocking)
        finalized = []
        while self._entries:
            number = self._entries[0].number
            if not self._finalize_oldest(blocking, no_dist):
                break
            finalized.append(number)
        return finalized

    def pass_step(self, step: int | None) -> None:
        """Count the polls from here on by the steps of a training loop; ``None`` to count polls."""
        self._watch.step = step

    def get_num_unfinalized_calls(self) -> int:
        return len(self._entries)

    def waits_for(self) -> str:
        waits_for = self._entries[0].request.call.waits_for_fn() if self._entries else ""
        return f"its own part{': ' * bool(waits_for)}{waits_for}"

    @property
    def is_over_here(self) -> bool:
        return self._are_over(self._scheduled)

    def coming(self) -> CallVerdict | None:
        """Return the verdict on the oldest call, before it takes effect; asks no other rank."""
        return self._watch.coming(self._entries[0]) if self._entries else None

    def check_for_errors(self) -> None:
        """Raise if a call has failed on this rank; it stays, until every rank raises its error."""
        for entry in self._entries:
            if entry.call.error is not None:
                raise CheckpointingException(
                    f"{entry} has failed on this rank: {entry.call.error}. Every rank will "
                    f"raise it when it is finalized"
                ) from entry.call.error

    def wait_until_finished(self) -> None:
        self.maybe_finalize_async_calls(blocking=True)

    def _end_waits(self) -> None:
        self._watch.cut_off()
        for entry in tuple(self._entries):
            run_stop_fns(entry.request)

    def close(self, abort: bool = False) -> None:
        """Finalize all calls, then end the worker and the threads. May be called twice.

        Args:
            abort: Give up what is in flight and ask no other rank; the failure functions run. Also
                from another thread while a poll waits, which ends with an error.

        Raises:
            CheckpointingException: As :meth:`maybe_finalize_async_calls`; everything is closed
                and every call that could be finalized is.
        """
        if self._closed or self._is_fork:
            return
        if self._abort.is_set():
            self._leave()
            return
        self._closed = True
        raised: Exception | None = None
        while self._entries and not abort:
            try:
                self.maybe_finalize_async_calls(blocking=True)
            except Exception as error:  # noqa: BLE001 - raised below, when all is closed
                if raised is not None:
                    logger.error("a further call failed at close: %s", error)
                # A rank that did not come for one call will not come for the next.
                raised, abort = raised or error, self._watch.has_lost_ranks
        if abort:
            self._stop_waiting()
        for caller in self._callers:
            caller.close(abort)
        self._watch.close()
        for entry in tuple(self._entries):
            if not self._take_out(entry):
                continue
            why = f"{entry} was given up when its queue was closed"
            cause = raised or CheckpointingException(why)
            if entry.may_stand:
                cause = PeerLostError(f"{why}. Other ranks may have finalized it")
                cause.outcome_unknown = True
            run_failure_fns(entry.request, cause)
        if raised is not None:
            try:
                raise raised
            finally:
                # Else the error would keep itself by this variable.
                del raised

    def _leave(self) -> None:
        """Close after an error of this rank: its calls end well, but the others may not come."""
        if self._closed or self._is_fork:
            return
        self._closed = True
        self._stop_waiting()
        is_aborted = self._abort.is_set()
        for caller in self._callers:
            caller.close(is_aborted, _ABORTED_S if is_aborted else None)
        self._watch.close()
        if self._entries:
            logger.log(
                logging.INFO if is_aborted else logging.WARNING,
                "%s: not finalized, because the queue was %s",
                *(", ".join(map(str, self._entries)),),
                "aborted" if is_aborted else "left with an error",
            )
            self._entries.clear()

    def _stop_waiting(self) -> None:
        self._watch.leave()
        for entry in self._entries:
            run_stop_fns(entry.request)

    def _close_interrupted(self, call: str) -> None:
        self._interrupted = self._interrupted or call
        self._leave()

    def _begin(self, request: AsyncRequest) -> tuple[AsyncCaller, PendingCall]:
        function = request.call.function
        if function is None or must_run_in_trainer(function):
            return self._thread, self._thread.schedule_async_call(request)
        if self._persistent:
            try:
                return self._worker, self._worker.schedule_async_call(request)
            except NotSendableError as reason:
                logger.debug("a process is forked for call %d: %s", request.call_idx, reason)
        return self._forker, self._forker.schedule_async_call(request)

    def _are_over(self, last: int) -> bool:
        entries = (entry for entry in self._entries if entry.request.call_idx <= last)
        return all(entry.call.done() for entry in entries)

    def _finalize_until(self, last: int) -> None:
        while self._entries and self._entries[0].request.call_idx <= last:
            self._check_usable(also_closed=True)
            self._finalize_oldest(blocking=True)

    def _finalize_oldest(self, blocking: bool, no_dist: bool = False) -> bool:
        entry = self._entries[0]
        verdict = self._watch.verdict(
            entry, blocking, no_dist, partial(self._wait_for_own_work, entry)
        )
        if verdict is None:
            return False
        if verdict.is_mismatched:
            self._drop_all_behind(entry)
        self._raise_failure(entry, verdict)
        verdict_fn = entry.request.call.verdict_fn
        try:
            if verdict_fn is not None and not verdict.is_own:
                # It may be none of this program's.
                with store_errors(f"take the verdict on {entry}"):
                    verdict_fn(verdict.value)
            for finalize_fn in entry.request.finalize_fns:
                finalize_fn()
        finally:
            # One that raises stops no later call.
            self._take_out(entry)
        return True

    def _raise_failure(self, entry: _Entry, verdict: CallVerdict) -> None:
        if verdict.failure is None:
            return
        failed = verdict.failure.error()
        # A rank that is ahead keeps its call: the others drop the one that it does not have.
        if verdict.is_ahead or self._take_out(entry):
            self._watch.has_lost_ranks = verdict.is_lost
            if not verdict.is_ahead:
                run_failure_fns(entry.request, failed)
        try:
            raise failed from entry.call.error
        finally:
            # Else the errors would keep themselves, and what was to be saved, by these variables.
            del failed, entry

    def _wait_for_own_work(self, entry: _Entry, start: float) -> None:
        patience_s = OWN_WORK * self._timeout_s
        left_s = start + patience_s - time.monotonic()
        patience = self._watch.patience(f"finish {entry}")
        if patience.wait(entry.call.wait, left_s, self.waits_for) or entry.caller is None:
            return
        text = (
            f"{entry} was not over after a wait of {patience_s:g} s (of timeout_s="
            f"{self._timeout_s:g}, the rest is kept for the agreement of the ranks)"
        )
        if waits_for := entry.request.call.waits_for_fn():
            error: CheckpointingException = PeerLostError(f"{text}: {waits_for}")
        else:
            error = CheckpointingException(text)
        if not entry.caller.give_up(entry.call, error):
            logger.error("%s cannot be ended, since it runs in a thread of this process", entry)

    def _drop_all_behind(self, oldest: _Entry) -> None:
        """Drop all calls but the oldest, after a mismatch: other ranks have dropped theirs."""
        self._entries.remove(oldest)
        dropped, self._entries = self._entries, deque([oldest])
        self._watch.begin_anew(self._scheduled)
        why = f"{oldest} was made on some ranks alone, and the calls after it failed with it"
        for entry in dropped:
            run_stop_fns(entry.request)
        for entry in dropped:
            run_failure_fns(entry.request, CheckpointingException(why))

    def _take_out(self, entry: _Entry) -> bool:
        """Take a call out of the queue; False if another thread that aborts has done so."""
        try:
            self._entries.remove(entry)
        except ValueError:
            return False
        return True
