"""Callers of functions: a thread of the trainer, a lasting worker process, or forked processes.

Each runs its calls one after another, each in a thread that waits for the call before: an idle
caller holds no thread, and interpreter exit waits for the calls that are in flight. A caller can
be asked whether its latest call is over on all ranks; finalizing in order is the queue's part.

A queue of another library has a process of its own for a call that a thread here makes. It loses
what its process raises, and its persistent worker ends with it. So the function that it is given
raises nothing: it waits until the trainer has closed some memory. The function is plain data, and
finds the memory by the trainer's pid and the number of a descriptor.
"""

from __future__ import annotations

import io
import logging
import os
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from localckpt.async_save.processes import ForkedProcess, Priority, WorkerProcess, pack_call
from localckpt.async_save.request import AsyncRequest, do_nothing, function_name
from localckpt.errors import CheckpointingException
from localckpt.failure_texts import described
from localckpt.interrupted import OfOneProcess
from localckpt.ranks.failure import CallEnd
from localckpt.threads import Ending, Latch, Task
from localckpt.waiting import wait_until

if TYPE_CHECKING:
    from localckpt.ranks.ranks import Ranks

logger = logging.getLogger(__name__)

# The share of a deadline in which a rank waits for its own work; the rest is for the agreement.
OWN_WORK = 0.7
_LONGEST_PAUSE_S = 0.01


