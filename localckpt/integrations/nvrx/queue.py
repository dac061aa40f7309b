"""Queue of asynchronous calls with the signature of NVRx's."""

from __future__ import annotations

from typing import Any

from localckpt.async_save.queue import AsyncCallsQueue as _AsyncCallsQueue

__all__ = ["AsyncCallsQueue"]

# ionice class of processes that access the disk only when it is idle.
_IDLE = 3


class AsyncCallsQueue(_AsyncCallsQueue):
    """Queue that runs requests behind training and finalizes them, in order, on all ranks.

    Args:
        persistent, options: As for :class:`localckpt.AsyncCallsQueue`.
        is_daemon, sigterm_timeout, cpu_shm_mode: Accepted without effect. The worker ends with its
            trainer, and gets its data through shared memory of the host.
        cpu_priority: Increment of the worker's nice value over the trainer's.
        io_priority: Class of ``ionice``. With 3 or ``None``, disk accesses of the worker wait for
            those of other processes; with another class they do not.
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
        """Do nothing: the worker imports no torch, and starts in milliseconds at the first call.

        ``queue.warm_up()`` starts it earlier. Megatron-LM requires an argument ``cpu_shm_mode``.
        """
