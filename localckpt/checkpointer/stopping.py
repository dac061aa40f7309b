"""Stop of a job before its end: why, by a signal, a file or a function; and its last save."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from localckpt.availability.retention import Metrics
from localckpt.checkpointer.parts import ModulePart
from localckpt.checkpointer.tiers import NodeTier, SharedTier
from localckpt.errors import CheckpointingException, PeerLostError
from localckpt.events.stream import EventStream
from localckpt.failure_texts import described, ranks_named
from localckpt.ranks.deadline import begin as begin_task
from localckpt.ranks.deadline import end_waits_by
from localckpt.ranks.ranks import Ranks
from localckpt.state_dict.replicated import without_marker
from localckpt.threads import Latch, Task, exit_by
from localckpt.waiting import wait_until

logger = logging.getLogger(__name__)

_ANSWER_S = 1.0


class StopRequests:
    """Requests to stop that reach this rank: signals, a file, and ``ask``, called in a thread.

    All objects that are not closed hear a signal, then a handler that was there before is called.
    The default action, which would end the process, is not taken, nor is that of a first Ctrl-C
    among the signals of any. Closed objects, and a forked child's copies, do what was done before
    them: so signals end the child. Handlers are set in the main thread only.
    """

    def __init__(
        self,
        signals: Sequence[signal.Signals],
        file: Path | None,
        ask: Callable[[], str | None] | None,
        on_signal: Callable[[signal.Signals], None],
    ) -> None:
        self.asked = Latch()
        self._signals = frozenset(signals)
        self._file = file
        self._ask = ask
        self._on_signal = on_signal
        self._received: str | None = None
        self._looking: Task[str | None] | None = None
        self._is_looking = threading.Lock()
        self._before: dict[signal.Signals, Any] = {}
        self._process = os.getpid()
        self._is_closed = False
        if threading.current_thread() is not threading.main_thread():
            if signals:
                logger.warning(
                    "not in the main thread: %s will not stop this job in order",
                    ", ".join(number.name for number in signals),
                )
            return
        for number in signals:
            self._before[number] = signal.signal(number, self._handle)
        # Where a shell has it ignored, it stays so.
        if signal.SIGINT not in signals and callable(signal.getsignal(signal.SIGINT)):
            self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._handle)

    def why(self) -> str | None:
        """Return why the job is to stop, always the first reason; ``None`` if it is not."""
        if self._received is not None or (self._file is None and self._ask is None):
            return self._received
        # A pulse and a wait for storage may ask at once: one of them looks.
        if not self._is_looking.acquire(blocking=False):
            return self._received
        try:
            return self._look_in_time()
        finally:
            self._is_looking.release()

    def _look_in_time(self) -> str | None:
        # In a thread of its own: storage, or a cloud, that does not answer is to hold up no pulse,
        # without which no rank would save any more.
        if self._looking is None:
            self._looking = Task(self._look)
            self._looking.start("localckpt-stop", daemon=True)
        self.asked.wait(_ANSWER_S, self._looking.over)
        if not self._looking.done():
            logger.warning("stop_file or stop_when gives no answer; a signal still stops this job")
            return self._received
        looking, self._looking = self._looking, None
        found = looking.take_result()
        self._received = self._received or found
        return self._received

    def _look(self) -> str | None:
        # Whatever is asked may be out of reach for a while; training is not to end for that.
        try:
            if self._file is not None and self._file.exists():
                return f"{self._file} is there"
        except OSError as error:
            logger.warning("stop_file cannot be looked at, as if it were not there: %s", error)
        try:
            return None if self._ask is None else self._ask() or None
        except Exception:
            logger.exception("stop_when failed, as if it had told nothing")
            return None

    def close(self) -> None:
        """Put the handlers back that were there before. May be called twice."""
        self._is_closed = True
        for number in self._before:
            # Who has set a handler since calls ours, or has replaced it.
            if signal.getsignal(number) == self._handle:
                live, before = self._chain(number)
                signal.signal(number, live[0]._handle if live else before)

    def _chain(self, number: signal.Signals) -> tuple[list[StopRequests], Any]:
        """Return the live objects whose handlers follow each other, and what was done before."""
        live: list[StopRequests] = []
        owner: Any = self
        while isinstance(owner, StopRequests):
            is_idle = owner._is_closed or os.getpid() != owner._process
            live += [] if is_idle else [owner]
            action = owner._before.get(number)
            owner = getattr(action, "__self__", None)
        # Set by code that is not Python's: it cannot be set again.
        return live, signal.SIG_DFL if action is None else action

    def _handle(self, number: int, frame: FrameType | None) -> None:
        received = signal.Signals(number)
        live, before = self._chain(received)
        asked = [each for each in live if received in each._signals]
        is_first = not all(each.asked.is_set() for each in asked)
        for each in asked:
            each._received = f"signal {received.name}"
            each.asked.set()
        if asked:
            _leave_workers_to_loaders()
        if is_first and before is signal.default_int_handler:
            # Ctrl-C, which is to stop the job between two steps. A second one interrupts it.
            return
        for each in live:
            each._on_signal(received)
        if callable(before):
            before(number, frame)
        elif not live:
            # In a child, or below a handler that was set since, which calls this one.
            signal.signal(received, before)
            signal.raise_signal(received)


def _leave_workers_to_loaders() -> None:
    """Have the end of a data loader's worker be an error where its batch is missing only.

    The signal may have ended it, too. Torch's handler raises an error wherever the trainer is, also
    in the last save.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    if getattr(handler, "__module__", "") == "torch.utils.data._utils.signal_handling":
        signal.signal(signal.SIGCHLD, lambda *_: None)


