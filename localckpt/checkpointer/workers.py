"""Workers of data loaders: processes that a signal to stop the job reaches as well."""

from __future__ import annotations

import atexit
import mmap
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType

__all__ = ["worker_init_fn"]

_LOOK_S = 0.5
# Where workers that are not forked find the flag of the process that has started them.
_VARIABLE = "LOCALCKPT_TRAINER_ENDS"
_INHERITED = os.environ.get(_VARIABLE, "")


def _make_flag() -> mmap.mmap:
    """Make a flag of this process, which the workers that it starts see."""
    file = os.memfd_create("localckpt-ends", os.MFD_CLOEXEC)
    os.ftruncate(file, mmap.PAGESIZE)
    os.environ[_VARIABLE] = f"/proc/{os.getpid()}/fd/{file}"
    return mmap.mmap(file, mmap.PAGESIZE)


# Not 0 once this process exits; forked workers have that of their trainer.
_ends = _make_flag()


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
    trainer_ends = _flag_of_trainer()

    def leave_to_trainer(number: int, frame: FrameType | None) -> None:
        # A trainer that exits ends workers that do not end by themselves, and waits for them.
        if trainer_ends[0]:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    for number in signals:
        signal.signal(number, leave_to_trainer)
    ending = threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True)
    ending.start()


def _flag_of_trainer() -> mmap.mmap:
    """Return the flag of the process that has started this one, by fork or otherwise."""
    trainer = multiprocessing.parent_process()
    if trainer is None or not _INHERITED.startswith(f"/proc/{trainer.pid}/"):
        return _ends
    file = os.open(_INHERITED, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(file, mmap.PAGESIZE)
    finally:
        os.close(file)


def _end_with(trainer: int) -> None:
    while os.getppid() == trainer:
        time.sleep(_LOOK_S)
    os._exit(1)


def _note_exit(process: int) -> None:
    # Also a fork runs this that ends by itself.
    if os.getpid() == process:
        _ends[0] = 1


atexit.register(_note_exit, os.getpid())
