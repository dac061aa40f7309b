"""Starts the ranks of a small job on this machine, and hands back the last line each printed."""

from __future__ import annotations

import os
import socket
import subprocess
import time

from benchmarks.links import Links

__all__ = ["run_ranks"]


def run_ranks(
    command: list[str], world_size: int, timeout_s: float, links: Links | None = None
) -> list[str]:
    """Run the command as every rank; no rank is left behind, however it ends.

    Args:
        command: What each runs.
        world_size: How many there are.
        timeout_s: When they are ended.
        links: Where they run; ``None`` for all on loopback.

    Raises:
        RuntimeError: A rank failed.
    """
    port = _free_port()
    deadline = time.monotonic() + timeout_s
    ranks = [
        subprocess.Popen(
            command if links is None else links.command(rank, command),
            stdout=subprocess.PIPE,
            env=_environment(rank, world_size, port) | (links.environment if links else {}),
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [
            rank.communicate(timeout=max(0.0, deadline - time.monotonic()))[0] for rank in ranks
        ]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"the ranks ended with {[rank.returncode for rank in ranks]}")
    return [output.splitlines()[-1] for output in outputs]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    return os.environ | {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        # NCCL refuses two ranks on one GPU of one host, so each says it is a host of its own.
        "NCCL_HOSTID": f"benchmark-{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
    }
