"""Calls that a queue of another library has a process of its own for, and a thread here makes.

Such a queue loses what its process raises, and its persistent worker ends with it. So the function
that it is given raises nothing: it waits until the trainer has written the outcome to a few bytes
of memory. The function is plain data. It finds the memory by the trainer's pid and the number of a
descriptor.
"""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from dataclasses import dataclass

from localckpt.waiting import wait_until

__all__ = ["ForeignOutcome", "WaitForTrainer"]

_LONGEST_TEXT = 4000
_LONGEST_PAUSE_S = 0.01
_GOOD = b"+"


class ForeignOutcome:
    """Outcome of one call, written by the trainer, which closes it.

    A process that comes later finds nothing and does nothing.
    """

    def __init__(self) -> None:
        name = f"localckpt-outcome-{uuid.uuid4().hex}"
        self._lock = threading.Lock()
        self._fd = os.memfd_create(name)
        self.place = _Place(os.getpid(), self._fd, name)

    def report(self, error: str | None) -> None:
        """Write the outcome: an error's text, or ``None`` for success."""
        with self._lock:
            if self._fd >= 0:
                text = _GOOD if error is None else b"-" + error.encode()[:_LONGEST_TEXT]
                # One write of less than a page: the reader finds all of it, or nothing.
                os.pwrite(self._fd, text, 0)

    @property
    def error(self) -> str | None:
        """Text of the error that the call failed with; ``None`` while none is reported."""
        reported = os.pread(self._fd, 1 + _LONGEST_TEXT, 0)
        return None if reported in (b"", _GOOD) else reported[1:].decode(errors="replace")

    def close(self) -> None:
        """Free the memory. May be called twice."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


@dataclass(frozen=True, slots=True)
class _Place:
    """Address of the memory for another process."""

    pid: int
    fd: int
    name: str

    def open(self) -> int | None:
        """A descriptor; ``None`` once the trainer has closed the memory, or has ended."""
        with contextlib.suppress(OSError):
            fd = os.open(f"/proc/{self.pid}/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
            # The trainer may have given the number to another file since.
            if self.name in os.readlink(f"/proc/self/fd/{fd}"):
                return fd
            os.close(fd)
        return None

    def is_there(self) -> bool:
        """Return whether the trainer still has the memory."""
        with contextlib.suppress(OSError):
            return self.name in os.readlink(f"/proc/{self.pid}/fd/{self.fd}")
        return False


@dataclass(frozen=True, slots=True)
class WaitForTrainer:
    """Waits in another process while a thread of the trainer does the work.

    A foreign queue finalizes a call, which training waits for, once its process has returned.
    """

    place: _Place
    timeout_s: float

    def __call__(self) -> None:
        fd = self.place.open()
        if fd is None:
            return
        try:
            # The trainer closes the memory of a call that nobody finalizes.
            wait_until(
                lambda: bool(os.pread(fd, 1, 0)) or not self.place.is_there(),
                self.timeout_s,
                longest_s=_LONGEST_PAUSE_S,
            )
        finally:
            os.close(fd)
