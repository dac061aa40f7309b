"""The demo's two nodes: each a `torchrun` agent with its ranks and a checkpoint store of its own.

A node can be lost as in a power cut: all its processes by SIGKILL, and its store with them. Every
process carries its node's name in the environment, so those whose parent is gone are found too.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

__all__ = ["Node", "free_port", "running"]

_MARK = "LOCALCKPT_DEMO_NODE"
_END_S = 20.0
_PROJECT = Path(__file__).absolute().parents[1]


class Node:
    """One agent, its ranks and its store.

    Args:
        store: Where this node's ranks keep checkpoints. Its name is the node's name.
        logs: Folder for the logs and the temporary files of the agent and its ranks.
        port: Of the rendezvous, on the loopback address.
        is_host: Whether this node's agent serves the rendezvous. That node must survive.
        ranks: How many this node has.
        options: The training script, as a module, and what is given to it.
        alone_after_s: How long, in seconds, a node waits for the other one before it trains alone;
            ``None`` if it does not.
    """

    def __init__(
        self,
        store: Path,
        logs: Path,
        port: int,
        is_host: bool,
        ranks: int,
        options: list[str],
        alone_after_s: int | None = None,
    ) -> None:
        self.store = store
        self.name = store.name
        self._log = logs / f"node-{self.name}.log"
        self._rank_logs = logs / f"node-{self.name}.ranks"
        self._temporary = logs / f"node-{self.name}.tmp"
        self._mark = str(self._log)
        self._agent: subprocess.Popen[bytes] | None = None
        rendezvous = {
            "is_host": int(is_host),
            "join_timeout": 60,
            "read_timeout": 30,
            # A lost agent is struck off after 3 s, and its replacement can join.
            "keep_alive_interval": 1,
            "keep_alive_max_attempt": 3,
        }
        if alone_after_s is not None:
            rendezvous["last_call_timeout"] = alone_after_s
        self._command = [
            *(sys.executable, "-m", "torch.distributed.run"),
            "--nnodes=2" if alone_after_s is None else "--nnodes=1:2",
            *(f"--nproc-per-node={ranks}", "--max-restarts=2", "--monitor-interval=0.1"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=demo"),
            "--rdzv-conf=" + ",".join(f"{key}={value}" for key, value in rendezvous.items()),
            *("--local-addr=127.0.0.1", "--redirects=3", f"--log-dir={self._rank_logs}"),
            *("--module", *options, "--store", str(store)),
        ]

    def start(self) -> None:
        """Start an agent with an empty store."""
        self.store.mkdir(parents=True)
        self._temporary.mkdir(exist_ok=True)
        environment = {
            **os.environ,
            _MARK: self._mark,
            "TMPDIR": str(self._temporary),  # torchrun leaves a folder there
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            # A surviving agent would go on naming the store of the round before to its ranks,
            # while a fresh agent waits to be told of a new one.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        with self._log.open("ab") as log:
            self._agent = subprocess.Popen(
                self._command,
                cwd=_PROJECT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches the demo alone, which then ends the nodes
            )

    def lose(self) -> list[int]:
        """Kill the agent and its ranks, delete the store; the pids that were killed."""
        pids = self.kill()
        shutil.rmtree(self.store)
        return pids

    def kill(self) -> list[int]:
        """SIGKILL whatever runs on this node, and return once it is gone."""
        pids: list[int] = []
        deadline = time.monotonic() + _END_S
        while processes := self._processes():
            if time.monotonic() > deadline:
                left = [process.pid for process in processes]
                raise TimeoutError(f"processes {left} of node {self.name} do not end on SIGKILL")
            for process in processes:
                if process.pid not in pids:
                    pids.append(process.pid)
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.01)
        if self._agent is not None:
            self._agent.wait(_END_S)
        return pids

    def exit_code(self) -> int | None:
        """How the agent ended; ``None`` while it runs."""
        return None if self._agent is None else self._agent.poll()

    def log_tails(self, lines: int = 25) -> str:
        """The last lines of the agent, and of its ranks since they were last started."""
        ranks = [log for log in self._rank_logs.rglob("stderr.log") if log.stat().st_size]
        ranks.sort(key=lambda log: log.stat().st_mtime_ns)
        tails = []
        for log in [self._log, *ranks[-2:]]:
            if log.exists():
                end = log.read_text(errors="replace").splitlines()[-lines:]
                who = "agent" if log == self._log else f"local rank {log.parent.name}"
                tails.append("\n".join([f"-- {who}", *end]))
        return "\n".join(tails)

    def _processes(self) -> list[psutil.Process]:
        """In the order of their pids, so the agent comes first and cannot act on a rank's end."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                ended = process.status() == psutil.STATUS_ZOMBIE
                if not ended and process.environ().get(_MARK) == self._mark:
                    found.append(process)
        return found


@contextmanager
def running(nodes: list[Node]) -> Iterator[None]:
    """Start the nodes in this order, and leave nothing of them running."""
    with ExitStack() as stack:
        for node in nodes:
            stack.callback(node.kill)
            node.start()
        yield


def free_port() -> int:
    """A TCP port of the loopback address that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
