"""A Ray cluster of several nodes on this machine, in a process that a test starts.

Each node has a directory that plays its disk. Everything that Ray makes lies in one directory, and
all of its processes are children of the one that made the cluster.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster as RayCluster

from tests.ranks import NODE_STORE

__all__ = ["Cluster", "start_cluster"]

_STORE_NBYTES = 80 << 20
_LEAVING_S = 30.0
_SYSTEM = {
    # No worker of these would have the environment that Ray Train wants.
    "prestart_worker_first_driver": False,
    "enable_worker_prestart": False,
    # A node whose process is gone refuses connections, and is dead after seconds instead of half a
    # minute. One that is slow to answer has as long as otherwise.
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
    "health_check_timeout_ms": 10_000,
}


class Cluster:
    """A cluster with a node for each of some directories.

    Args:
        stores: The directories. The node of the first one cannot be lost.
        workers: Number of workers that the first node has room for. The others have room for one.
        directory: Has the sockets, whose paths would be too long in that of Ray's session.
    """

    def __init__(self, stores: Sequence[Path], workers: int, directory: Path) -> None:
        self._directory = directory
        head = {"_system_config": _SYSTEM, "no_monitor": True, "include_log_monitor": False}
        self._cluster = RayCluster(
            initialize_head=True, head_node_args=head | self._options(stores[0], workers)
        )
        # Before there are others, to one of which this process might be connected.
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level="ERROR")
        self._nodes = {
            store: self._cluster.add_node(wait=False, **self._options(store, 1))
            for store in stores[1:]
        }
        self._cluster.wait_for_nodes()

    def can_lose(self, store: Path) -> bool:
        """Whether the driver goes on without the node of this directory."""
        return store in self._nodes

    def lose(self, store: Path) -> None:
        """End a node as a loss of power does, and its disk with it."""
        workers = _processes_of(store)
        for process in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._cluster.remove_node(self._nodes.pop(store), allow_graceful=False)
        _, left = psutil.wait_procs(workers, timeout=_LEAVING_S)
        assert not left
        shutil.rmtree(store)

    def close(self) -> None:
        ray.shutdown()
        processes = psutil.Process().children(recursive=True)
        self._cluster.shutdown()
        _, left = psutil.wait_procs(processes, timeout=_LEAVING_S)
        assert not left, [process.cmdline() for process in left]

    def _options(self, store: Path, workers: int) -> dict[str, Any]:
        return {
            "num_cpus": workers,
            "env_vars": {NODE_STORE: str(store)},
            "object_store_memory": _STORE_NBYTES,
            "include_dashboard": False,
            "plasma_store_socket_name": str(self._directory / f"{store.name}.plasma"),
            "raylet_socket_name": str(self._directory / f"{store.name}.raylet"),
        }


@contextlib.contextmanager
def start_cluster(stores: Sequence[Path], workers: int) -> Iterator[Cluster]:
    """Start a :class:`Cluster`, and connect this process to it."""
    with tempfile.TemporaryDirectory(prefix="ray-") as directory:
        os.environ["RAY_TMPDIR"] = directory
        Path(directory, "ray").mkdir()
        with contextlib.closing(Cluster(stores, workers, Path(directory))) as cluster:
            yield cluster


def _processes_of(store: Path) -> list[psutil.Process]:
    """The processes of a node, by the directory that they have in their environment."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get(NODE_STORE) == str(store):
                found.append(process)
    return found
