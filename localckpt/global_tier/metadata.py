"""Descriptions of a checkpoint as torch.distributed.checkpoint has them: metadata and plans.

No code is run when they are read, and nothing is made but the classes named here. A release of
torch that renames what it has not made public is met here.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import PosixPath, PurePosixPath
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _metadata_fn
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.filesystem import _StoragePrefix as StoragePrefix
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MemoryFormat
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import _create_write_items as create_write_items
from torch.distributed.checkpoint.storage import WriteResult

from localckpt.errors import (
    CheckpointingException,
    CorruptShardError,
    MismatchError,
    UnsafeGlobalError,
)
from localckpt.global_tier.data_files import file_nbytes
from localckpt.state_dict.boxes import RankSet
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.skeleton import collection_paused
from localckpt.state_dict.unpickler import Unpickler, check_skeleton

__all__ = ["StorageInfo", "StoragePrefix", "create_write_items"]

T = TypeVar("T")

DATA_SUFFIX = DEFAULT_SUFFIX
METADATA_NAME = _metadata_fn

FORMAT_VERSION: str = getattr(filesystem, "CURRENT_DCP_VERSION", "1.0.0")
"""Version of the format. torch writes one since 2.9, and wrote the same format before."""


def pickled_metadata(
    metadata: Metadata, results: Iterable[WriteResult]
) -> tuple[bytes, dict[str, int]]:
    """Pickle what was planned with the places of all items; return also the bytes of each file."""
    metadata.version = FORMAT_VERSION
    metadata.storage_data = {result.index: result.storage_data for result in results}
    ends: dict[str, int] = {}
    for info in metadata.storage_data.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    return pickle.dumps(metadata), {name: file_nbytes(end) for name, end in ends.items()}


class CommonItems(NamedTuple):
    """Items of one rank's plan that a set of ranks has in common."""

    ranks: RankSet
    numbers: tuple[int, ...]


@dataclass
class RankPlan:
    """Items that one rank's image has, with digests of values that other ranks may have, too.

    ``ranks`` are those on which the image says that a part of a global tensor is equal.
    """

    plan: SavePlan
    digests: dict[MetadataIndex, str] = field(default_factory=dict)
    ranks: dict[MetadataIndex, RankSet] = field(default_factory=dict)


_NOTHING = type(None)
# Names of the fields of classes, each with the classes of its values.
_FIELDS: dict[type, dict[str, tuple[type, ...]]] = {
    ChunkStorageMetadata: {"offsets": (torch.Size,), "sizes": (torch.Size,)},
    TensorStorageMetadata: {
        "properties": (TensorProperties,),
        "size": (torch.Size,),
        "chunks": (list,),
    },
    BytesStorageMetadata: {},
    MetadataIndex: {"fqn": (str,), "offset": (torch.Size, _NOTHING), "index": (int, _NOTHING)},
    StorageInfo: {
        "relative_path": (str,),
        "offset": (int,),
        "length": (int,),
        "transform_descriptors": (list, tuple, _NOTHING),
    },
    StorageMeta: {
        "checkpoint_id": (str, PosixPath, PurePosixPath, _NOTHING),
        "save_id": (str, _NOTHING),
        "load_id": (str, _NOTHING),
        "modules": (list,),
    },
}
# Of messages between ranks. torch's store asks nobody who he is, so they are read as a file of a
# stranger is. Planners keep what they like beside the items of a plan.
_MESSAGE_FIELDS: dict[type, dict[str, tuple[type, ...]]] = {
    SavePlan: {"items": (list,)},
    WriteItem: {
        "index": (MetadataIndex,),
        "type": (WriteItemType,),
        "bytes_io_data": (BytesIOWriteData, _NOTHING),
        "tensor_data": (TensorWriteData, _NOTHING),
    },
    WriteItemType: {},
    BytesIOWriteData: {"nbytes": (int,)},
    TensorWriteData: {
        "chunk": (ChunkStorageMetadata,),
        "properties": (TensorProperties,),
        "size": (torch.Size,),
    },
    StoragePrefix: {"prefix": (str,)},
    WriteResult: {
        "index": (MetadataIndex,),
        "size_in_bytes": (int,),
        "storage_data": (StorageInfo,),
    },
    RankPlan: {"plan": (SavePlan,), "digests": (dict,), "ranks": (dict,)},
    RankSet: {"runs": (tuple,)},
    CommonItems: {"ranks": (RankSet,), "numbers": (tuple,)},
}
_PROPERTIES = (torch.dtype, torch.layout, bool, MemoryFormat, bool)
_STRIDES_ARE_KEPT = "strides" in TensorProperties.__dataclass_fields__


