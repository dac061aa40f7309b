"""Saves that a queue of another library runs in a process of its own.

That process waits for a thread of this one, which writes from its private memory, and keeps what
other ranks send.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

from localckpt.async_save.callers import OWN_WORK
from localckpt.async_save.foreign import ForeignOutcome, WaitForTrainer
from localckpt.errors import CheckpointingException
from localckpt.threads import SerialThread, Task

__all__ = ["ForeignQueues", "HandedOver"]


class ForeignQueues:
    """Saves of one manager that were handed over to foreign queues.

    Args:
        timeout_s: Deadline of the work for one save, in seconds.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        # Made when needed: a manager that has none can be handed to another process.
        self._thread: SerialThread | None = None
        self._saves: list[HandedOver] = []

    def hand_over(self, work: Callable[[], str | None]) -> HandedOver:
        """Begin a save in a thread of this process.

        Args:
            work: Carries the save out, and returns what went wrong.
        """
        save = HandedOver(work, self._timeout_s, self._saves)
        self._saves.append(save)
        if self._thread is None:
            self._thread = SerialThread("localckpt-foreign")
        self._thread.submit(save.task)
        return save

    def close(self) -> None:
        """Wait for what is under way."""
        if self._thread is not None:
            self._thread.close()
        for save in list(self._saves):
            save.close()


class HandedOver:
    """Save that was handed over to a foreign queue.

    Attributes:
        function: What the queue's process is to call.
        task: What this process does.
    """

    def __init__(
        self,
        work: Callable[[], str | None],
        timeout_s: float,
        among: list[HandedOver],
    ) -> None:
        self._outcome = ForeignOutcome()
        self._timeout_s = timeout_s
        self._among = among
        self.function: Callable[[], None] = WaitForTrainer(self._outcome.place, timeout_s)
        self.task: Task[None] = Task(partial(self._run, work))

    def _run(self, work: Callable[[], str | None]) -> None:
        error: str | None = "it was interrupted"
        try:
            error = work()
        finally:
            self._outcome.report(error)

    def await_error(self) -> str | None:
        """Wait until the save is over; returns what went wrong.

        Raises:
            CheckpointingException: It is not over in time.
        """
        # Less than the other ranks wait for this one, so that this one reports the reason.
        patience_s = OWN_WORK * self._timeout_s
        self.task.wait(patience_s)
        error = self._outcome.error
        self.close()
        if not self.task.done():
            raise CheckpointingException(
                f"it was not written {patience_s:g} s after the queue had finished it"
            )
        return error

    def close(self) -> None:
        """Free what both processes share. May be called twice."""
        with suppress(ValueError):
            self._among.remove(self)
        self._outcome.close()
