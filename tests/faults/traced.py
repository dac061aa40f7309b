"""System calls on a store's files: counted, and one of them refused, cut short, or the last.

A watched process hands every call that may touch a file to the test before it is carried out, by
the kernel's seccomp notifications. Against strace this counts calls in their order over all threads
and the worker process, knows files whose names are drawn at random, and really moves a part of the
bytes when a call falls short. Nothing is injected outside of sections.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import json
import os
import platform
import select
import signal
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest

from tests.managers.jobs import MAX_S

__all__ = [
    "CHANGES",
    "Call",
    "Fault",
    "Section",
    "Watch",
    "Watched",
    "await_memory_ahead",
    "left_behind",
    "look_again",
    "watch",
]

_ANSWER_NBYTES = 1 << 20
_ADMINISTRATION = {"node-token", ".lock", ".notes"}


@dataclass(frozen=True, slots=True)
class Call:
    """A system call on files of the store.

    Attributes:
        name: Of the system call.
        paths: What it works on, relative to the store.
        thread: Who makes it.
        makes: It opens a file to make it.
    """

    name: str
    paths: tuple[str, ...]
    thread: int
    makes: bool

    @property
    def changes(self) -> bool:
        """Whether it may change what is in the store."""
        return self.makes or self.name in CHANGES

    def commits(self, iteration: int) -> bool:
        """Whether it gives the image of an iteration its name."""
        name = self.paths[-1].rpartition("/")[2]
        return (
            self.name.startswith("rename")
            and name.startswith(f"{iteration:012d}.")
            and name.endswith(".safetensors")
        )

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.paths)})"


@dataclass(frozen=True, slots=True)
class Fault:
    """What is to happen to one call of a section.

    Attributes:
        nth: Which one, from 1; only calls that it can happen to are counted.
        how: It fails with an ``"error"``, is carried out in ``"short"``, or not at all, and said to
            be (``"skip"``); or the watched process and its children are killed before it.
        code: The error.
        nbytes: How much a short call moves at most.
        lasts: All counted calls after it share its fate.
        only: Names of the calls that are counted; all by default.
    """

    nth: int
    how: Literal["error", "short", "skip", "kill"]
    code: int = 0
    nbytes: int = 0
    lasts: bool = False
    only: tuple[str, ...] = ()


@dataclass
class Section:
    """What a watched process did between two points.

    Attributes:
        calls: In their order.
        hit_at: Place of the first one that the fault happened to.
    """

    calls: list[Call] = field(default_factory=list)
    hit_at: int | None = None

    @property
    def hit(self) -> Call | None:
        """The first call that the fault happened to."""
        return None if self.hit_at is None else self.calls[self.hit_at]


class Watched:
    """In a process: lets the test see and change its system calls, from now on and for ever.

    Args:
        address: Of the :class:`Watch`.
    """

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
        self._ask(None if fault is None else asdict(fault))
        section = Section()
        try:
            yield section
        finally:
            told = self._ask("end")
            section.calls = [_call_of(fields) for fields in told["calls"]]
            section.hit_at = told["hit_at"]

    def _ask(self, message: Any) -> Any:
        self._watch.send(json.dumps(message).encode())
        return json.loads(self._watch.recv(_ANSWER_NBYTES))


@contextmanager
def watch(*roots: Path, before: Callable[[Call], None] | None = None) -> Iterator[Watch]:
    """In a test: look after one process, which is given ``address``, until it has ended.

    Args:
        roots: The stores whose files count.
        before: Called before each call in a section that changes them, while that call waits.
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
        self._wake, self._awake = os.pipe()
        self.over = threading.Event()
        """Set when somebody was killed, or the process has ended."""
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        os.write(self._awake, b"!")
        self._thread.join(2 * MAX_S)
        if self._thread.is_alive():
            raise TimeoutError("the watch does not end")
        for fd in (self._wake, self._awake):
            os.close(fd)
        self._server.close()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            ready, _, _ = select.select([self._server, self._wake], [], [])
            if self._server not in ready:
                return
            connection, _ = self._server.accept()
            with connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ANSWER_NBYTES)
                credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                self._trainer = struct.unpack("3i", credentials)[0]
                _, (listener,), _, _ = socket.recv_fds(connection, 64, 1)
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
        for fd in (connection.fileno(), listener, self._wake):
            poll.register(fd, select.POLLIN)
        deadline: float | None = None
        while deadline is None or time.monotonic() < deadline:
            for fd, event in poll.poll(1000):
                if fd == listener and event & select.POLLIN:
                    self._decide(listener)
                elif fd == listener:
                    return
                elif fd == self._wake:
                    poll.unregister(fd)
                    deadline = time.monotonic() + MAX_S
                elif not self._talk(connection):
                    poll.unregister(fd)
                    self.over.set()
        raise TimeoutError(f"process {self._trainer} or a child of it does not end")

    def _talk(self, connection: socket.socket) -> bool:
        """Answer the process; whether it is there."""
        with contextlib.suppress(ConnectionError):
            if message := connection.recv(1 << 16):
                connection.send(self._answer(json.loads(message)))
                return True
        return False

    def _answer(self, message: Any) -> bytes:
        if message == "end":
            self._inside = False
            return json.dumps(asdict(self.section)).encode()
        self.section, self._counted, self._inside = Section(), 0, True
        self._fault = None if message is None else Fault(**message)
        return b"{}"

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
        value, code, flags = 0, 0, _CONTINUE
        call = self._look_at(pid, nr, args) if self._inside else None
        if call is not None and call.changes and self._before is not None:
            try:
                self._before(call)
            except BaseException:
                self._kill()
                raise
        if call is not None and self._is_hit(call, pid, args):
            assert self._fault is not None
            if self._fault.how == "error":
                code, flags = -self._fault.code, 0
            elif self._fault.how == "short":
                value, flags = _carry_out_in_part(call.name, pid, args, self._fault.nbytes), 0
            elif self._fault.how == "skip":
                flags = 0
            else:
                # No answer: with one, the call might still be made.
                self._kill()
                return
        with contextlib.suppress(FileNotFoundError):
            fcntl.ioctl(listener, _SEND, _ANSWER.pack(number, value, code, flags))

    def _look_at(self, pid: int, nr: int, args: list[int]) -> Call | None:
        name, spec = _BY_NUMBER[nr]
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            paths = [self._relative(path) for path in _paths_of(spec, pid, args)]
            ours = tuple(path for path in paths if path is not None)
            if ours:
                return Call(name, ours, pid, name == "openat" and bool(args[2] & os.O_CREAT))
        return None

    def _relative(self, path: str) -> str | None:
        for root in self._roots:
            if path == root or path.startswith(f"{root}/"):
                return path[len(root) + 1 :]
        return None

    def _is_hit(self, call: Call, pid: int, args: list[int]) -> bool:
        self.section.calls.append(call)
        fault = self._fault
        if fault is None or (fault.only and call.name not in fault.only):
            return False
        if fault.how == "short" and not _can_be_short(call.name, pid, args, fault.nbytes):
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