class _Properties(TensorProperties):
    """Properties of a tensor that another release of torch may have written."""

    def __setstate__(self, state: Any) -> None:
        if type(state) is not tuple or tuple(map(type, state[: len(_PROPERTIES)])) != _PROPERTIES:
            raise CorruptShardError("the properties of a tensor are none")
        # torch 2.15 adds the strides, or None. A reader has no use for them.
        match state[len(_PROPERTIES) :]:
            case () | (None,):
                pass
            case (tuple(strides),) if set(map(type, strides)) <= {int}:
                pass
            case _:
                raise CorruptShardError("the properties of a tensor are none")
        kept = state if _STRIDES_ARE_KEPT else state[: len(_PROPERTIES)]
        super().__setstate__(kept)  # type: ignore[no-untyped-call]
        self.__class__ = TensorProperties  # type: ignore[assignment]


@collection_paused()
def _read_pickled(data: bytes, allowed: SafeGlobals, kinds: Iterable[type] = ()) -> Any:
    """Read a pickle of descriptions of a checkpoint, or of ``kinds``; no fields are checked yet."""
    names = allowed.also((*_FIELDS, TensorProperties, MemoryFormat, Metadata, *kinds))
    check_skeleton(data, names, tensors=0)

    def find(module: str, name: str) -> Any:
        found = names.find(module, name)
        return _Properties if found is TensorProperties else found

    return Unpickler(io.BytesIO(data), find, lambda _: None).load()


def _require_fields(*values: Any) -> None:
    """Check the classes of the fields of descriptions, and of those inside these."""
    known = {**_FIELDS, **_MESSAGE_FIELDS}
    waiting, seen = list(values), set[int]()
    while waiting:
        value = waiting.pop()
        kind = type(value)
        if kind is list or kind is dict or kind is tuple:
            if id(value) not in seen:
                seen.add(id(value))
                waiting += [*value.keys(), *value.values()] if kind is dict else value
            continue
        for name, kinds in known.get(kind, {}).items():
            field = getattr(value, name)
            if type(field) not in kinds:
                raise CorruptShardError(
                    f"{name!r} of a {kind.__name__} is a {type(field).__name__}"
                )
            waiting.append(field)


def read_metadata(data: bytes, allowed: SafeGlobals) -> Metadata:
    """Read and check what torch pickled; anything else is a CorruptShardError."""
    try:
        return require_sound(_read_pickled(data, allowed))
    except CheckpointingException:
        raise
    except Exception as error:
        # Damage can end anywhere; the caller needs to know only that it is damage.
        raise CorruptShardError(f"{type(error).__name__}: {error}") from error


