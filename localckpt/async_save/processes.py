"""Other processes that carry out calls: a worker that stays, and a child forked for one call.

Both leave the trainer's process group and finish the call in hand when the trainer dies. How they
end is always found out here: their error with its text, or the signal that killed them.
"""

from __future__ import annotations

import fcntl
import gc
import io
import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import FunctionType
from typing import Any

import psutil

from localckpt.async_save import worker
from localckpt.errors import CheckpointingException, WorkerDiedError
from localckpt.waiting import wait_until

logger = logging.getLogger(__name__)

# How often a wait looks beyond its connection: is the process there, is the interpreter leaving.
_LOOK_ROUND_S = 0.5
# A process that has answered, or was asked to leave, or killed, ends within this.
_LEAVE_S = 5.0
_REAPED_S = 1.0
_LARGEST_OUTPUT = 1 << 20
_TAIL = 4000
# A child that is forked while another process is started keeps the pipe open at whose end that
# start waits. Reentrant: the forked child holds it, too.
_STARTING = threading.RLock()
# Modules of a script that is run: another process has its own, or none.
_SCRIPTS = ("__main__", "__mp_main__")
_HINTS = {"SIGKILL": "SIGKILL: out of memory?", "SIGBUS": "SIGBUS: shared memory full?"}


class NotSendableError(CheckpointingException):
    """A call that only this process can make: it cannot be pickled, or lives in the script."""


class _CallPickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, FunctionType)) and obj.__module__ in _SCRIPTS:
            raise pickle.PicklingError(f"{obj.__qualname__} is defined in the script that is run")
        return NotImplemented


def pack_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> bytes:
    """A call as bytes for the worker; its arguments are as they are now."""
    call = io.BytesIO()
    try:
        _CallPickler(call, pickle.HIGHEST_PROTOCOL).dump((function, args, dict(kwargs)))
    except Exception as reason:
        raise NotSendableError(
            f"the call cannot be sent to a worker process: {reason}. Define the function at the "
            f"top of an importable module and pass plain data"
        ) from reason
    return pickle.dumps((_import_path(), call.getvalue()), pickle.HIGHEST_PROTOCOL)


@dataclass(frozen=True, slots=True)
class Priority:
    nice: int
    idle_io: bool

    def give(self, pid: int) -> None:
        """Set it from outside, before the process has threads: it then need not import for it."""
        try:
            process = psutil.Process(pid)
            process.nice(process.nice() + self.nice)
            if self.idle_io:
                process.ionice(psutil.IOPRIO_CLASS_IDLE)
        except (psutil.Error, OSError) as reason:
            logger.info("process %d keeps a higher priority than was asked for: %r", pid, reason)


class _OtherProcess(ABC):
    """Process that carries out calls, for a while also once the trainer's main thread has ended."""

    pid: int
    _connection: Connection

    def __init__(self, exit_patience_s: float) -> None:
        self._exit_patience_s = exit_patience_s

    @abstractmethod
    def kill(self) -> bool:
        """End it now, from any thread, and a wait in :meth:`call`; returns whether it has ended."""

    @abstractmethod
    def _exit_code(self, timeout_s: float) -> int | None:
        """Return how it has ended; ``None`` if it has not within a time."""

    def call(self, name: str, request: bytes = b"") -> None:
        """Have a call made; its error is raised here, caused by the traceback over there."""
        try:
            self._connection.send_bytes(request)
            reply = self._await_reply()
        except (EOFError, OSError):
            reply = None
        output = self._new_output()
        if reply is None:
            self.kill()
            code = self._exit_code(_LEAVE_S)
            raise WorkerDiedError(_exit_message(name, self.pid, code, output))
        if output:
            logger.warning("the worker process wrote during %s:\n%s", name, output)
        if reply:
            raise pickle.loads(reply).rebuild()

    def _new_output(self) -> str:
        return ""

    def _await_reply(self) -> bytes | None:
        """Return the answer, or ``None`` if it has ended, or is not to be waited for."""
        give_up: float | None = None
        while not self._connection.poll(_LOOK_ROUND_S):
            if self._exit_code(0.0) is not None and not self._connection.poll():
                return None
            if not threading.main_thread().is_alive():
                give_up = give_up or time.monotonic() + self._exit_patience_s
                if time.monotonic() > give_up:
                    return None
        return self._connection.recv_bytes()


