"""Stream of one rank's events to its sinks, which run on a thread of their own.

Emitting takes the same short time whatever the sinks do: an event goes into a bounded queue in
memory. One that finds the queue full is dropped, and leaves a gap in the numbers of the events.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import count
from operator import methodcaller
from typing import Any, Protocol

from localckpt.events.event import LOST, Event, Name, Outcome, Tier
from localckpt.failure_texts import described
from localckpt.threads import Task

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Somewhere that one thread sends events; one that raises is warned of, and closed."""

    def write(self, event: Event) -> None:
        """Take one event; the first one opens what the sink needs."""

    def flush(self) -> None:
        """Make visible what was taken; called when no further event is waiting."""

    def close(self) -> None:
        """Free everything; called once, after the last event."""


class EventStream:
    """Events of one rank, from its start to its end.

    The stream closes its sinks; without any, emitting does nothing. More events than ``capacity``
    do not wait for the sinks, and are dropped. With ``is_held`` they wait for :meth:`release`.

    Attributes:
        run: Random name of this start of the rank.
        seconds: Sums of what :meth:`add` and :meth:`timed` were given, by name; also without sinks.
    """

    def __init__(
        self,
        sinks: Iterable[Sink] = (),
        *,
        rank: int = 0,
        capacity: int = 10_000,
        is_held: bool = False,
    ) -> None:
        self.run = secrets.token_hex(6)
        self.seconds: dict[str, float] = defaultdict(float)
        self._sinks = list(sinks)
        self._rank = rank
        self._node = socket.gethostname()
        # Read once, so that events are in order whatever becomes of the clock.
        self._epoch = time.time() - time.monotonic()
        self._capacity = capacity
        # Both are atomic in CPython: any thread may emit, also a signal's handler.
        self._numbers = count()
        self._queue: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._process = os.getpid()
        self._is_open = bool(self._sinks)
        self._task: Task[None] | None = None
        if not is_held:
            self.release()

    def begin_run(self, rank: int) -> None:
        """Emit from now on as a new start, and maybe as another rank."""
        self.run, self._rank, self._numbers = secrets.token_hex(6), rank, count()

    def release(self) -> None:
        """Give the sinks what is waiting, and what comes."""
        if self._is_open and self._task is None:
            self._task = Task(self._hand_out)
            # A daemon: a sink that hangs must not keep the interpreter from ending.
            self._task.start("localckpt-events", daemon=True)

    def emit(
        self,
        name: Name,
        *,
        began: float | None = None,
        ended: float | None = None,
        step: int | None = None,
        nbytes: int | None = None,
        tier: Tier | None = None,
        outcome: Outcome | None = None,
        error: BaseException | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        """Add an event, from any thread; ``began`` and ``ended`` are by ``time.monotonic()``."""
        if not self._is_open or self._process != os.getpid():
            return
        number = next(self._numbers)
        if self._queue.qsize() >= self._capacity:
            return
        now = time.monotonic()
        began = now if began is None else began
        details = details or {}
        if error is not None:
            details = {**details, "error": described(error)}
        self._queue.put(
            Event(
                name,
                self.clock_time(began),
                self._rank,
                self._node,
                self.run,
                number,
                duration=max(0.0, (now if ended is None else ended) - began),
                step=step,
                nbytes=nbytes,
                tier=tier,
                outcome=outcome or ("ok" if error is None else "failed"),
                error_class="" if error is None else type(error).__name__,
                is_lost=name in LOST,
                details=details,
            )
        )

    def timed(self, name: Name, step: int | None = None) -> AtEnd:
        """Time what is done inside of a ``with``: emit it, and add it to :attr:`seconds`."""
        began = time.monotonic()
        return AtEnd(lambda e: self.add(name, began, time.monotonic(), step=step, error=e))

    def noting_failure(
        self, name: Name, began: float, step: int, tier: Tier | None = None
    ) -> AtEnd:
        """Emit what fails inside of a ``with``, where no other event tells of its end."""

        def note(error: BaseException | None) -> None:
            if error is not None:
                self.emit(name, began=began, step=step, tier=tier, error=error)

        return AtEnd(note)

    def add(self, name: Name, began: float, ended: float, **fields: Any) -> None:
        """Emit a stretch of time, and add it to :attr:`seconds`; arguments as of :meth:`emit`."""
        self.seconds[name] += ended - began
        self.emit(name, began=began, ended=ended, **fields)

    def clock_time(self, at: float) -> float:
        """Seconds since 1970 at a time of ``time.monotonic()``."""
        return self._epoch + at

    def close(self, timeout_s: float = 5.0) -> None:
        """Give the sinks what is waiting, and close them; a warning says what is lost by then."""
        is_open, self._is_open = self._is_open, False
        if not is_open or self._process != os.getpid():
            return
        if (task := self._task) is None:
            # Held back to the end: the sinks were given nothing.
            self._close_sinks()
            return
        self._queue.put(None)
        if not task.wait(timeout_s):
            logger.warning(
                "sinks of events have not taken everything after %g s: about %d events are left",
                *(timeout_s, self._queue.qsize()),
            )

    # In the thread.

    def _hand_out(self) -> None:
        while (event := self._queue.get()) is not None:
            self._each(methodcaller("write", event))
            if self._queue.empty():
                self._each(methodcaller("flush"))
        self._each(methodcaller("flush"))
        self._close_sinks()

    def _close_sinks(self) -> None:
        for sink in self._sinks:
            self._close_sink(sink)

    def _each(self, call: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                call(sink)
            except Exception as error:  # noqa: BLE001 - whatever a sink raises, training goes on
                logger.warning(
                    "%s failed, and gets no more events: %s", type(sink).__name__, described(error)
                )
                self._sinks.remove(sink)
                self._close_sink(sink)

    def _close_sink(self, sink: Sink) -> None:
        try:
            sink.close()
        except Exception as error:  # noqa: BLE001 - as above
            logger.warning("%s could not be closed: %s", type(sink).__name__, described(error))


class SaveRecord:
    """Times of one save, by ``time.monotonic()``, and its bytes on this rank, for its events."""

    def __init__(
        self, events: EventStream, step: int, began: float, tier: Tier | None = None
    ) -> None:
        self._events = events
        self._step = step
        self._began = began
        self._tier = tier
        self.waited_s = 0.0
        self.copied: tuple[float, float] | None = None
        self.went_on: float | None = None
        self.nbytes = 0

    def note_blocking(self) -> None:
        self.went_on = time.monotonic()
        self._emit("blocking", self._began, self.went_on, nbytes=self.nbytes or None)
        self._emit("wait_prev", self._began, self._began + self.waited_s)
        if self.copied is not None:
            self._emit("d2h", *self.copied, nbytes=self.nbytes or None)

    def note_end(
        self,
        *,
        durable: float | None,
        tier: Tier | None,
        outcome: Outcome | None = None,
        error: BaseException | None = None,
    ) -> None:
        """Note how it ended, and when all that this rank keeps was durable, if it was."""
        went_on, nbytes = self.went_on or self._began, self.nbytes or None
        details = {"blocking_s": went_on - self._began, "wait_prev_s": self.waited_s}
        if self.copied is not None:
            details["d2h_s"] = self.copied[1] - self.copied[0]
        if durable is not None and durable > went_on:
            details["background_s"] = durable - went_on
            self._emit("background", went_on, durable, nbytes=nbytes)
        self._events.emit(
            "save",
            began=self._began,
            ended=durable,
            step=self._step,
            nbytes=nbytes,
            tier=tier,
            outcome=outcome,
            error=error,
            details=details,
        )

    def _emit(self, name: Name, began: float, ended: float, nbytes: int | None = None) -> None:
        self._events.emit(
            name, began=began, ended=ended, step=self._step, nbytes=nbytes, tier=self._tier
        )


class AtEnd:
    """Context that calls a function at its end; a generator would keep the error in a cycle."""

    def __init__(self, call: Callable[[BaseException | None], None]) -> None:
        self._call = call

    def __enter__(self) -> None:
        """Do nothing: the call comes at the end."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._call(error)