class PendingCall(Ending):
    """Call on this rank, and its end.

    ``run`` carries it out, in a thread. ``stop`` ends it from another one, and returns whether
    nothing of it runs any more; then ``release`` gives back what it holds.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[], object] = do_nothing,
        stop: Callable[[], bool] = lambda: True,
        release: Callable[[], object] = do_nothing,
    ) -> None:
        super().__init__()
        self.name = name
        self.run, self.stop, self._release = run, stop, release
        self._lock = threading.Lock()
        self.is_running = False
        # Set once the call after it may begin.
        self.has_left = Latch()

    def end(self, error: BaseException | None) -> None:
        with self._lock:
            if not self.done():
                self.error = error
                self.over.set()

    def release(self) -> None:
        self._release()
        # They hold the function and its arguments.
        self.run, self.stop, self._release = do_nothing, lambda: True, do_nothing


class AsyncCaller(OfOneProcess, ABC):
    """Carries out calls one after another, on this rank, beside the thread that schedules them.

    Args:
        timeout_s: The longest that :meth:`close`, a blocking wait, and the interpreter's exit
            wait for calls that are in flight. A call in a thread cannot be ended from outside, so
            exit waits for that one until it returns.
    """

    _noun = "caller"

    def __init__(self, *, timeout_s: float = 300.0) -> None:
        super().__init__()
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        # Calls in order that have not left, and their threads and those of calls before.
        self._begun: list[PendingCall] = []
        self._tasks: list[Task[None]] = []
        self._latest = PendingCall(function_name(None))
        self._latest.end(None)
        self._scheduled = 0
        self._ranks: Ranks | None = None

    @abstractmethod
    def _make_call(self, request: AsyncRequest, function: Callable[..., Any]) -> PendingCall: ...

    def _close(self) -> None:
        """Give back what is held between calls."""

    def schedule_async_call(self, request: AsyncRequest) -> PendingCall:
        """Begin a call, or put it after those that are not over. Its ``preload_fn`` runs first.

        Raises:
            CheckpointingException: This caller is closed, was made by another process, or cannot
                carry out such a call.
        """
        self._check_usable()
        request = request.preload()
        function = request.call.function
        if function is None:
            call = PendingCall(function_name(None))
            call.end(None)
        else:
            call = self._make_call(request, function)
            self._enqueue(call)
        self._latest = call
        self._scheduled += 1
        return call

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """Ask whether the call that was scheduled last is over on all ranks.

        Args:
            blocking: Wait for it.
            no_dist: Look at this rank only. Otherwise all ranks ask equally often, and wait for
                each other; an :class:`AsyncCallsQueue` waits less.

        Raises:
            CheckpointingException: It failed, or did not end in time; the same on every rank.
            PeerLostError: Some rank did not ask in time.
        """
        self._check_usable(also_closed=True)
        call, patience_s = self._latest, self._timeout_s * (1.0 if no_dist else OWN_WORK)
        in_time = not blocking or call.wait(patience_s)
        # In this order: an error is there before the call is over.
        is_over, error = call.done(), call.error
        if error is None and not in_time:
            error = CheckpointingException(f"it was not over after {patience_s:g} s")
        if no_dist:
            if error is not None:
                raise CheckpointingException(f"{call.name} failed: {described(error)}") from error
            return is_over
        is_alive = error is None and not is_over
        own = None if is_alive else CallEnd.of(self._scheduled, call.name, error)
        try:
            return self._all_ranks().decide_end("ask for an async call", own)
        except CheckpointingException as failed:
            raise failed from error
        finally:
            # Else the errors would keep themselves by this variable.
            del error

    def give_up(self, call: PendingCall, error: BaseException) -> bool:
        """Count a call as failed and end it, if it is not over; those after it go on.

        Returns False for a call that a thread is in the middle of: threads cannot be ended, so it
        goes on to use its arguments beside the calls after it.
        """
        self._check_usable(also_closed=True)
        with self._lock:
            if call.done():
                return True
            call.end(error)
            has_ended = call.stop()
        if not call.is_running:
            call.release()
            return True
        if not has_ended:
            call.has_left.set()
        return has_ended

    def close(self, abort: bool = False, within_s: float | None = None) -> None:
        """Wait for all calls and give back what is held; may be called twice.

        With ``abort`` calls are ended; one that a thread is in the middle of is waited for even so,
        since it uses memory of the trainer, but no longer than ``within_s``.
        """
        if self._is_fork:
            return
        self._closed = True
        within_s = self._timeout_s if within_s is None else within_s
        deadline = time.monotonic() + within_s
        if abort:
            self._give_up_all("was not over when its caller was closed")
        if not self._join(deadline):
            self._give_up_all(f"was not over {within_s:g} s after its caller was closed")
            if not self._join(time.monotonic() + min(1.0, within_s)):
                logger.error("a call in a thread does not end, and goes on after close()")
        self._close()
        if self._ranks is not None:
            self._ranks.abandon()

    def _all_ranks(self) -> Ranks:
        if self._ranks is None:
            # Here only: who asks no other rank does without torch.
            from localckpt.ranks.ranks import Ranks

            self._ranks = Ranks("async caller", timeout_s=self._timeout_s)
        return self._ranks

    def _enqueue(self, call: PendingCall) -> None:
        with self._lock:
            before = self._begun[-1] if self._begun else None
            task = Task(partial(self._carry_out, before, call))
            self._begun.append(call)
            self._tasks = [*(other for other in self._tasks if not other.done()), task]
        try:
            # Not a daemon: the interpreter must not take the memory away that a call writes from.
            task.start(f"localckpt {type(self).__name__}", daemon=False)
        except BaseException as error:
            if task.call_off():
                with self._lock:
                    # It may have been carried out before the interrupt came.
                    self._begun = [other for other in self._begun if other is not call]
                # Not an interrupt itself, whose frames hold the call, and the request with it.
                why = f"it did not begin: {type(error).__name__}"
                is_own = isinstance(error, Exception)
                self.give_up(call, error if is_own else CheckpointingException(why))
            raise

    def _carry_out(self, before: PendingCall | None, call: PendingCall) -> None:
        if before is not None:
            before.has_left.wait()
        with self._lock:
            call.is_running = not call.done()
        try:
            if call.is_running:
                try:
                    call.run()
                except BaseException as error:  # noqa: BLE001 - whoever asks for it gets it
                    call.end(error)
                else:
                    call.end(None)
                call.release()
        except Exception:
            logger.exception("%s failed while it was given back", call.name)
        finally:
            # Calls after it wait for this without a deadline.
            with self._lock:
                self._begun = [other for other in self._begun if other is not call]
            call.has_left.set()
            # Their errors keep this frame.
            del before, call

    def _give_up_all(self, why: str) -> None:
        # The newest first: one that waits is not to begin in place of one that is given up.
        for call in self._begun[::-1]:
            self.give_up(call, CheckpointingException(f"{call.name} {why}"))

    def _join(self, deadline: float) -> bool:
        return all(task.wait(max(0.0, deadline - time.monotonic())) for task in self._tasks)


class ThreadAsyncCaller(AsyncCaller):
    """Runs calls in a thread of the trainer; the fastest for work that needs neither CPU nor GIL.

    The only one that can be handed memory of this process.
    """

    def _make_call(self, request: AsyncRequest, function: Callable[..., Any]) -> PendingCall:
        work = partial(function, *request.async_fn_args, **request.async_fn_kwargs)
        # A thread cannot be ended from outside.
        return PendingCall(function_name(request.async_fn), work, stop=lambda: False)


class PersistentAsyncCaller(AsyncCaller):
    """Sends calls to one worker process, which is started when first needed and then stays.

    It takes functions of importable modules with arguments that can be pickled. A worker that
    died is replaced at the next call.

    Args:
        timeout_s: As for every caller.
        nice: How much lower than the trainer's its CPU priority is.
        idle_io: Whether its disk accesses wait for those of others, where the I/O scheduler knows
            such a class.
    """

    def __init__(self, *, timeout_s: float = 300.0, nice: int = 10, idle_io: bool = True) -> None:
        super().__init__(timeout_s=timeout_s)
        self._priority = Priority(nice, idle_io)
        self._worker: WorkerProcess | None = None

    def warm_up(self) -> None:
        """Start the worker in the background, so that the first call finds it ready."""
        self._enqueue(PendingCall("warm-up", self._start_worker))

    @property
    def worker_pid(self) -> int | None:
        """The worker's process ID, while there is one."""
        worker = self._worker
        return worker.pid if worker is not None and worker.usable() else None

    def _make_call(self, request: AsyncRequest, function: Callable[..., Any]) -> PendingCall:
        packed = pack_call(function, request.async_fn_args, request.async_fn_kwargs)

        def run() -> None:
            worker = self._ready_worker()
            # It may have been given up while the worker was started.
            if not call.done():
                worker.call(call.name, packed)

        def stop() -> bool:
            # A call that waits for another has no worker yet.
            worker = self._worker if call.is_running else None
            return worker is None or worker.kill()

        call = PendingCall(function_name(request.async_fn), run, stop)
        return call

    def _close(self) -> None:
        if self._worker is not None:
            self._worker.stop()
            self._worker = None

    def _start_worker(self) -> None:
        try:
            self._ready_worker()
        except OSError:
            logger.warning("the worker process could not be started yet", exc_info=True)

    def _ready_worker(self) -> WorkerProcess:
        if self._worker is None or not self._worker.usable():
            self._close()
            self._worker = WorkerProcess(self._timeout_s, self._priority)
        return self._worker