class WorkerProcess(_OtherProcess):
    """One interpreter that takes calls until it is stopped, killed, or its trainer ends."""

    def __init__(self, exit_patience_s: float, priority: Priority) -> None:
        super().__init__(exit_patience_s)
        self._killed = False
        self._connection, theirs = multiprocessing.Pipe()
        # Its output goes to memory: a pipe would block it when nobody reads, and break it when
        # the trainer dies.
        self._output, self._output_read = os.memfd_create("localckpt-worker-output"), 0
        try:
            fcntl.fcntl(self._output, fcntl.F_SETFL, os.O_APPEND)
            with _STARTING:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _program(), str(os.getpid()), str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=self._output,
                    stderr=self._output,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
        except BaseException:
            self._connection.close()
            os.close(self._output)
            raise
        finally:
            theirs.close()
        self.pid = self._process.pid
        self.stop = weakref.finalize(
            self, _stop_worker, os.getpid(), self._process, self._connection, self._output
        )
        priority.give(self.pid)

    def usable(self) -> bool:
        return self.stop.alive and not self._killed and self._process.poll() is None

    def kill(self) -> bool:
        self._killed = True
        self._process.kill()
        return self._exit_code(_LEAVE_S) is not None

    def _exit_code(self, timeout_s: float) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        return None

    def _new_output(self) -> str:
        size = os.fstat(self._output).st_size
        start = max(self._output_read, size - _TAIL)
        tail = os.pread(self._output, size - start, start)
        self._output_read = size
        if size > _LARGEST_OUTPUT:
            os.ftruncate(self._output, 0)
            self._output_read = 0
        return tail.decode(errors="replace").strip()


class ForkedProcess(_OtherProcess):
    """A copy of this process, made now, that makes one call when :meth:`call` asks for it."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        exit_patience_s: float,
        priority: Priority,
    ) -> None:
        super().__init__(exit_patience_s)
        self._connection, theirs = multiprocessing.Pipe()
        work = (function, args, kwargs)
        try:
            self._process = multiprocessing.get_context("fork").Process(
                target=_serve_once, args=(os.getpid(), theirs, self._connection, work)
            )
            with _STARTING, warnings.catch_warnings():
                # The warning is about threads whose locks the child inherits; a fork is what is
                # left for a call that cannot be sent, and the child touches only its own call.
                warnings.simplefilter("ignore", DeprecationWarning)
                self._process.start()
        except BaseException:
            self._connection.close()
            raise
        finally:
            theirs.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        priority.give(self.pid)

    def kill(self) -> bool:
        self._process.kill()
        return self._exit_code(_LEAVE_S) is not None

    def release(self) -> None:
        """Wait for its end, so that no zombie stays, and give back what it holds open."""
        self._connection.close()
        if self._exit_code(_LEAVE_S) is None:
            self.kill()

    def _exit_code(self, timeout_s: float) -> int | None:
        self._process.join(timeout_s)
        # Any thread may reap it (multiprocessing.active_children does), and the code is known a
        # moment after.
        wait_until(lambda: self._process.exitcode is not None, min(timeout_s, _REAPED_S))
        return self._process.exitcode


def _import_path() -> list[str]:
    return [p or os.getcwd() for p in sys.path if isinstance(p, str)]


def _program() -> str:
    # Not "-m": that would put the working directory before the standard library, and would look
    # for this package elsewhere than the trainer found it.
    return (
        f"import sys; sys.path[:] = {_import_path()!r}; "
        f"from localckpt.async_save.worker import main; main()"
    )


def _stop_worker(
    owner: int, process: subprocess.Popen[bytes], connection: Connection, output: int
) -> None:
    connection.close()
    try:
        # A forked child has the descriptors too, but the process is not its own.
        if os.getpid() == owner:
            process.wait(_LEAVE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(_LEAVE_S)
    finally:
        os.close(output)


def _serve_once(
    trainer: int, ours: Connection, theirs: Connection, work: tuple[Any, Any, Any]
) -> None:
    # Collecting would touch, and so copy, all of the trainer's objects.
    gc.disable()
    # What the trainer does on a signal is not this child's to do.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    worker.leave_ctrl_c_to_trainer()
    os.setsid()
    theirs.close()
    if "torch" in sys.modules:
        # The threads of the trainer's parallel regions do not exist here, and OpenMP would wait
        # for them.
        sys.modules["torch"].set_num_threads(1)
    try:
        while not ours.poll(_LOOK_ROUND_S):
            if os.getppid() != trainer:
                return
        ours.recv_bytes()
        worker.answer(ours, worker.carry_out(*work))
    except (EOFError, OSError):
        logger.debug("the trainer ended before its call did")


def _exit_message(name: str, pid: int | None, code: int | None, output: str) -> str:
    if code is None:
        how = "ended in a way that could not be found out"
    elif code < 0:
        number = -code
        names = {s.value: s.name for s in signal.Signals}
        signal_name = names.get(number, f"signal {number}")
        how = f"was killed ({_HINTS.get(signal_name, signal_name)})"
    else:
        how = f"ended with exit code {code}"
    last = f". Its last output:\n{output}" if output else ""
    return f"the process {pid} that carried out {name} {how} before it was done{last}"
