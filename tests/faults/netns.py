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
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["CONTROL", "DATA", "STORE_ADDRESS", "Network", "enter"]

CONTROL, DATA = "control", "data"
"""The networks, and the names of the interfaces that a node has in them."""
STORE_ADDRESS = "10.77.0.254"

_LINES = (CONTROL, DATA)
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1
_PATIENCE_S = 30.0
_OURS = Path("/proc/thread-self/ns/net")


class Network:
    """Namespaces for a hub and some nodes, all connected.

    Skips the test where they cannot be had.

    Args:
        nodes: How many.
    """

    def __init__(self, nodes: int) -> None:
        self._ip = shutil.which("ip", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
        if self._ip is None:
            pytest.skip("needs ip, of iproute2")
        if os.geteuid() != 0:
            pytest.skip("needs root, to make network namespaces")
        self._descriptors: list[int] = []
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

    def mend(self, node: int, lines: Sequence[str]) -> None:
        """Plug it in again."""
        for line in lines:
            self._plug(f"{line}{node}", True)

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
        self._configure(self._hub, hub)
        for place, node in enumerate(self._nodes):
            own = ["link set lo up"]
            for number, line in enumerate(_LINES):
                own += [f"addr add 10.77.{number}.{place + 1}/24 dev {line}", f"link set {line} up"]
            self._configure(node, own)

    def _configure(self, namespace: int, commands: Sequence[str]) -> None:
        with _inside(namespace):
            done = subprocess.run(
                [str(self._ip), "-batch", "-"],
                input="\n".join(commands),
                capture_output=True,
                text=True,
                timeout=_PATIENCE_S,
                check=False,
            )
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
