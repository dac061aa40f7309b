"""Nodes in network namespaces of their own, and two networks between them that can be cut.

The job's key-value store is in a hub, which every node reaches over the ``control`` network; ranks
talk to each other over the ``data`` network. The namespaces have no names: the kernel removes them,
and all that is in them, with the last process or descriptor that uses them.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import socket
import struct
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.programs import run

__all__ = ["CONTROL", "DATA", "STORE_ADDRESS", "Network", "enter"]

CONTROL, DATA = "control", "data"
"""The networks, and the names of the interfaces that a node has in them."""
STORE_ADDRESS = "10.77.0.254"

_LINES = (CONTROL, DATA)
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1
_PATIENCE_S = 30.0
_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
_OURS = Path("/proc/thread-self/ns/net")


class Network:
    """Namespaces for a hub and some nodes, all connected; skips where they cannot be had."""

    def __init__(self, nodes: int) -> None:
        if shutil.which("ip", path=_PATH) is None:
            pytest.skip("needs ip, of iproute2")
        if os.geteuid() != 0:
            pytest.skip("needs root, to make network namespaces")
        self._descriptors: list[int] = []
        self._slow: set[str] = set()
        self._socket: socket.socket | None = None
        try:
            self._hub, *self._nodes = [self._new() for _ in range(nodes + 1)]
            self._connect()
            with self.inside_hub():
                self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        except OSError as error:
            self.close()
            pytest.skip(f"cannot make network namespaces: {error}")

    @property
    def namespaces(self) -> list[str]:
        """The nodes' namespaces, for :func:`enter`."""
        return [self._path(node) for node in self._nodes]

    @contextmanager
    def inside_hub(self) -> Iterator[None]:
        """What this thread makes inside, processes and sockets, it makes in the hub."""
        with _inside(self._hub):
            yield

    def cut(self, node: int, lines: Sequence[str]) -> None:
        """Unplug a node; done when this returns, and quick enough to hit what is under way."""
        for line in lines:
            self._plug(f"{line}{node}", False)

    def slow(self, node: int, line: str, nbytes_per_s: int) -> None:
        """Let no more than so much come to a node.

        It stays as fast where the kernel has no token buckets: then who cuts must be quick.
        """
        # No less than a packet at once, and no packet dropped.
        limits = f"rate {8 * nbytes_per_s}bit burst 256kb limit 256mb"
        with suppress(OSError):
            self._run(self._hub, "tc", [f"qdisc replace dev {line}{node} root tbf {limits}"])
            self._slow.add(f"{line}{node}")

    def mend(self, node: int, lines: Collection[str]) -> None:
        """Plug it in again, at full speed."""
        for line in lines:
            self._plug(f"{line}{node}", True)
            if (name := f"{line}{node}") in self._slow:
                self._run(self._hub, "tc", [f"qdisc del dev {name} root"])
                self._slow.remove(name)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()

    def _plug(self, name: str, is_up: bool) -> None:
        assert self._socket is not None
        request = struct.pack("16sh", name.encode(), _IFF_UP if is_up else 0).ljust(40, b"\0")
        fcntl.ioctl(self._socket, _SIOCSIFFLAGS, request)

    def _new(self) -> int:
        made: list[int | OSError] = []

        def make() -> None:
            try:
                _call("unshare", _NEW_NETWORK)
                made.append(os.open(_OURS, os.O_RDONLY | os.O_CLOEXEC))
            except OSError as error:
                made.append(error)

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        (found,) = made
        if isinstance(found, OSError):
            raise found
        self._descriptors.append(found)
        return found

    def _connect(self) -> None:
        hub = ["link set lo up"]
        for number, line in enumerate(_LINES):
            hub += [f"link add {line} type bridge", f"link set {line} up"]
            hub += [f"addr add 10.77.{number}.254/24 dev {line}"]
            for place, node in enumerate(self._nodes):
                peer = f"peer name {line} netns {self._path(node)}"
                hub += [f"link add {line}{place} type veth {peer}"]
                hub += [f"link set {line}{place} master {line} up"]
        self._run(self._hub, "ip", hub)
        for place, node in enumerate(self._nodes):
            own = ["link set lo up"]
            for number, line in enumerate(_LINES):
                own += [f"addr add 10.77.{number}.{place + 1}/24 dev {line}", f"link set {line} up"]
            self._run(node, "ip", own)

    def _run(self, namespace: int, program: str, commands: Sequence[str]) -> None:
        with _inside(namespace):
            told = {"env": {"PATH": _PATH}, "input": "\n".join(commands)}
            done = run(program, "-batch", "-", timeout=_PATIENCE_S, **told)
        if done.returncode:
            raise OSError(done.stderr.strip())

    def _path(self, descriptor: int) -> str:
        return f"/proc/{os.getpid()}/fd/{descriptor}"


def enter(namespace: str) -> None:
    """Move this thread, and what it starts, into a namespace."""
    descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _call("setns", descriptor, _NEW_NETWORK)
    finally:
        os.close(descriptor)


@contextmanager
def _inside(descriptor: int) -> Iterator[None]:
    home = os.open(_OURS, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _call("setns", descriptor, _NEW_NETWORK)
        try:
            yield
        finally:
            _call("setns", home, _NEW_NETWORK)
    finally:
        os.close(home)


def _call(function: str, *args: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, function)(*args):
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")