# What tests of watched managers have in common.


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
    """What lies in a store though nothing uses it.

    Args:
        but: Endings of what may stay.
    """
    names = {path.name for path in root.rglob("*") if path.is_file()} - _ADMINISTRATION
    return sorted(name for name in names if not name.endswith(but))


def _call_of(fields: dict[str, Any]) -> Call:
    return Call(**{**fields, "paths": tuple(fields["paths"])})


# The calls: their numbers on x86-64 and on 64-bit ARM, and which arguments tell the file.


@dataclass(frozen=True, slots=True)
class _Spec:
    x86_64: int | None
    aarch64: int | None
    paths: tuple[int, ...] = ()
    """A path; where ``at``, a directory's descriptor is the argument before it."""
    at: bool = False
    fd: int | None = None


_SPECS = {
    "read": _Spec(0, 63, fd=0),
    "write": _Spec(1, 64, fd=0),
    "close": _Spec(3, 57, fd=0),
    "stat": _Spec(4, None, (0,)),
    "fstat": _Spec(5, 80, fd=0),
    "lstat": _Spec(6, None, (0,)),
    "mmap": _Spec(9, 222, fd=4),
    "pread64": _Spec(17, 67, fd=0),
    "pwrite64": _Spec(18, 68, fd=0),
    "access": _Spec(21, None, (0,)),
    "flock": _Spec(73, 32, fd=0),
    "fsync": _Spec(74, 82, fd=0),
    "fdatasync": _Spec(75, 83, fd=0),
    "truncate": _Spec(76, 45, (0,)),
    "ftruncate": _Spec(77, 46, fd=0),
    "rename": _Spec(82, None, (0, 1)),
    "mkdir": _Spec(83, None, (0,)),
    "rmdir": _Spec(84, None, (0,)),
    "unlink": _Spec(87, None, (0,)),
    "chmod": _Spec(90, None, (0,)),
    "fchmod": _Spec(91, 52, fd=0),
    "statfs": _Spec(137, 43, (0,)),
    "fstatfs": _Spec(138, 44, fd=0),
    "setxattr": _Spec(188, 5, (0,)),
    "lsetxattr": _Spec(189, 6, (0,)),
    "getxattr": _Spec(191, 8, (0,)),
    "lgetxattr": _Spec(192, 9, (0,)),
    "getdents64": _Spec(217, 61, fd=0),
    "openat": _Spec(257, 56, (1,), at=True),
    "mkdirat": _Spec(258, 34, (1,), at=True),
    "newfstatat": _Spec(262, 79, (1,), at=True),
    "unlinkat": _Spec(263, 35, (1,), at=True),
    "renameat": _Spec(264, 38, (1, 3), at=True),
    "faccessat": _Spec(269, 48, (1,), at=True),
    "fallocate": _Spec(285, 47, fd=0),
    "preadv": _Spec(295, 69, fd=0),
    "pwritev": _Spec(296, 70, fd=0),
    "renameat2": _Spec(316, 276, (1, 3), at=True),
    "preadv2": _Spec(327, 286, fd=0),
    "pwritev2": _Spec(328, 287, fd=0),
    "statx": _Spec(332, 291, (1,), at=True),
}
CHANGES = {
    *("write", "pwrite64", "pwritev", "pwritev2", "fsync", "fdatasync", "fallocate"),
    *("truncate", "ftruncate", "mkdir", "mkdirat", "rmdir", "unlink", "unlinkat"),
    *("rename", "renameat", "renameat2", "setxattr", "lsetxattr"),
}
_MACHINE = platform.machine()
_NUMBERS = {
    name: number
    for name, spec in _SPECS.items()
    if (number := getattr(spec, _MACHINE, None)) is not None
}
_BY_NUMBER = {number: (name, _SPECS[name]) for name, number in _NUMBERS.items()}


