"""NVRx's and Megatron-Core's global save, with the arguments that theirs has.

The functions take what the releases of both have passed so far. What those arguments ask for is
either done anyway or refused.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner

from localckpt.errors import CheckpointingException
from localckpt.global_tier.save import save_state_dict_async_plan as _plan
from localckpt.global_tier.save_plan import PlanCache
from localckpt.global_tier.storage_reader import CachedMetadataFileSystemReader as _Reader
from localckpt.global_tier.storage_writer import FileSystemWriterAsync as _Writer

__all__ = [
    "CachedMetadataFileSystemReader",
    "CheckpointMetadataCache",
    "FileSystemWriterAsync",
    "get_write_results_queue",
    "save_state_dict_async_plan",
]

_NOT_GIVEN: Any = object()


class FileSystemWriterAsync(_Writer):
    """Writer of a checkpoint of torch.distributed.checkpoint's format behind training.

    Args:
        path, separation_hint, thread_count, options: As for
            :class:`localckpt.FileSystemWriterAsync`.
        use_msc: Must be false: the Multi-Storage Client is not used.
        is_multiproc_io, use_cached_data_structure, use_cpu_shm_for_gpu_tensors: Accepted. One
            process writes all files of a rank from shared memory of the host, by threads.

    Raises:
        CheckpointingException: ``use_msc`` was asked for.
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
    """Plans of one save, which need not be made again for the next of the same structure."""

    def __init__(self) -> None:
        self.plans = PlanCache()

    def set_cached_global_metadata(self, cached_global_metadata: Metadata) -> None:
        """Do nothing: what is planned anew once after a load costs less than comparing it."""


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
    """Plan a save and prepare this rank's part of it; all ranks call it.

    Args:
        state_dict, storage_writer, process_group, coordinator_rank, planner, timeout_s: As for
            :func:`localckpt.save_state_dict_async_plan`.
        enable_cache: Plan again only what changed since the last save with this cache.
        metadata_cache: The cache; one for saves that follow one another.
        cached_ckpt_structure: Megatron-Core's cached plans; see Returns.
        loaded_all_plans: Accepted: plans of the checkpoint that was loaded.

    Returns:
        What ``save_state_dict_async_finalize`` takes: the writer, the metadata and the ranks. With
        ``cached_ckpt_structure`` given, as Megatron-Core has it: that, two plans and two flags for
        its next save, which say that nothing was cached.
    """
    if enable_cache and metadata_cache is not None:
        storage_writer.plans = metadata_cache.plans
    planned = _plan(
        state_dict, storage_writer, process_group, coordinator_rank, planner, timeout_s=timeout_s
    )
    if cached_ckpt_structure is _NOT_GIVEN:
        return planned
    return planned, None, None, False, False


class CachedMetadataFileSystemReader(_Reader):
    """Reader of a checkpoint of torch.distributed.checkpoint's format.

    Args:
        path, options: As for :class:`localckpt.CachedMetadataFileSystemReader`.
        cache_metadata: Accepted: each reader reads the metadata once.
        share_metadata: Whether one rank reads the metadata for all, which all ask for together.
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
        """Do nothing: nothing is kept between readers."""


_results_queue: None = None


def get_write_results_queue(mp_mode: str = "spawn") -> None:
    """Do nothing: results come back in a file beside the data, so there is no queue to make."""


_get_write_results_queue = get_write_results_queue
