"""localckpt with either worker and its global tier, used as a training loop uses them."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any, Literal

import localckpt
from benchmarks.peers.base import Peer
from localckpt.global_tier.folders import folders_in
from localckpt.global_tier.removal import remove

__all__ = ["OursGlobal", "OursProcess", "OursThread"]

_TRAINING_S = 8.0


class OursThread(Peer):
    """Written by a thread of the trainer."""

    behind = True
    in_place = True
    note = "warm_up before the first save; every block verified in loads"
    worker: Literal["thread", "process"] = "thread"

    def __init__(self, directory: Path, state: dict[str, Any]) -> None:
        super().__init__(directory, state)
        self._manager = localckpt.LocalCheckpointManager(directory, async_worker=self.worker)
        self._queue = localckpt.AsyncCallsQueue()

    def prepare(self) -> None:
        self._manager.warm_up(self.state)
        # It goes on behind the training that comes before a first save.
        time.sleep(_TRAINING_S)

    def start(self) -> None:
        request = self._manager.save(self.state, self.saves, is_async=True)
        self.saves += 1
        if request is None:
            raise RuntimeError("an asynchronous save gave no request back")
        self._queue.schedule_async_request(request)

    def done(self) -> bool:
        self._queue.maybe_finalize_async_calls(blocking=False)
        return not self._queue.get_num_unfinalized_calls()

    def finish(self) -> None:
        self._queue.maybe_finalize_async_calls(blocking=True)

    def load(self) -> None:
        if self._manager.find_latest() != self.saves - 1:
            raise RuntimeError("the newest save was not found")
        self._manager.load(into=self.state)

    def retire(self) -> None:
        """The manager retires by itself."""

    def close(self) -> None:
        self._queue.close()
        self._manager.close()


class OursProcess(OursThread):
    """Written by a worker process."""

    worker = "process"


class OursGlobal(Peer):
    """A checkpoint of torch.distributed.checkpoint's format, committed by a thread."""

    behind = True
    in_place = True
    note = "GlobalCheckpointManager as it comes; every block verified in loads; fsyncs by itself"

    def __init__(self, directory: Path, state: dict[str, Any]) -> None:
        super().__init__(directory, state)
        self._manager = localckpt.GlobalCheckpointManager(directory)
        self._committed = threading.Event()

    def start(self) -> None:
        self.saves += 1
        self._committed.clear()
        self._manager.save(self.state, self.saves, is_async=True, on_commit=self._committed.set)

    def done(self) -> bool:
        self._manager.check_for_errors()
        return self._committed.is_set()

    def finish(self) -> None:
        self._manager.wait_until_finished()

    def load(self) -> None:
        _, ckpt_id = self._manager.load(into=self.state)
        if ckpt_id.iteration != self.saves:
            raise RuntimeError("the newest save was not found")

    def retire(self) -> None:
        for folder in folders_in(self.directory)[0][1:]:
            remove(folder, by_rename=True)

    def close(self) -> None:
        self._manager.close()