def _paths_of(spec: _Spec, pid: int, args: list[int]) -> Iterator[str]:
    if spec.fd is not None:
        fd = ctypes.c_int(args[spec.fd]).value
        if fd >= 0:
            yield os.readlink(f"/proc/{pid}/fd/{fd}").removesuffix(" (deleted)")
    for index in spec.paths:
        path = _memory(pid, args[index], 4096).partition(b"\0")[0].decode(errors="replace")
        if not path.startswith("/"):
            fd = ctypes.c_int(args[index - 1]).value if spec.at else -1
            folder = os.readlink(f"/proc/{pid}/fd/{fd}" if fd >= 0 else f"/proc/{pid}/cwd")
            path = f"{folder}/{path}" if path else folder
        yield path


def _memory(pid: int, address: int, nbytes: int) -> bytes:
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        return os.pread(memory.fileno(), nbytes, address)


# Calls that move only some of their bytes.


def _can_be_short(name: str, pid: int, args: list[int], nbytes: int) -> bool:
    if name == "pwrite64":
        return args[2] > nbytes
    return name in ("preadv", "preadv2") and _readable(pid, args, nbytes) > 0


def _carry_out_in_part(name: str, pid: int, args: list[int], nbytes: int) -> int:
    """Do a part of the call here, with another descriptor of the same file."""
    writes = name == "pwrite64"
    fd = os.open(f"/proc/{pid}/fd/{args[0]}", os.O_WRONLY if writes else os.O_RDONLY)
    try:
        if writes:
            return os.pwrite(fd, _memory(pid, args[1], nbytes), args[3])
        data = os.pread(fd, _readable(pid, args, nbytes), args[3])
    finally:
        os.close(fd)
    moved = 0
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for address, size in _parts(pid, args):
            part = data[moved : moved + size]
            moved += os.pwrite(memory.fileno(), part, address) if part else 0
    return moved


def _readable(pid: int, args: list[int], nbytes: int) -> int:
    """How much of a read is a short one; 0 where the kernel would not cut it."""
    flags = int(Path(f"/proc/{pid}/fdinfo/{args[0]}").read_text().split()[3], 8)
    # Past the page cache, reads end at whole blocks.
    part = nbytes // 4096 * 4096 if flags & os.O_DIRECT else nbytes
    return part if sum(size for _, size in _parts(pid, args)) > part else 0


def _parts(pid: int, args: list[int]) -> list[tuple[int, int]]:
    raw = _memory(pid, args[1], 16 * args[2])
    return list(struct.iter_unpack("QQ", raw))


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
