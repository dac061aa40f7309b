"""torch.distributed.checkpoint: in the foreground, and its ways to go on behind training."""

from __future__ import annotations

import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed._state_dict_utils import _create_cpu_state_dict
from torch.distributed.checkpoint.staging import (
    AsyncStager,
    BlockingAsyncStager,
    DefaultStager,
    StagingOptions,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
    async_save,
    save,
)

from benchmarks.peers.base import Peer, join_group_of_one

__all__ = ["DcpCached", "DcpProcess", "DcpSave", "DcpThread"]

_WAIT_S = 120.0


class DcpSave(Peer):
    """``dcp.save``."""

    in_place = True
    note = "fsyncs by itself"

    def start(self) -> None:
        save(self.state, checkpoint_id=self.next_target(), no_dist=True)

    def load(self) -> None:
        load(self.state, checkpoint_id=self.target, no_dist=True)


class DcpThread(DcpSave):
    """``dcp.async_save`` as it comes: new staging memory each time, a thread writes."""

    behind = True
    _kind = AsyncCheckpointerType.THREAD
    _stager: AsyncStager | None = None
    _saving: Future[Any] | None = None

    def start(self) -> None:
        saving = async_save(
            self.state,
            checkpoint_id=self.next_target(),
            async_checkpointer_type=self._kind,
            async_stager=self._stager,
        )
        if isinstance(saving, AsyncSaveResponse):
            raise RuntimeError("the stager was asked to stage before async_save returns")
        self._saving = saving

    def done(self) -> bool:
        return self._saving is None or self._saving.done()

    def finish(self) -> None:
        if self._saving is not None:
            self._saving.result(_WAIT_S)

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()


class DcpCached(DcpThread):
    """The same with a stager that keeps its staging memory."""

    note = "BlockingAsyncStager, its cache made by the harness as it pins; fsyncs by itself"

    def __init__(self, directory: Path, state: dict[str, Any]) -> None:
        super().__init__(directory, state)
        stager = BlockingAsyncStager(cache_staged_state_dict=True)
        # What it would make itself is pinned, which only a machine with CUDA can do.
        stager.state_dict_cache = _create_cpu_state_dict(state)
        self._stager = stager


class DcpProcess(DcpThread):
    """A process writes; the stager keeps shared memory, so that the process gets no copy."""

    note = "DefaultStager kept, in shared memory; one-rank gloo group; fsyncs by itself"
    _kind = AsyncCheckpointerType.PROCESS

    def __init__(self, directory: Path, state: dict[str, Any]) -> None:
        super().__init__(directory, state)
        join_group_of_one(directory)
        # Its process meets the trainer under this address.
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        self._stager = DefaultStager(StagingOptions(False, True, False, False))

    def close(self) -> None:
        super().close()
        dist.destroy_process_group()
