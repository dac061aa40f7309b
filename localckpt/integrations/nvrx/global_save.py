"""Global save with the signatures of NVRx and Megatron-Core.

The functions accept the arguments that releases of both pass. An argument described as "Accepted"
has no effect, because its purpose is met anyway; an option that is not supported is refused.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner

from localckpt.errors import CheckpointingException
from localckpt.global_tier.save_plan import PlanCache
from localckpt.global_tier.storage_reader import CachedMetadataFileSystemReader as _Reader
from localckpt.global_tier.storage_writer import FileSystemWriterAsync as _Writer
from localckpt.global_tier.storage_writer import save_state_dict_async_finalize as _finalize
from localckpt.global_tier.storage_writer import save_state_dict_async_plan as _plan
from localckpt.integrations.nvrx.queue import also_torchs
from localckpt.ranks.ranks import Ranks

__all__ = [
    "CachedMetadataFileSystemReader",
    "CheckpointMetadataCache",
    "FileSystemWriterAsync",
    "get_write_results_queue",
    "save_state_dict_async_finalize",
    "save_state_dict_async_plan",
]

_NOT_GIVEN: Any = object()


class FileSystemWriterAsync(_Writer):
    """Writer of checkpoints in torch.distributed.checkpoint's format behind training.

    Args:
        path, separation_hint, thread_count, options: As for
            :class:`localckpt.FileSystemWriterAsync`.
        use_msc: Must be false: the Multi-Storage Client is not supported.
        is_multiproc_io, use_cached_data_structure, use_cpu_shm_for_gpu_tensors: Accepted. Threads
            of the trainer write all files of a rank from memory of the host.

    Raises:
        CheckpointingException: ``use_msc`` is true.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        use_msc: bool = False,
        is_multiproc_io: bool = False,
        use_cached_data_structure: bool = False,
        use_cpu_shm_for_gpu_tensors: bool = False,
        **options: Any,
    ) -> None:
        if use_msc:
            raise CheckpointingException(
                f"{path} cannot be written through the Multi-Storage Client: give a directory of "
                f"a file system, or save with Megatron-Core's own writer"
            )
        super().__init__(path, **options)
        self.checkpoint_dir = path


class CheckpointMetadataCache:
    """Cache of the plans of one save for later saves of the same structure."""

    def __init__(self) -> None:
        self.plans = PlanCache()

    def set_cached_global_metadata(self, cached_global_metadata: Metadata) -> None:
        """Do nothing: one new plan after a load costs less than a comparison with the metadata."""


def save_state_dict_async_plan(
    state_dict: dict[str, Any],
    storage_writer: _Writer,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    planner: SavePlanner | None = None,
    enable_cache: bool = False,
    metadata_cache: CheckpointMetadataCache | None = None,
    *,
    cached_ckpt_structure: Any = _NOT_GIVEN,
    loaded_all_plans: Any = None,
    timeout_s: float = 300.0,
) -> tuple[Any, ...]:
    """Plan a save, and prepare this rank's part of it. All ranks call this together.

    Args:
        state_dict, storage_writer, process_group, coordinator_rank, planner, timeout_s: As for
            :func:`localckpt.save_state_dict_async_plan`.
        enable_cache: True to plan again only what changed since the last save with this cache.
        metadata_cache: Cache that consecutive saves share.
        cached_ckpt_structure: Cached plans of Megatron-Core; not used, but see Returns.
        loaded_all_plans: Accepted: plans of the checkpoint that was loaded.

    Returns:
        The arguments of ``save_state_dict_async_finalize``: the writer, the metadata and the ranks.
        If ``cached_ckpt_structure`` is given, a tuple in Megatron-Core's form: these arguments, two
        plans (``None``), and two flags (False) for its next save, since it has nothing to cache.
    """
    if enable_cache and metadata_cache is not None:
        storage_writer.plans = metadata_cache.plans
    with also_torchs():
        planned = _plan(
            *(state_dict, storage_writer, process_group, coordinator_rank, planner),
            timeout_s=timeout_s,
        )
    if cached_ckpt_structure is _NOT_GIVEN:
        return planned
    return planned, None, None, False, False


def save_state_dict_async_finalize(
    storage_writer: _Writer, global_metadata: Metadata | None, dist_wrapper: Ranks
) -> None:
    """As :func:`localckpt.save_state_dict_async_finalize`.

    Raises:
        CheckpointingException: As there, and torch's ``CheckpointException``, too.
    """
    with also_torchs():
        _finalize(storage_writer, global_metadata, dist_wrapper)


class CachedMetadataFileSystemReader(_Reader):
    """Reader of a checkpoint in torch.distributed.checkpoint's format.

    Args:
        path, options: As for :class:`localckpt.CachedMetadataFileSystemReader`.
        cache_metadata: Accepted: each reader reads the metadata once.
        share_metadata: True if one rank reads the metadata for all. All ranks must then read it
            together.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        cache_metadata: bool = True,
        *,
        share_metadata: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(path, share_metadata=share_metadata, **options)

    @classmethod
    def clear_metadata_cache(cls, path: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: readers share no cache."""


_results_queue: None = None


def get_write_results_queue(mp_mode: str = "spawn") -> None:
    """Do nothing: threads of the trainer write, so no queue is needed."""


_get_write_results_queue = get_write_results_queue
