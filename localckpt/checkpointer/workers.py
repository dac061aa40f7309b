"""Workers of data loaders: processes that a signal to stop the job reaches as well."""

from __future__ import annotations

import atexit
import logging
import multiprocessing.util
import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

_LOOK_S = 0.5
# Name of the process of a worker, by which its trainer knows that signals do not end it.
_NAME = "localckpt-data"


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
    try:
        Path("/proc/self/comm").write_text(_NAME)
    except OSError as error:
        # At its exit the trainer would wait for a worker that no signal ends.
        logger.warning(
            "a signal ends this worker of a data loader, since it has no name: %s", error
        )
    else:
        for number in signals:
            # A program that is started has no handlers, and would ignore what is ignored here.
            signal.signal(number, lambda *_: None)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


def _end_with(trainer: int) -> None:
    while os.getppid() == trainer:
        time.sleep(_LOOK_S)
    os._exit(1)


def _end_workers(trainer: int) -> None:
    """End the workers of a trainer that exits, which sends them SIGTERM and waits for them."""
    # Also a fork runs this that ends by itself.
    for process in multiprocessing.active_children() if os.getpid() == trainer else ():
        with suppress(OSError):
            if Path(f"/proc/{process.pid}/comm").read_text().strip() == _NAME:
                process.kill()


# It runs before the exit function of multiprocessing, which was registered by the import above.
atexit.register(_end_workers, os.getpid())
