"""NVIDIA Resiliency Extension, made to run without a GPU: its local manager, its writer for DCP.

It calls CUDA for what it does with GPU tensors. Here those calls are replaced from outside: there
is nothing to synchronise with, and the copy to the host is a copy into new memory.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.utils._pytree import tree_map

from benchmarks.peers.base import Peer, join_group_of_one

__all__ = ["NvrxForkingWriter", "NvrxLocal", "NvrxWriter", "replace_cuda", "without_gpu"]

_PACKAGE = "nvidia_resiliency_ext.checkpointing"


class NvrxLocal(Peer):
    """Its persistent worker process writes; ``torch.save`` format."""

    behind = True
    note = "CUDA calls replaced from outside; new tensors, then copied; fsync by the harness"

    def __init__(self, directory: Path, state: dict[str, Any]) -> None:
        super().__init__(directory, state)
        join_group_of_one(directory)
        replace_cuda()
        managers = import_module(f"{_PACKAGE}.local.ckpt_managers.local_manager")
        core = import_module(f"{_PACKAGE}.async_ckpt.core")
        self._manager = managers.LocalCheckpointManager(directory)
        self._queue = core.AsyncCallsQueue()
        basic = import_module(f"{_PACKAGE}.local.basic_state_dict")
        self._aware = without_gpu(basic.BasicTensorAwareStateDict, basic.dict_list_map_inplace)

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


class NvrxWriter(Peer):
    """FileSystemWriterAsync with its queue as it comes: a process that stays copies and writes."""

    behind = True
    in_place = True
    persistent: ClassVar[bool] = True
    note = (
        "CUDA calls replaced from outside, staging by a copy into new memory; the tensors reach "
        "its process in shared memory; enable_cache; fsyncs by itself"
    )

    def __init__(self, directory: Path, state: dict[str, Any]) -> None:
        super().__init__(directory, state)
        join_group_of_one(directory)
        replace_cuda()
        self._core = import_module(f"{_PACKAGE}.async_ckpt.core")
        self._saver = import_module(f"{_PACKAGE}.async_ckpt.state_dict_saver")
        self._queue = self._core.AsyncCallsQueue(persistent=self.persistent)
        self._plans = self._saver.CheckpointMetadataCache()

    def start(self) -> None:
        target = self.next_target()
        target.mkdir()
        writers = import_module(f"{_PACKAGE}.async_ckpt.filesystem_async")
        writer = writers.FileSystemWriterAsync(target, thread_count=2)
        writer.preload_tensors = _preload_by_copy
        planned = self._saver.save_state_dict_async_plan(
            self.state, writer, enable_cache=True, metadata_cache=self._plans
        )
        write, preload, arguments = writer.get_save_function_and_args()
        finalize = partial(self._saver.save_state_dict_async_finalize, *planned)
        self._queue.schedule_async_request(
            self._core.AsyncRequest(write, arguments, [finalize], preload_fn=preload)
        )

    def done(self) -> bool:
        self._queue.maybe_finalize_async_calls(blocking=False)
        return not self._queue.get_num_unfinalized_calls()

    def finish(self) -> None:
        self._queue.maybe_finalize_async_calls(blocking=True)

    def load(self) -> None:
        readers = import_module(f"{_PACKAGE}.async_ckpt.cached_metadata_filesystem_reader")
        reader = readers.CachedMetadataFileSystemReader(self.target)
        load(self.state, storage_reader=reader, no_dist=True)

    def close(self) -> None:
        self._queue.close()
        dist.destroy_process_group()


class NvrxForkingWriter(NvrxWriter):
    """The same with its other queue, which forks a process for each save."""

    persistent = False
    note = (
        "CUDA calls replaced from outside, staging by a copy into new memory; enable_cache; "
        "fsyncs by itself; memory that forks share counts once for each"
    )


def replace_cuda() -> None:
    torch.cuda.synchronize = lambda device=None: None
    # It asks where to put the tensors of its collectives.
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]


def _preload_by_copy(buckets: list[Any], non_blocking: bool) -> list[Any]:
    """Its staging, which would leave tensors that are on the host where training changes them."""
    return [
        (path, key, (others, [(item, tensor.clone()) for item, tensor in tensors]))
        for path, key, (others, tensors) in buckets
    ]


def without_gpu(aware: Any, map_inplace: Any) -> Any:
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