_LOOK_S = 0.005
# After the time to stop in: for ranks to agree that it is over, and then to close.
_AGREEING_S, _CLOSING_S = 0.5, 0.5


@dataclass(eq=False)
class LastSave:
    """The save of the step after which a job stops; all ranks make it.

    It goes to the nodes first, and then to shared storage, since the nodes may go with the job.
    """

    _nodes: NodeTier
    _shared: SharedTier | None
    _ranks: Ranks
    _events: EventStream
    _grace_s: float
    _until: float = inf

    def run(
        self,
        step: int,
        parts: Mapping[str, Any],
        metrics: Metrics | None,
        finalize: Callable[[], None],
    ) -> bool:
        """Save a step, and wait; return whether time was over first, as on all live ranks."""
        self.begin()
        nodes, is_late, is_on_shared = self._nodes, False, False
        if self._shared is not None:
            self._shared.manager.hurry()
        patience = self._ranks.patience(f"save step {step}, the last")

        def is_late_on_any_rank(tier: NodeTier | SharedTier) -> bool:
            """Wait for the saves of a tier; the answer is the same on all ranks."""

            def is_over() -> bool:
                finalize()
                return not tier.is_busy

            with self._events.timed("wait", step):
                patience.until(is_over, self._left_s, tier.queue.waits_for, longest_s=_LOOK_S)
            return bool(self._ranks.decide("stop in time", lambda: tier.is_busy, any))

        try:
            # Twice: a save before it may have failed, or the first attempt, on all ranks.
            for _ in range(2):
                if is_late := not self._can_begin():
                    break
                nodes.save(parts, step, metrics)
                if (is_late := is_late_on_any_rank(nodes)) or nodes.newest == step:
                    break
            if (shared := self._shared) is not None and not is_late:
                shared.drain(step, metrics)
                is_late = is_late_on_any_rank(shared)
                is_on_shared = not is_late and shared.newest == step
        except CheckpointingException as error:
            # The job ends, whatever becomes of this save.
            logger.error("the last save has failed: %s", described(error))
            is_busy = nodes.is_busy or (self._shared is not None and self._shared.is_busy)
            is_late = is_busy or isinstance(error, PeerLostError)
        if nodes.newest != step:
            logger.error("step %d is not safe on the nodes after %g s", step, self._grace_s)
        if self._shared is not None and not is_on_shared:
            logger.error(
                "step %d is not on shared storage after %g s; if its drain has begun to write, the "
                "next start on these nodes goes on with it",
                *(step, self._grace_s),
            )
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


# An error may leave a step half done, whose state is that of no step. Of one error more can be
# known: a data loader that gives no batch, as when a signal has ended its workers.
_LOADERS = ("torch.utils.data", "torchdata")


def is_of_loader(error: BaseException) -> bool:
    """Return whether an error comes out of the ``next`` of one of torch's data loaders."""
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        name = str(frame.f_globals.get("__name__"))
        if name.startswith(_LOADERS) and frame.f_code.co_name == "__next__":
            return True
        trace = trace.tb_next
    return False


def judge_ends(ends: Sequence[tuple[int, bool]]) -> None:
    """Judge whether all ranks are at one step, and each knows that nothing has changed."""
    steps = [step for step, _ in ends]
    if len(set(steps)) > 1:
        raise CheckpointingException(f"the last steps of the ranks differ: {steps[:16]}")
    unsure = [rank for rank, (_, is_known) in enumerate(ends) if not is_known]
    if unsure:
        raise CheckpointingException(
            f"on {ranks_named(unsure)} the error came in the middle of the next step, or it cannot "
            f"be known that nothing has changed since. Older checkpoints are as they were"
        )


class Evidence:
    """Notes on the state of the last step, taken in jobs with processes of data loaders.

    A change of a tensor of the state's modules, or of a gradient, shows in torch's count of its
    versions, and a random number in the state of torch's generator.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self._parts = parts
        self._tensors: list[torch.Tensor] = []
        self._noted: Any = None

    def look(self) -> None:
        """Look which tensors there are to note; to be called now and then."""
        self._noted = None
        self._tensors = self._current() if multiprocessing.active_children() else []

    def note(self) -> None:
        if self._tensors:
            self._noted = self._state()

    def is_unchanged(self) -> bool:
        """Return whether it is known that nothing has changed since the last note."""
        noted, current = self._noted, self._current()
        is_same = len(current) == len(self._tensors) and all(
            one is other for one, other in zip(current, self._tensors, strict=True)
        )
        return noted is not None and is_same and bool(noted == self._state())

    def _current(self) -> list[torch.Tensor]:
        parts = [without_marker(part) for part in self._parts.values()]
        modules = [part.module for part in parts if isinstance(part, ModulePart)]
        found = [t for m in modules for t in (*m.parameters(), *m.buffers())]
        return [] if any(tensor.is_inference() for tensor in found) else found

    def _state(self) -> tuple[int, int, int, bytes]:
        gradients = [t.grad for t in self._tensors if t.grad is not None]
        return (
            sum([tensor._version for tensor in self._tensors]),
            len(gradients),
            sum([gradient._version for gradient in gradients]),
            torch.get_rng_state().numpy().tobytes(),
        )
