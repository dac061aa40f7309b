"""Workers of data loaders: processes that a signal to stop the job reaches as well."""

from __future__ import annotations

import atexit
import mmap
import os
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType

__all__ = ["worker_init_fn"]

_LOOK_S = 0.5
# Shared with forked workers. Not 0 once the process that imported this module exits.
_is_ending = mmap.mmap(-1, mmap.PAGESIZE)


def worker_init_fn(
    worker_id: int, *, signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1)
) -> None:
    """Have a data loader's worker leave signals to its trainer, and end with it.

    Launchers send a signal to stop the job to all processes. A worker that it ends takes the
    trainer along, which waits for its next batch, before anything is saved. Give it to the loader:
    ``DataLoader(..., worker_init_fn=localckpt.worker_init_fn)``, or call it in a function of your
    own. Programs that the worker starts get signals as ever.

    Args:
        worker_id: Number of the worker, as torch gives it; any will do.
        signals: The ``stop_signals`` of the :class:`Checkpointer`; for others than by default give
            the loader ``functools.partial(localckpt.worker_init_fn, signals=...)``.
    """
    for number in signals:
        signal.signal(number, _leave_to_trainer)
    ending = threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True)
    ending.start()


def _leave_to_trainer(number: int, frame: FrameType | None) -> None:
    # A trainer that exits ends workers that do not end by themselves, and waits for them.
    if _is_ending[0]:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


def _end_with(trainer: int) -> None:
    while os.getppid() == trainer:
        time.sleep(_LOOK_S)
    os._exit(1)


def _note_exit(process: int) -> None:
    # Also a fork runs this that ends by itself.
    if os.getpid() == process:
        _is_ending[0] = 1


atexit.register(_note_exit, os.getpid())
