"""The process that carries out a trainer's calls, one after another, and answers them.

It imports no torch of its own, so it starts in milliseconds and stays small. It ends with its
trainer: a call in hand is finished first, then it leaves.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import pickle
import signal
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from localckpt.errors import CheckpointingException
from localckpt.failure_texts import with_class

logger = logging.getLogger(__name__)

# A forked child of the trainer can keep the connection open after the trainer's death, so end of
# file alone does not tell; the parent's pid does, at this interval.
_LOOK_ROUND_S = 1.0
_LONGEST_TEXT = 16_000
_LARGEST_PICKLE = 64_000


def main() -> None:
    """Serve the trainer whose pid and connection stand on the command line."""
    trainer, fd = (int(word) for word in sys.argv[1:3])
    os.set_inheritable(fd, False)
    connection = Connection(fd)
    faulthandler.enable()
    leave_ctrl_c_to_trainer()
    gc.disable()
    # What is imported by now stays, so the collections between calls need not look at it.
    gc.freeze()
    asked_to_leave: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked_to_leave.append(number))
    while not asked_to_leave and os.getppid() == trainer:
        try:
            if not connection.poll(_LOOK_ROUND_S):
                continue
            failure = carry_out_packed(connection.recv_bytes())
            sys.stdout.flush()
            answer(connection, failure)
        except (EOFError, OSError):
            # The trainer has ended, or has closed the connection.
            return
        # Between calls, so that collecting takes no time of one.
        gc.collect()


def leave_ctrl_c_to_trainer() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def answer(connection: Connection, failure: WorkerFailure | None) -> None:
    """Tell the trainer how a call ended; raises OSError if the trainer has ended."""
    connection.send_bytes(b"" if failure is None else pickle.dumps(failure))


def carry_out(function: Any, args: Any, kwargs: Any) -> WorkerFailure | None:
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
