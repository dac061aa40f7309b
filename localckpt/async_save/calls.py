"""Calls of one rank that are under way: in a thread, in the worker process, or in a forked one.

Each knows how it is carried out and how it is ended from outside; ``callers.py`` says when.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from localckpt.async_save.processes import ForkedProcess, Priority, WorkerProcess, pack_call
from localckpt.async_save.request import AsyncRequest, function_name
from localckpt.threads import Latch

__all__ = ["ForkedCall", "PendingCall", "ThreadCall", "WarmUp", "WorkerCall"]

logger = logging.getLogger(__name__)


class PendingCall:
    """Call on this rank, and its end."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.then_fn: Callable[[], None] | None = None
        """Runs after it, in the trainer; see :class:`AsyncCall`."""
        self.then_runs = False
        self._over = Latch()
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Return whether it is over, well or badly."""
        return self._over.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for its end; whether it came in time."""
        return self._over.wait(timeout_s)

    @property
    def error(self) -> BaseException | None:
        """The error that it failed with; ``None`` also while it is not over."""
        return self._error

    def end(self, error: BaseException | None) -> None:
        """Note how it ended; ``None`` for well. Only the first time counts."""
        with self._lock:
            if not self._over.is_set():
                self._error = error
                self._over.set()

    def run(self) -> None:
        """Carry it out, in the caller's thread; raises what it fails with."""

    def stop(self) -> bool:
        """End it from another thread; whether nothing of it runs any more."""
        return True

    def release(self) -> None:
        """Give back what it holds; nothing runs any more."""


class ThreadCall(PendingCall):
    """A call in a thread of the trainer, which cannot be ended from outside."""

    def __init__(self, request: AsyncRequest, function: Callable[..., Any]) -> None:
        super().__init__(function_name(request.async_fn))
        self._work: Any = (function, request.async_fn_args, request.async_fn_kwargs)

    def run(self) -> None:
        function, args, kwargs = self._work
        function(*args, **kwargs)

    def stop(self) -> bool:
        return False

    def release(self) -> None:
        self._work = None


class WorkerCall(PendingCall):
    """A call in the worker process.

    Raises:
        NotSendableError: It cannot be pickled.
    """

    def __init__(
        self,
        request: AsyncRequest,
        function: Callable[..., Any],
        ready_worker: Callable[[], WorkerProcess],
    ) -> None:
        super().__init__(function_name(request.async_fn))
        self._packed = pack_call(function, request.async_fn_args, request.async_fn_kwargs)
        self._ready_worker: Any = ready_worker
        self._guard = threading.Lock()
        self._stopped = False
        self._worker: WorkerProcess | None = None

    def run(self) -> None:
        worker = self._ready_worker()
        with self._guard:
            if self._stopped:
                return
            self._worker = worker
        worker.call(self.name, self._packed)

    def stop(self) -> bool:
        with self._guard:
            self._stopped = True
            return self._worker is None or self._worker.kill()

    def release(self) -> None:
        with self._guard:
            self._packed, self._ready_worker, self._worker = b"", None, None


class WarmUp(PendingCall):
    """A call that only has the worker process started."""

    def __init__(self, ready_worker: Callable[[], WorkerProcess]) -> None:
        super().__init__("warm-up")
        self._ready_worker: Any = ready_worker

    def run(self) -> None:
        try:
            self._ready_worker()
        except OSError:
            logger.warning("the worker process could not be started yet", exc_info=True)

    def release(self) -> None:
        self._ready_worker = None


class ForkedCall(PendingCall):
    """A call in a process that is forked now."""

    def __init__(
        self,
        request: AsyncRequest,
        function: Callable[..., Any],
        exit_patience_s: float,
        priority: Priority,
    ) -> None:
        super().__init__(function_name(request.async_fn))
        self._process = ForkedProcess(
            function, request.async_fn_args, request.async_fn_kwargs, exit_patience_s, priority
        )

    def run(self) -> None:
        self._process.call(self.name)

    def stop(self) -> bool:
        return self._process.kill()

    def release(self) -> None:
        self._process.release()
