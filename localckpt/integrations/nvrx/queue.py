"""Queue of asynchronous calls with the signature of NVRx's."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from localckpt.async_save.queue import AsyncCallsQueue as _AsyncCallsQueue
from localckpt.integrations.nvrx.errors import also_torchs

__all__ = ["AsyncCallsQueue", "abort_nvrx_checkpoint"]

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
        self._options = {"nice": cpu_priority, "idle_io": idle_io} | options
        super().__init__(persistent, **self._options)
        _QUEUES.add(self)

    def maybe_finalize_async_calls(
        self, blocking: bool = False, no_dist: bool = False
    ) -> list[int]:
        """As :class:`localckpt.AsyncCallsQueue`; errors are also torch's CheckpointException."""
        with also_torchs():
            return super().maybe_finalize_async_calls(blocking, no_dist)

    def abort(self) -> None:
        """End the workers and drop what is in flight; the queue is then as if it was new."""
        if not self._closed:
            self.close(abort=True)
            _AsyncCallsQueue.__init__(self, self._persistent, **self._options)

    @classmethod
    def warmup_persistent_caller(
        cls, rank: int, cpu_shm_mode: bool = False, **options: Any
    ) -> None:
        """Do nothing: the worker imports no torch, and starts in milliseconds at the first call.

        ``queue.warm_up()`` starts it earlier. Megatron-LM requires an argument ``cpu_shm_mode``.
        """


_QUEUES: WeakSet[AsyncCallsQueue] = WeakSet()


def abort_nvrx_checkpoint() -> None:
    """End the workers of all queues of this process, and drop what is in flight.

    Failure functions run, and no other rank is asked. In-process restart calls this from a thread
    of its own, also while the trainer waits in a poll, which ends with an error there. The queues
    can be used again, by the process group that there is then.
    """
    for queue in tuple(_QUEUES):
        queue.abort()
