"""What of torch.distributed.checkpoint we build on that has no public name, in one place.

The format of a checkpoint and the way of its planners are made of these; a release of torch that
renames one of them is met here.
"""

from __future__ import annotations

from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _metadata_fn
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.filesystem import _StoragePrefix as StoragePrefix
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MemoryFormat
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list as create_chunk_list
from torch.distributed.checkpoint.planner_helpers import _create_read_items as create_read_items

__all__ = [
    "DATA_SUFFIX",
    "FORMAT_VERSION",
    "METADATA_NAME",
    "MemoryFormat",
    "StorageInfo",
    "StoragePrefix",
    "create_chunk_list",
    "create_read_items",
    "format_version",
]

DATA_SUFFIX = DEFAULT_SUFFIX
METADATA_NAME = _metadata_fn

FORMAT_VERSION: str = getattr(filesystem, "CURRENT_DCP_VERSION", "1.0.0")
"""Version of the format. torch writes one since 2.9, and wrote the same format before."""


def format_version(metadata: Metadata) -> str | None:
    """Version of the format of a checkpoint; ``None`` if the release that wrote it had none."""
    return getattr(metadata, "version", None)
