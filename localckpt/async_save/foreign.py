"""Calls that a queue of another library has a process of its own for, and a thread here makes.

Such a queue loses what its process raises, and its persistent worker ends with it. So the function
that it is given raises nothing: it waits until the trainer has closed some memory. The function is
plain data. It finds the memory by the trainer's pid and the number of a descriptor.
"""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from localckpt.async_save.callers import OWN_WORK
from localckpt.errors import CheckpointingException
from localckpt.threads import Task
from localckpt.waiting import wait_until

_LONGEST_PAUSE_S = 0.01


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


def wait_for(rank: int, wait: Callable[[], None]) -> None:
    """Function of a request whose ``preload_fn`` has begun the work, and returns how to wait."""
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
