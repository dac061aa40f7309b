"""Why a job is to stop before its end: a signal, a file that appears, or what a function tells."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from localckpt.errors import CheckpointingException
from localckpt.threads import Latch, Task, wait_for_any

__all__ = ["StopRequests"]

logger = logging.getLogger(__name__)

_ANSWER_S = 1.0


class StopRequests:
    """Requests to stop that reach this rank.

    A handler that was there before is called as well. The default action of a signal, which would
    end the process, is not taken, nor is that of a first Ctrl-C among the signals. A closed object,
    and a forked child's copy of one, do what was done before it: so signals end the child.

    Args:
        signals: Signals that ask the job to stop. Handlers can be set in the main thread only;
            elsewhere none is set, and a warning says so.
        file: A file whose existence asks the job to stop; ``None`` for none.
        ask: Tells why the job is to stop, ``None`` or "" if it is not; called in a thread every few
            seconds. ``None`` for none.
        on_signal: Called in the handlers, and when Ctrl-C is about to raise KeyboardInterrupt.

    Attributes:
        asked: Set once a signal has asked this rank to stop.
    """

    def __init__(
        self,
        signals: Sequence[signal.Signals],
        file: Path | None,
        ask: Callable[[], str | None] | None,
        on_signal: Callable[[signal.Signals], None],
    ) -> None:
        self.asked = Latch()
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
            try:
                self._before[number] = signal.signal(number, self._receive)
            except (OSError, ValueError) as error:
                self.close()
                raise CheckpointingException(
                    f"stop_signals has {number!r}, which a process cannot handle ({error}): leave "
                    f"it out"
                ) from error
        # Where a shell has it ignored, it stays so.
        if signal.SIGINT not in signals and callable(signal.getsignal(signal.SIGINT)):
            self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._pass_on)

    def why(self) -> str | None:
        """Return why the job is to stop; ``None`` if it is not."""
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
        wait_for_any([self._looking.over, self.asked], _ANSWER_S)
        if not self._looking.done():
            logger.warning("stop_file or stop_when gives no answer; a signal still stops this job")
            return self._received
        looking, self._looking = self._looking, None
        return self._received or looking.take_result()

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
            if signal.getsignal(number) in (self._receive, self._pass_on):
                signal.signal(number, self._action_before(number))

    @property
    def _is_idle(self) -> bool:
        """True if signals are to be handled as if this object were not there."""
        return self._is_closed or os.getpid() != self._process

    def _action_before(self, number: signal.Signals) -> Any:
        """Return what was done before, passing over other objects that are closed by now."""
        action = self._before.get(number)
        owner = getattr(action, "__self__", None)
        if isinstance(owner, StopRequests) and owner._is_idle:
            return owner._action_before(number)
        # Set by code that is not Python's: it cannot be set again.
        return signal.SIG_DFL if action is None else action

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if not self._is_idle:
            received, is_first = signal.Signals(number), self._received is None
            self._received = f"signal {received.name}"
            self.asked.set()
            _leave_workers_to_loaders()
            if is_first and self._action_before(received) is signal.default_int_handler:
                # Ctrl-C, which is to stop the job between two steps. A second one interrupts it.
                return
        self._pass_on(number, frame)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        received = signal.Signals(number)
        if not self._is_idle:
            self._on_signal(received)
        before = self._action_before(received)
        if callable(before):
            before(number, frame)
        elif self._is_idle:
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
