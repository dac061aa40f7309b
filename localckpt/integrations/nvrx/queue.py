"""NVRx's queue of asynchronous calls, with the arguments that NVRx's has."""

from __future__ import annotations

from typing import Any

from localckpt.async_save.queue import AsyncCallsQueue as _AsyncCallsQueue

__all__ = ["AsyncCallsQueue"]

# The class of ionice in which a process waits until the disk is idle.
_IDLE = 3


class AsyncCallsQueue(_AsyncCallsQueue):
    """Queue that runs requests behind training and finalizes them, in order, on all ranks.

    Args:
        persistent: As for :class:`localckpt.AsyncCallsQueue`, as are all other options.
        is_daemon, sigterm_timeout, cpu_shm_mode: Accepted. The worker ends with its trainer, and
            gets its data through shared memory of the host, whatever these say.
        cpu_priority: How much lower than the trainer's the CPU priority of its processes is.
        io_priority: A class of ``ionice``: 3, or ``None``, for disk accesses that wait for those of
            others; with another, they do not wait.
    """

    def __init__(
        self,
        persistent: bool = True,
        is_daemon: bool = True,
        cpu_priority: int = 10,
        io_priority: int | None = None,
        sigterm_timeout: float = 30.0,
        cpu_shm_mode: bool = False,
        **options: Any,
    ) -> None:
        idle_io = io_priority in (None, _IDLE)
        super().__init__(persistent, **{"nice": cpu_priority, "idle_io": idle_io} | options)

    @classmethod
    def warmup_persistent_caller(
        cls, rank: int, cpu_shm_mode: bool = False, **options: Any
    ) -> None:
        """Do nothing: the worker imports no torch, and is up milliseconds after the first call.

        ``queue.warm_up()`` has it ready before. Megatron-LM looks for ``cpu_shm_mode`` by name.
        """
