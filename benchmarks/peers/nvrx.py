"""NVIDIA Resiliency Extension's LocalCheckpointManager, made to run without a GPU.

It calls CUDA for what it does with GPU tensors. Here those calls are replaced from outside: there
is nothing to synchronise with, and the copy to the host is a copy into new memory.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from benchmarks.peers.base import Peer, join_group_of_one

__all__ = ["NvrxLocal"]

_PACKAGE = "nvidia_resiliency_ext.checkpointing"


class NvrxLocal(Peer):
    """Its persistent worker process writes; ``torch.save`` format."""

    behind = True
    note = "CUDA calls replaced from outside; new tensors, then copied; fsync by the harness"

    def __init__(self, directory: Path, state: dict[str, Any]) -> None:
        super().__init__(directory, state)
        join_group_of_one(directory)
        torch.cuda.synchronize = lambda device=None: None
        # It asks where to put the tensors of its collectives.
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
        managers = import_module(f"{_PACKAGE}.local.ckpt_managers.local_manager")
        core = import_module(f"{_PACKAGE}.async_ckpt.core")
        self._manager = managers.LocalCheckpointManager(directory)
        self._queue = core.AsyncCallsQueue()
        basic = import_module(f"{_PACKAGE}.local.basic_state_dict")
        self._aware = _without_gpu(basic.BasicTensorAwareStateDict, basic.dict_list_map_inplace)

    def start(self) -> None:
        # It replaces the tensors of what it is given, so it is given containers of its own.
        aware = self._aware(tree_map(lambda leaf: leaf, self.state))
        self.saves += 1
        request = self._manager.save(aware, self.saves, is_async=True)
        self._queue.schedule_async_request(request)

    def done(self) -> bool:
        self._queue.maybe_finalize_async_calls(blocking=False)
        return not self._queue.get_num_unfinalized_calls()

    def finish(self) -> None:
        self._queue.maybe_finalize_async_calls(blocking=True)

    def load(self) -> None:
        if self._manager.find_latest() != self.saves:
            raise RuntimeError("the newest save was not found")
        loaded = self._manager.load()[0]
        sources = self._aware(self.state).tensors, loaded.tensors
        for target, source in zip(*sources, strict=True):
            target.copy_(source)

    def retire(self) -> None:
        """The manager removes what is old by itself, in a thread."""

    def close(self) -> None:
        self._queue.close()
        dist.destroy_process_group()


def _without_gpu(aware: Any, map_inplace: Any) -> Any:
    """Its state dict class, changed in this process where it wants tensors on a GPU.

    A subclass would not do: the worker process has to find the class by its name.
    """

    def init(self: Any, state_dict: dict[str, Any]) -> None:
        self.state_dict = state_dict
        self._is_hollow = False

    def copy_tensors_to_cpu(self: Any, non_blocking: bool = False) -> None:
        map_inplace(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, self.state_dict)

    aware.__init__ = init
    aware.copy_tensors_to_cpu = copy_tensors_to_cpu
    aware.restore_tensor_device = lambda self, non_blocking=True: None
    return aware
