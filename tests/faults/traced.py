"""System calls on a store's files: counted, and one of them refused, or the last.

A watched process hands every call that may touch a file to the test before it is carried out, by
the kernel's seccomp notifications: in their order over all threads, whatever the files are called.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import pickle
import platform
import select
import signal
import socket
import struct
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest

from tests.managers.jobs import MAX_S

_ANSWER_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Call:
    """A system call on files of the store, with their paths relative to the store."""

    name: str
    paths: tuple[str, ...]
    thread: int
    makes: bool
    """It opens a file to make it."""

    @property
    def changes(self) -> bool:
        """Whether it may change what is in the store."""
        return self.makes or self.name in CHANGES


@dataclass(frozen=True, slots=True)
class Fault:
    """What is to happen to the n-th call of a section, of those that are counted.

    It fails, or the watched process and its children are killed before it.
    """

    nth: int
    how: Literal["error", "kill"]
    code: int = 0
    lasts: bool = False  # All counted calls after it share its fate.
    only: tuple[str, ...] = ()  # Names of the calls that are counted; all by default.


@dataclass
class Section:
    """The calls of a watched process between two points, in their order."""

    calls: list[Call] = field(default_factory=list)
    hit_at: int | None = None
    """Place of the first call that the fault happened to."""

    @property
    def hit(self) -> Call | None:
        return None if self.hit_at is None else self.calls[self.hit_at]


class Watched:
    """In a process: lets the :class:`Watch` of an address see and change its system calls."""

    def __init__(self, address: str) -> None:
        self._watch = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._watch.settimeout(MAX_S)
        self._watch.connect(f"\0{address}")
        listener = _install_filter()
        socket.send_fds(self._watch, [b"listener"], [listener])
        os.close(listener)

    @contextmanager
    def section(self, fault: Fault | None = None) -> Iterator[Section]:
        """What is done inside is counted; the fault happens there, and nowhere else."""
        self._ask(fault)
        section = Section()
        try:
            yield section
        finally:
            told = self._ask("end")
            section.calls, section.hit_at = told.calls, told.hit_at

    def _ask(self, message: Any) -> Any:
        self._watch.send(pickle.dumps(message))
        return pickle.loads(self._watch.recv(_ANSWER_NBYTES))


@contextmanager
def watch(*roots: Path, before: Callable[[Call], None] | None = None) -> Iterator[Watch]:
    """In a test: look after one process, which is given ``address``, until it has ended.

    ``before`` is called before each call in a section that changes the roots, while it waits.
    """
    if why := _cannot_watch():
        pytest.skip(why)
    watching = Watch(roots, before)
    try:
        yield watching
    finally:
        watching.end()


class Watch:
    """Decides over the system calls of one process and its children; made by :func:`watch`."""

    def __init__(self, roots: tuple[Path, ...], before: Callable[[Call], None] | None) -> None:
        self._before = before
        self.address = f"localckpt-test-{uuid.uuid4().hex}"
        self.section = Section()
        """The section that the process is in, or was in last."""
        self._roots = tuple(map(str, roots))
        self._fault: Fault | None = None
        self._counted = 0
        self._inside = False
        self._trainer = 0
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.bind(f"\0{self.address}")
        self._server.listen()
        self.over = threading.Event()
        """Set when somebody was killed, or the process has ended."""
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        # In the place of a process that never came.
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as nobody:
            nobody.connect(f"\0{self.address}")
        self._thread.join(2 * MAX_S)
        if self._thread.is_alive():
            raise TimeoutError(f"process {self._trainer} or a child of it does not end")
        self._server.close()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            connection, _ = self._server.accept()
            with connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ANSWER_NBYTES)
                credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                self._trainer = struct.unpack("3i", credentials)[0]
                _, listeners, _, _ = socket.recv_fds(connection, 64, 1)
                for listener in listeners:
                    try:
                        self._serve(connection, listener)
                    finally:
                        os.close(listener)
        except BaseException as error:  # noqa: BLE001 - raised by end()
            self._error = error
        finally:
            self.over.set()

    def _serve(self, connection: socket.socket, listener: int) -> None:
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLIN)
        poll.register(listener, select.POLLIN)
        while True:
            for fd, event in poll.poll():
                if fd != listener:
                    if not self._talk(connection):
                        poll.unregister(fd)
                        self.over.set()
                elif event & select.POLLIN:
                    self._decide(listener)
                else:
                    # The last process has ended.
                    return

    def _talk(self, connection: socket.socket) -> bool:
        """Answer the process; whether it is there."""
        with contextlib.suppress(ConnectionError):
            if message := connection.recv(1 << 16):
                told = pickle.loads(message)
                self._inside = told != "end"
                if self._inside:
                    self.section, self._counted, self._fault = Section(), 0, told
                connection.send(pickle.dumps(self.section))
                return True
        return False

    def _decide(self, listener: int) -> None:
        notice = bytearray(_NOTICE.size)
        try:
            fcntl.ioctl(listener, _RECEIVE, notice)
        except OSError as error:
            # The process was killed before it could be asked about.
            if error.errno in (errno.ENOENT, errno.EINTR):
                return
            raise
        number, pid, _, nr, _, _, *args = _NOTICE.unpack(notice)
        code, flags = 0, _CONTINUE
        call = self._look_at(pid, nr, args) if self._inside else None
        if call is not None and call.changes and self._before is not None:
            try:
                self._before(call)
            except BaseException:
                self._kill()
                raise
        if call is not None and self._is_hit(call):
            assert self._fault is not None
            if self._fault.how == "kill":
                # No answer: with one, the call might still be made.
                self._kill()
                return
            code, flags = -self._fault.code, 0
        with contextlib.suppress(FileNotFoundError):
            fcntl.ioctl(listener, _SEND, _ANSWER.pack(number, 0, code, flags))

    def _look_at(self, pid: int, nr: int, args: list[int]) -> Call | None:
        name, kind = _BY_NUMBER[nr]
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            ours = tuple(
                path.removeprefix(root).lstrip("/")
                for path in _paths_of(kind, pid, args)
                for root in self._roots
                if f"{path}/".startswith(f"{root}/")
            )
            if ours:
                return Call(name, ours, pid, name == "openat" and bool(args[2] & os.O_CREAT))
        return None

    def _is_hit(self, call: Call) -> bool:
        self.section.calls.append(call)
        fault = self._fault
        if fault is None or (fault.only and call.name not in fault.only):
            return False
        self._counted += 1
        if self._counted == fault.nth:
            self.section.hit_at = len(self.section.calls) - 1
        return self._counted == fault.nth or (fault.lasts and self._counted > fault.nth)

    def _kill(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            trainer = psutil.Process(self._trainer)
            for process in (trainer, *trainer.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
        self.over.set()


def look_again(manager: Any) -> int:
    """What is the latest now? Returns once all ranks have come here."""
    manager.latest_iteration = -1
    return int(manager.find_latest())


def await_memory_ahead() -> None:
    """Wait for memory that is made ahead, so that every run makes the same calls."""
    for thread in threading.enumerate():
        if thread.name == "localckpt-prepare":
            thread.join(MAX_S)


def left_behind(root: Path, but: tuple[str, ...] = (".safetensors",)) -> list[str]:
    """Files in a store that nothing uses, but those with an ending that may stay."""
    names = {path.name for path in root.rglob("*") if path.is_file()}
    names -= {"node-token", ".lock", ".notes"}
    return sorted(name for name in names if not name.endswith(but))


# The calls: their numbers on x86-64 and on 64-bit ARM, and which arguments tell the file: a
# descriptor, paths, or paths that each have a directory's descriptor before them.

_CALLS: dict[str, tuple[tuple[str, int | None, int | None], ...]] = {
    "fd 0": (
        *(("read", 0, 63), ("write", 1, 64), ("close", 3, 57), ("fstat", 5, 80)),
        *(("pread64", 17, 67), ("pwrite64", 18, 68), ("flock", 73, 32), ("fsync", 74, 82)),
        *(("fdatasync", 75, 83), ("ftruncate", 77, 46), ("fchmod", 91, 52), ("fstatfs", 138, 44)),
        *(("getdents64", 217, 61), ("fallocate", 285, 47), ("preadv", 295, 69)),
        *(("pwritev", 296, 70), ("preadv2", 327, 286), ("pwritev2", 328, 287)),
    ),
    "path 0": (
        *(("stat", 4, None), ("lstat", 6, None), ("access", 21, None), ("mkdir", 83, None)),
        *(("rmdir", 84, None), ("unlink", 87, None), ("chmod", 90, None), ("statfs", 137, 43)),
    ),
    "fd 4": (("mmap", 9, 222),),
    "path 0 1": (("rename", 82, None),),
    "at 1": (
        *(("openat", 257, 56), ("mkdirat", 258, 34), ("newfstatat", 262, 79)),
        *(("unlinkat", 263, 35), ("faccessat", 269, 48), ("statx", 332, 291)),
    ),
    "at 1 3": (("renameat", 264, 38), ("renameat2", 316, 276)),
}
CHANGES = {
    *("write", "pwrite64", "pwritev", "pwritev2", "fsync", "fdatasync", "fallocate", "ftruncate"),
    *("mkdir", "mkdirat", "rmdir", "unlink", "unlinkat", "rename", "renameat", "renameat2"),
}
_MACHINE = platform.machine()
_BY_NUMBER = {
    number: (name, kind)
    for kind, calls in _CALLS.items()
    for name, x86_64, aarch64 in calls
    if (number := {"x86_64": x86_64, "aarch64": aarch64}.get(_MACHINE)) is not None
}


def _paths_of(kind: str, pid: int, args: list[int]) -> Iterator[str]:
    what, *places = kind.split()
    for place in map(int, places):
        if what == "fd":
            fd = ctypes.c_int(args[place]).value
            if fd >= 0:
                yield os.readlink(f"/proc/{pid}/fd/{fd}").removesuffix(" (deleted)")
            continue
        path = _memory(pid, args[place], 4096).partition(b"\0")[0].decode(errors="replace")
        if not path.startswith("/"):
            fd = ctypes.c_int(args[place - 1]).value if what == "at" else -1
            folder = os.readlink(f"/proc/{pid}/fd/{fd}" if fd >= 0 else f"/proc/{pid}/cwd")
            path = f"{folder}/{path}" if path else folder
        yield path


def _memory(pid: int, address: int, nbytes: int) -> bytes:
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        return os.pread(memory.fileno(), nbytes, address)


# The kernel's interface: seccomp(2), seccomp_unotify(2), linux/seccomp.h.

_ARCHITECTURE = {"x86_64": (0xC000003E, 317), "aarch64": (0xC00000B7, 277)}
_NOTICE = struct.Struct("QIIiIQ6Q")
_ANSWER = struct.Struct("QqiI")
_RECEIVE = 0xC0502100
_SEND = 0xC0182101
_CONTINUE = 1
_ALLOW, _NOTIFY = 0x7FFF0000, 0x7FC00000
_SET_FILTER, _TSYNC, _NEW_LISTENER, _TSYNC_ESRCH = 1, 1, 8, 16
_NO_NEW_PRIVILEGES = 38


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def _install_filter() -> int:
    """Have all threads of this process, and its children, ask before they make these calls."""
    audit, seccomp = _ARCHITECTURE[_MACHINE]
    load, jump_if_equal, answer = 0x20, 0x15, 0x06
    numbers = sorted(_BY_NUMBER)
    steps = [
        (load, 0, 0, 4),
        (jump_if_equal, 0, len(numbers) + 1, audit),
        (load, 0, 0, 0),
        *((jump_if_equal, len(numbers) - i, 0, nr) for i, nr in enumerate(numbers)),
        (answer, 0, 0, _ALLOW),
        (answer, 0, 0, _NOTIFY),
    ]
    program = _Program(len(steps), b"".join(struct.pack("HBBI", *step) for step in steps))
    libc = ctypes.CDLL(None, use_errno=True)
    zero, one = ctypes.c_ulong(0), ctypes.c_ulong(1)
    if libc.prctl(_NO_NEW_PRIVILEGES, one, zero, zero, zero):
        raise OSError(ctypes.get_errno(), "prctl")
    flags = ctypes.c_ulong(_TSYNC | _NEW_LISTENER | _TSYNC_ESRCH)
    listener = libc.syscall(
        ctypes.c_long(seccomp), ctypes.c_ulong(_SET_FILTER), flags, ctypes.byref(program)
    )
    if listener < 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    return int(listener)


@functools.cache
def _cannot_watch() -> str:
    """Why system calls cannot be intercepted here; empty where they can."""
    if _MACHINE not in _ARCHITECTURE:
        return f"the numbers of system calls are not known for {_MACHINE}"
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            _install_filter()
            code = 0
        os._exit(code)
    _, status = os.waitpid(child, 0)
    return "" if status == 0 else "the kernel lets nobody intercept system calls here"