def require_sound(metadata: Any) -> Metadata:
    """Check what a reader goes by: types, shapes, and where in which file values lie."""
    if not isinstance(metadata, Metadata):
        raise CorruptShardError(f"it is a {type(metadata).__name__}, and describes no checkpoint")
    described, stored = metadata.state_dict_metadata, metadata.storage_data
    meta = metadata.storage_meta
    if type(described) is not dict or type(stored) is not dict:
        raise CorruptShardError("it has no table of values")
    if meta is not None and type(meta) is not StorageMeta:
        raise CorruptShardError("what it says of the storage is nothing")
    _require_fields(described, stored, meta)
    for name, value in described.items():
        if type(name) is not str:
            raise CorruptShardError(f"a value is named {name!r:.100}")
        if type(value) is TensorStorageMetadata:
            _check_tensor(name, value)
        elif type(value) is not BytesStorageMetadata:
            raise CorruptShardError(f"{name:.100} is described by a {type(value).__name__}")
    for index, info in stored.items():
        if type(index) is not MetadataIndex or type(info) is not StorageInfo:
            raise CorruptShardError("where a value lies is not said as it should be")
        if info.offset < 0 or info.length < 0:
            raise CorruptShardError(f"{index.fqn:.100} lies at {info.offset}+{info.length}")
    for path in {info.relative_path for info in stored.values()}:
        parts = PurePosixPath(path).parts
        if not parts or parts[0] == "/" or ".." in parts or "\0" in path:
            raise CorruptShardError(
                f"values lie in {path!r:.200}, which is outside of its directory"
            )
    return metadata


def _check_tensor(name: str, value: TensorStorageMetadata) -> None:
    size = value.size
    # An object that the pickle made and gave no state lacks its fields: an AttributeError.
    if not isinstance(value.properties.dtype, torch.dtype):
        raise CorruptShardError(f"{name:.100} has no dtype")
    if min(size, default=0) < 0:
        raise CorruptShardError(f"a size is {tuple(size)!r:.100}")
    for chunk in value.chunks:
        if type(chunk) is not ChunkStorageMetadata:
            raise CorruptShardError(f"a part of {name:.100} is a {type(chunk).__name__}")
        offsets, sizes = chunk.offsets, chunk.sizes
        if not len(offsets) == len(sizes) == len(size):
            raise CorruptShardError(f"a part of {name:.100} has another number of dimensions")
        for offset, length, whole in zip(offsets, sizes, size, strict=True):
            if min(offset, length) < 0 or offset + length > whole:
                raise CorruptShardError(
                    f"a part of {name:.100} at {tuple(offsets)!r:.100} of shape "
                    f"{tuple(sizes)!r:.100} is outside of it"
                )


def pack(value: Any) -> bytes:
    """Pickle what :func:`unpack` reads."""
    with collection_paused():
        return pickle.dumps(value, protocol=4)


def unpack(data: bytes, kind: type[T], allowed: SafeGlobals) -> T:
    """Read what another rank has packed; plans have items, and files in their own directory."""
    cause: Exception | None = None
    try:
        value = _read_pickled(data, allowed, _MESSAGE_FIELDS)
        _require_fields(value)
        if (why := _why_foreign(value, kind)) is None:
            return value  # type: ignore[no-any-return]
    except UnsafeGlobalError:
        raise
    except Exception as error:  # noqa: BLE001 - raised below
        why, cause = f"{type(error).__name__}: {error}", error
    raise MismatchError(
        f"a plan that came by the job's store is none that a rank sends ({why}). Does another "
        f"program write to that store? Nothing was saved, and what was saved before stands"
    ) from cause


def _why_foreign(value: Any, kind: type) -> str | None:
    if type(value) is not kind:
        return f"a {type(value).__name__} in place of a {kind.__name__}"
    if isinstance(value, list):
        are_results = all(type(result) is WriteResult for result in value)
        return None if are_results else "its results are none"
    if isinstance(value, tuple):
        # A plan, and the items that other ranks plan, too.
        value, common = value
        if type(common) is not dict:
            return "its common items are none"
    for part in value.values() if isinstance(value, dict) else [value]:
        plan: Any = part.plan if isinstance(part, RankPlan) else part
        if not isinstance(plan, SavePlan) or any(type(i) is not WriteItem for i in plan.items):
            return "its items are none"
        # Each rank writes the files that its plan names.
        prefix = plan.storage_data.prefix if isinstance(plan.storage_data, StoragePrefix) else ""
        if "/" in prefix or "\0" in prefix:
            return f"files named {prefix!r:.100}"
    return None