class TemporalAsyncCaller(AsyncCaller):
    """Forks a process for each call: for functions that cannot be pickled.

    The fork is made when the call is scheduled, so the call sees memory as it was then, even when
    it has to wait for another. It must not touch a GPU. Takes the options of
    :class:`PersistentAsyncCaller`.
    """

    def __init__(self, *, timeout_s: float = 300.0, nice: int = 10, idle_io: bool = True) -> None:
        super().__init__(timeout_s=timeout_s)
        self._priority = Priority(nice, idle_io)

    def _make_call(self, request: AsyncRequest, function: Callable[..., Any]) -> PendingCall:
        process = ForkedProcess(
            *(function, request.async_fn_args, request.async_fn_kwargs),
            *(self._timeout_s, self._priority),
        )
        name = function_name(request.async_fn)
        return PendingCall(name, partial(process.call, name), process.kill, process.release)


@dataclass(frozen=True, slots=True)
class WaitForTrainer:
    """Waits in another process while a thread of the trainer does the work.

    The memory is found by pid and descriptor, and by name: the trainer may give the number to
    another file.
    """

    pid: int
    fd: int
    name: str
    timeout_s: float

    def __call__(self) -> None:
        wait_until(lambda: not self._is_open(), self.timeout_s, longest_s=_LONGEST_PAUSE_S)

    def _is_open(self) -> bool:
        try:
            return self.name in os.readlink(f"/proc/{self.pid}/fd/{self.fd}")
        except OSError:
            return False


def wait_for(rank: int, wait: Callable[[], None], results: None = None) -> None:
    """Function of a request whose ``preload_fn`` has begun the work; Megatron-Core wants three."""
    wait()


def given(wait: Callable[[], None]) -> Callable[[], None]:
    """Return how to wait, in the process of a queue that calls a ``preload_fn`` there."""
    return wait


class HandedOver:
    """Work that a foreign queue's process waits for, by ``function``; a thread runs ``task``."""

    def __init__(self, work: Callable[[], str | None], timeout_s: float) -> None:
        name = f"localckpt-outcome-{uuid.uuid4().hex}"
        self._memory = io.FileIO(os.memfd_create(name))
        self._error: str | None = "it was interrupted"
        self._timeout_s = timeout_s
        self.function: Callable[[], None] = WaitForTrainer(
            os.getpid(), self._memory.fileno(), name, timeout_s
        )
        self.task: Task[None] = Task(partial(self._run, work))

    def _run(self, work: Callable[[], str | None]) -> None:
        try:
            self._error = work()
        finally:
            self.close()

    def await_error(self) -> str | None:
        # Less than the other ranks wait for this one, so that this one reports the reason.
        patience_s = OWN_WORK * self._timeout_s
        is_over = self.task.wait(patience_s)
        self.close()
        if not is_over:
            raise CheckpointingException(
                f"it was not written {patience_s:g} s after the queue had finished it"
            )
        return self._error

    def close(self) -> None:
        """End the wait of the queue's process. May be called twice."""
        self._memory.close()
