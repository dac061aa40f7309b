"""lm-resiliency's GEMINI: a checkpoint in the node's memory, flushed to its disk."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.peers.base import Peer
from benchmarks.state import state_tensors

__all__ = ["Gemini"]


class Gemini(Peer):
    """Each save is flushed at once, since only that is durable."""

    behind = True
    note = "save + flush_to_disk, which clones; new tensors, then copied; fsyncs by itself"

    def __init__(self, directory: Path, state: dict[str, Any]) -> None:
        super().__init__(directory, state)
        self._package = import_module("lm_resiliency.checkpointing")
        self._manager = self._make_manager()

    def _make_manager(self) -> Any:
        config = self._package.InMemoryCkptConfig(
            interval=1,
            disk_flush_interval=0,
            disk_folder=str(self.directory),
            run_id="benchmark",
            pin_memory=False,
        )
        return self._package.InMemoryCheckpointManager(config)

    def start(self) -> None:
        self.saves += 1
        self._manager.save(self.state, self.saves)
        self._manager.maybe_wait()
        self._manager.flush_to_disk(self.saves)

    def done(self) -> bool:
        return bool(self._manager._disk.latest_flushed_step >= self.saves)

    def finish(self) -> None:
        self._manager._disk.wait()

    def load(self) -> None:
        # What a manager holds in memory is lost with its process, so a new one has to read.
        manager = self._make_manager()
        loaded, step = manager.load()
        manager.close()
        if step != self.saves:
            raise RuntimeError(f"step {step} was loaded instead of {self.saves}")
        for target, source in zip(state_tensors(self.state), state_tensors(loaded), strict=True):
            target.copy_(source)

    def retire(self) -> None:
        self._manager._disk.cleanup_older_than(self.saves)

    def close(self) -> None:
        self._manager.close()
