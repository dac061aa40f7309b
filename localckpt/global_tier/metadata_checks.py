"""Checks that a checkpoint's metadata makes sense, before anything is done by it."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from localckpt.errors import CorruptShardError
from localckpt.global_tier.torch_dcp import StorageInfo

__all__ = ["require_sound"]


def require_sound(metadata: Any) -> Metadata:
    """Check what a reader goes by: types, shapes, and where in which file values lie.

    Raises:
        CorruptShardError: It contradicts itself, or leads out of the checkpoint's directory.
    """
    if not isinstance(metadata, Metadata):
        raise CorruptShardError(f"it is a {type(metadata).__name__}, and describes no checkpoint")
    described, stored = metadata.state_dict_metadata, metadata.storage_data
    meta = metadata.storage_meta
    if type(described) is not dict or type(stored) is not dict:
        raise CorruptShardError("it has no table of values")
    if meta is not None and type(meta) is not StorageMeta:
        raise CorruptShardError("what it says of the storage is nothing")
    for name, value in described.items():
        if type(name) is not str:
            raise CorruptShardError(f"a value is named {name!r:.100}")
        if type(value) is TensorStorageMetadata:
            _check_tensor(name, value)
        elif type(value) is not BytesStorageMetadata:
            raise CorruptShardError(f"{name:.100} is described by a {type(value).__name__}")
    paths: set[str] = set()
    for index, info in stored.items():
        if type(index) is not MetadataIndex or type(info) is not StorageInfo:
            raise CorruptShardError("where a value lies is not said as it should be")
        if info.offset < 0 or info.length < 0:
            raise CorruptShardError(f"{index.fqn:.100} lies at {info.offset}+{info.length}")
        if info.relative_path not in paths:
            _check_path(info.relative_path)
            paths.add(info.relative_path)
    return metadata


def _check_tensor(name: str, value: TensorStorageMetadata) -> None:
    size = value.size
    # An object that the pickle made and gave no state lacks its fields: an AttributeError.
    if not isinstance(value.properties.dtype, torch.dtype):
        raise CorruptShardError(f"{name:.100} has no dtype")
    for chunk in value.chunks:
        if type(chunk) is not ChunkStorageMetadata:
            raise CorruptShardError(f"a part of {name:.100} is a {type(chunk).__name__}")
        offsets, sizes = chunk.offsets, chunk.sizes
        if not len(offsets) == len(sizes) == len(size):
            raise CorruptShardError(f"a part of {name:.100} has another number of dimensions")
        for offset, length, whole in zip(offsets, sizes, size, strict=True):
            if offset + length > whole:
                raise CorruptShardError(
                    f"a part of {name:.100} at {tuple(offsets)!r:.100} of shape "
                    f"{tuple(sizes)!r:.100} is outside of it"
                )


def _check_path(path: str) -> None:
    parts = PurePosixPath(path).parts
    if not parts or parts[0] == "/" or ".." in parts or "\0" in path:
        raise CorruptShardError(f"values lie in {path!r:.200}, which is outside of its directory")
