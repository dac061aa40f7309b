"""Queue of asynchronous calls with the signature of NVRx's, and errors that are also NVRx's."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from localckpt.async_save.queue import AsyncCallsQueue as _AsyncCallsQueue
from localckpt.errors import CheckpointingException, PeerLostError

__all__ = ["AsyncCallsQueue", "abort_nvrx_checkpoint", "also_torchs"]

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

    def abort(self, within_s: float = 2.0) -> None:
        """End the workers and drop what is in flight; the queue is then as if it was new.

        Unlike our own queue's, which stays aborted; ``within_s`` is the time of calls in threads.
        """
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


@contextmanager
def also_torchs() -> Iterator[None]:
    """Raise what failed as torch's ``CheckpointException``, too, unless a rank was lost."""
    try:
        yield
    except PeerLostError:
        raise
    except CheckpointingException as error:
        error.__class__ = _also_torchs(type(error))  # type: ignore[arg-type]
        raise


@cache
def _also_torchs(kind: type[CheckpointingException]) -> type[CheckpointingException]:
    if issubclass(kind, CheckpointException):
        return kind

    class Both(kind, CheckpointException):  # type: ignore[misc, valid-type]
        @property
        def failures(self) -> dict[int, tuple[BaseException, traceback.StackSummary]]:
            """This rank's error, whose text names the ranks that failed."""
            rank = dist.get_rank() if dist.is_initialized() else 0
            return {rank: (self, traceback.extract_tb(self.__traceback__))}

        def __reduce__(self) -> tuple[object, ...]:
            return kind, self.args, vars(self)

    Both.__name__, Both.__qualname__ = kind.__name__, kind.__qualname__
    Both.__module__ = kind.__module__
    return Both
