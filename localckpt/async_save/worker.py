"""The process that carries out a trainer's calls, one after another, and what crosses its pipes.

It imports no torch of its own, so it starts in milliseconds and stays small. It ends with its
trainer: a call in hand is finished first, then it leaves.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import pickle
import select
import signal
import sys
import traceback
from dataclasses import dataclass
from typing import Any

from localckpt.errors import CheckpointingException
from localckpt.failure_texts import with_class

logger = logging.getLogger(__name__)

# A forked child of the trainer can keep the pipe open after the trainer's death, so end of file
# alone does not tell; the parent's pid does, at this interval.
_LOOK_ROUND_S = 1.0
_LONGEST_TEXT = 16_000
_LARGEST_PICKLE = 64_000


def main() -> None:
    """Serve the trainer whose pid and pipes stand on the command line."""
    trainer, requests, replies = (int(word) for word in sys.argv[1:4])
    for fd in (requests, replies):
        os.set_inheritable(fd, False)
    faulthandler.enable()
    leave_ctrl_c_to_trainer()
    gc.disable()
    # What is imported by now stays, so the collections between calls need not look at it.
    gc.freeze()
    asked_to_leave: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked_to_leave.append(number))
    while not asked_to_leave and os.getppid() == trainer:
        if not is_readable(requests, _LOOK_ROUND_S):
            continue
        try:
            request = read_frame(requests)
        except EOFError:
            return
        failure = carry_out_packed(request)
        sys.stdout.flush()
        try:
            write_frame(replies, b"" if failure is None else pickle.dumps(failure))
        except BrokenPipeError:
            return
        # Between calls, so that collecting takes no time of one.
        gc.collect()


def leave_ctrl_c_to_trainer() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def carry_out(function: Any, args: Any, kwargs: Any) -> WorkerFailure | None:
    """Call, and give what went wrong in a form that can be sent."""
    try:
        function(*args, **kwargs)
    except BaseException as error:  # noqa: BLE001 - sent to the trainer, which raises it
        return WorkerFailure.of(error)
    return None


def carry_out_packed(request: bytes) -> WorkerFailure | None:
    try:
        sys_path, call = pickle.loads(request)
        # Before the call is unpickled, which imports the modules that it names.
        sys.path[:] = sys_path
        function, args, kwargs = pickle.loads(call)
    except BaseException as error:  # noqa: BLE001 - sent to the trainer, which raises it
        return WorkerFailure.of(error)
    return carry_out(function, args, kwargs)


class RemoteTraceback(Exception):
    """Shows, as the cause of an error, where in the other process it was raised."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """An exception on its way to the trainer: its text always, itself where it can be pickled."""

    summary: str
    traceback: str
    pickled: bytes | None

    @classmethod
    def of(cls, error: BaseException) -> WorkerFailure:
        pickled: bytes | None = None
        try:
            whole = pickle.dumps(error)
            # An exception can be pickled and yet not be made anew, and it may hold a whole state.
            pickle.loads(whole)
            pickled = whole if len(whole) <= _LARGEST_PICKLE else None
        except Exception:
            logger.debug("an error is sent as text only: %r", error, exc_info=True)
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return cls(with_class(error), text[-_LONGEST_TEXT:], pickled)

    def rebuild(self) -> BaseException:
        """The exception, or one with its text, caused by the traceback over there."""
        error: BaseException = CheckpointingException(self.summary)
        if self.pickled is not None:
            try:
                error = pickle.loads(self.pickled)
            except Exception:
                logger.debug("an error is rebuilt from text: %s", self.summary, exc_info=True)
        error.__cause__ = RemoteTraceback(self.traceback)
        return error


def write_frame(fd: int, payload: bytes) -> None:
    """Send a message, its length before it."""
    for part in (len(payload).to_bytes(8, "little"), payload):
        view = memoryview(part)
        while view:
            view = view[os.write(fd, view) :]


def read_frame(fd: int) -> bytes:
    """Receive a message; raises EOFError when the other end has gone."""
    return _read_exactly(fd, int.from_bytes(_read_exactly(fd, 8), "little"))


def is_readable(fd: int, timeout_s: float) -> bool:
    """Return whether something can be read, the end of the stream included."""
    # Not select(), which refuses descriptors above 1023, and trainers have many.
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def _read_exactly(fd: int, size: int) -> bytes:
    parts = []
    while size > 0:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            raise EOFError("the other end has gone")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
