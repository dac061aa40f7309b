"""torchsnapshot, in the foreground and with ``async_take``."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.peers.base import Peer

__all__ = ["SnapshotAsyncTake", "SnapshotTake"]


class SnapshotTake(Peer):
    """``Snapshot.take``."""

    in_place = True
    note = "fsync by the harness"

    def __init__(self, directory: Path, state: dict[str, Any]) -> None:
        super().__init__(directory, state)
        package = import_module("torchsnapshot")
        self._snapshot = package.Snapshot
        self._app_state = {"state": package.StateDict(**state)}

    def start(self) -> None:
        self._snapshot.take(str(self.next_target()), self._app_state)

    def load(self) -> None:
        self._snapshot(str(self.target)).restore(self._app_state)


class SnapshotAsyncTake(SnapshotTake):
    """``Snapshot.async_take``."""

    behind = True
    _pending: Any = None

    def start(self) -> None:
        self._pending = self._snapshot.async_take(str(self.next_target()), self._app_state)

    def done(self) -> bool:
        return bool(self._pending.done())

    def finish(self) -> None:
        self._pending.wait()
