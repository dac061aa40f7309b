"""Ranks that are forked from a process which has imported a framework.

Some frameworks take many seconds to import: so one process does it for all jobs of a test.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.stores import serve_store
from tests.ranks import DeadRank

__all__ = ["Jobs", "leave_out"]

_HEAVY = ("deepspeed", "torchao", "datasets", "tensorboard", "tensorboardX", "ray", "pandas")


def leave_out() -> None:
    """Have Transformers and Accelerate not import packages that are installed, and take long."""
    for name in _HEAVY:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]


class Jobs:
    """Starts jobs, one after the other, in a rank that was started without a process group.

    Args:
        deadline_s: After this time the ranks of a job are killed.
    """

    def __init__(self, deadline_s: float = 150.0) -> None:
        self._deadline_s = deadline_s

    def run(self, fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        """Run ``fn(rank, world_size, *args)`` in every rank of a new job.

        Returns:
            What each returned; a :class:`DeadRank` for those that ended otherwise.

        Raises:
            RuntimeError: Some rank raised; with its traceback.
        """
        # Names in the store of a job that was killed would be taken for those of the next.
        store = serve_store()
        children = [
            self._fork(rank, world_size, store.port, fn, args) for rank in range(world_size)
        ]
        watch = threading.Timer(self._deadline_s, _kill, [[pid for pid, _ in children]])
        watch.start()
        try:
            outcomes = [_outcome(rank, *child) for rank, child in enumerate(children)]
        finally:
            watch.cancel()
            watch.join()
        for rank, outcome in enumerate(outcomes):
            if isinstance(outcome, _Raised):
                raise RuntimeError(f"rank {rank}: {outcome}")
        return outcomes

    def _fork(
        self, rank: int, world_size: int, port: int, fn: Callable[..., Any], args: tuple[Any, ...]
    ) -> tuple[int, int]:
        receiving, sending = os.pipe()
        sys.stdout.flush()
        if pid := os.fork():
            os.close(sending)
            return pid, receiving
        os.close(receiving)
        os.environ |= {
            "RANK": f"{rank}",
            "LOCAL_RANK": f"{rank}",
            "GROUP_RANK": "0",
            "WORLD_SIZE": f"{world_size}",
            "LOCAL_WORLD_SIZE": f"{world_size}",
            "MASTER_PORT": f"{port}",
        }
        torch.set_num_threads(1)
        try:
            outcome = fn(rank, world_size, *args)
            if dist.is_initialized():
                dist.destroy_process_group()
        except BaseException:  # noqa: BLE001 - the test shows it
            outcome = _Raised(traceback.format_exc())
        with open(sending, "wb") as stream:
            pickle.dump(outcome, stream)
        sys.stdout.flush()
        sys.stderr.flush()
        # The test process's own work is not this one's to end.
        os._exit(0)


class _Raised(str):
    """Traceback of what a rank has raised."""

    __slots__ = ()


def _outcome(rank: int, pid: int, receiving: int) -> Any:
    with open(receiving, "rb") as stream:
        payload = stream.read()
    _, status = os.waitpid(pid, 0)
    return pickle.loads(payload) if payload else DeadRank(rank, os.waitstatus_to_exitcode(status))


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
