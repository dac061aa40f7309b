"""localckpt with either worker and its global tier, used as a training loop uses them."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import localckpt
from benchmarks.peers.base import Peer
from localckpt.global_tier.folders import folders_in, remove
from localckpt.global_tier.places import FilePlace

__all__ = ["OursDrain", "OursGlobal", "OursPacedDrain", "OursThread"]

_TRAINING_S = 8.0


class OursThread(Peer):
    """Written by a thread of the trainer."""

    behind = True
    in_place = True
    note = "warm_up before the first save; every block verified in loads"

    def __init__(self, directory: Path, state: dict[str, Any]) -> None:
        super().__init__(directory, state)
        self._manager = localckpt.LocalCheckpointManager(directory)
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
        for folder in folders_in(FilePlace(self.directory))[0][1:]:
            remove(folder)

    def close(self) -> None:
        self._manager.close()


class OursDrain(Peer):
    """A checkpoint that the node has, drained to shared storage; saving it there is not timed."""

    behind = True
    in_place = True
    note = "promote() of a checkpoint that is complete on the node; fsyncs by itself"
    rate_limit: ClassVar[float | None] = None

    def __init__(self, directory: Path, state: dict[str, Any]) -> None:
        super().__init__(directory, state)
        self._nodes = localckpt.LocalCheckpointManager(directory / "node", keep_last=1)
        self._shared = localckpt.GlobalCheckpointManager(directory / "shared", local=self._nodes)
        self._queue = localckpt.AsyncCallsQueue()

    def prepare(self) -> None:
        self._save_on_node()

    def _save_on_node(self) -> None:
        self.saves += 1
        self._nodes.save(self.state, self.saves)

    def start(self) -> None:
        request = self._nodes.promote(self.saves, to=self._shared, rate_limit=self.rate_limit)
        self._queue.schedule_async_request(request)

    def done(self) -> bool:
        self._queue.maybe_finalize_async_calls()
        return not self._queue.get_num_unfinalized_calls()

    def finish(self) -> None:
        self._queue.wait_until_finished()

    def load(self) -> None:
        self._shared.load(into=self.state)

    def files(self) -> list[Path]:
        return list((self.directory / "shared").rglob("*.distcp"))

    def retire(self) -> None:
        for folder in folders_in(FilePlace(self.directory / "shared"))[0][1:]:
            remove(folder)
        self._save_on_node()

    def close(self) -> None:
        self._queue.close()
        self._shared.close()
        self._nodes.close()


class OursPacedDrain(OursDrain):
    """The same at a bounded rate."""

    note = "the same with rate_limit=200e6"
    rate_limit = 200e6
