"""torch_checkpointing's CheckpointManager, configured as its authors say for CPU tensors."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.peers.base import Peer

__all__ = ["TorchCheckpointing"]

_WAIT_S = 120.0


class TorchCheckpointing(Peer):
    """A process of its own writes, out of shared memory."""

    behind = True
    in_place = True
    note = (
        "set to stage before save returns and to buffered writes (ext4 refuses its O_DIRECT ones); "
        "prewarm_staging before the first save; fsync by the harness"
    )
    _writing: Any = None

    def __init__(self, directory: Path, state: dict[str, Any]) -> None:
        super().__init__(directory, state)
        package = import_module("torch_checkpointing")
        config = import_module("torch_checkpointing.config")
        staging = import_module("torch_checkpointing.staging").CheckpointStagerConfig(
            use_pinned_memory=False,
            use_shared_memory=True,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
        saving = config.AsyncCheckpointSaverConfig(staging_config=staging)
        # Its O_DIRECT stream ends every file with a write of odd length, which ext4 refuses.
        storage = import_module("torch_checkpointing.storage.filesystem")
        self._manager = package.CheckpointManager(
            package.CheckpointManager.Config(
                save=saving,
                storage_config=storage.LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )

    def prepare(self) -> None:
        self._manager.prewarm_staging(self.state)

    def start(self) -> None:
        self._writing = self._manager.save(str(self.next_target()), self.state)

    def done(self) -> bool:
        return bool(self._writing.done())

    def finish(self) -> None:
        self._writing.result(_WAIT_S)

    def load(self) -> None:
        self._manager.load(str(self.target), into=self.state)

    def close(self) -> None:
        self._manager.close()
