"""Nodes on this machine, each behind a network link of its own that is as fast as is asked for.

Ranks of one machine share its cores, and over loopback what all of them send together counts; on
nodes of their own it is what each sends. Network namespaces around a bridge, with a token bucket
(tc-tbf) at both ends of each line; needs root and iproute2.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

__all__ = ["Links", "links", "why_not"]

_SEARCHED = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_LINE = "line"


@dataclass(frozen=True, slots=True)
class Links:
    """Where each rank runs.

    Attributes:
        namespaces: One for each rank.
        host: The address of the first one.
    """

    namespaces: tuple[str, ...]
    host: str

    def command(self, rank: int, command: list[str]) -> list[str]:
        """What runs a command as a rank, behind its link."""
        return [_tool("ip"), "netns", "exec", self.namespaces[rank], *command]

    @property
    def environment(self) -> dict[str, str]:
        """What ranks find each other by."""
        return {"MASTER_ADDR": self.host, "GLOO_SOCKET_IFNAME": _LINE}


def why_not() -> str | None:
    """Why there can be no links here; ``None`` if there can."""
    if os.geteuid():
        return "needs root, to make network namespaces"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool, path=_SEARCHED) is None]
    return f"needs {' and '.join(missing)}, of iproute2" if missing else None


@contextmanager
def links(count: int, gbit_s: float) -> Iterator[Links]:
    """Make so many nodes; they are gone afterwards.

    Args:
        count: How many.
        gbit_s: How fast each line is in either direction, in 10^9 bits a second.
    """
    prefix = f"localckpt-{os.getpid()}"
    hub, nodes = f"{prefix}-hub", tuple(f"{prefix}-{node}" for node in range(count))
    with ExitStack() as made:
        for namespace in (hub, *nodes):
            _run("ip", f"netns add {namespace}")
            made.callback(_run, "ip", f"netns del {namespace}")
        _run("ip", f"-n {hub} link add bridge type bridge")
        _run("ip", f"-n {hub} link set bridge up")
        for number, node in enumerate(nodes):
            port = f"port{number}"
            _run("ip", f"-n {hub} link add {port} type veth peer name {_LINE} netns {node}")
            _run("ip", f"-n {hub} link set {port} master bridge up")
            _run("ip", f"-n {node} addr add 10.78.0.{number + 1}/24 dev {_LINE}")
            for device in ("lo", _LINE):
                _run("ip", f"-n {node} link set {device} up")
            for namespace, device in ((hub, port), (node, _LINE)):
                bucket = f"tbf rate {gbit_s}gbit burst 1mb latency 50ms"
                _run("tc", f"-n {namespace} qdisc add dev {device} root {bucket}")
        yield Links(nodes, "10.78.0.1")


def _tool(name: str) -> str:
    found = shutil.which(name, path=_SEARCHED)
    assert found is not None, why_not()
    return found


def _run(tool: str, arguments: str) -> None:
    done = subprocess.run(
        [_tool(tool), *arguments.split()], capture_output=True, text=True, timeout=30, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{tool} {arguments}: {done.stderr.strip()}")
