"""Metadata of a checkpoint as torch.distributed.checkpoint has it: what it may hold, and mean.

The format of a checkpoint and the way of its planners are made of names that torch has not made
public; a release of torch that renames one of them is met here.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PosixPath, PurePosixPath
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint._traverse import set_element
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
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list as create_chunk_list
from torch.distributed.checkpoint.planner_helpers import _create_read_items as create_read_items
from torch.distributed.checkpoint.planner_helpers import _create_write_items as create_write_items

from localckpt.errors import CorruptShardError, UnsafeGlobalError
from localckpt.state_dict.safe_globals import SafeGlobals

__all__ = [
    "DATA_SUFFIX",
    "FORMAT_VERSION",
    "METADATA_NAME",
    "PickledObjects",
    "StorageInfo",
    "StoragePrefix",
    "create_chunk_list",
    "create_read_items",
    "create_write_items",
    "format_version",
    "require_sound",
    "set_element",
]

DATA_SUFFIX = DEFAULT_SUFFIX
METADATA_NAME = _metadata_fn

FORMAT_VERSION: str = getattr(filesystem, "CURRENT_DCP_VERSION", "1.0.0")
"""Version of the format. torch writes one since 2.9, and wrote the same format before."""


def format_version(metadata: Metadata) -> str | None:
    """Version of the format of a checkpoint; ``None`` if the release that wrote it had none."""
    return getattr(metadata, "version", None)


_NOTHING = type(None)
# What torch's descriptions hold. A state of TensorProperties is a tuple; in Metadata planners keep
# more than torch does.
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
# What a release of torch may add that is not known here.
_PLAIN = (str, int, float, bool, _NOTHING)
_PROPERTIES = (torch.dtype, torch.layout, bool, MemoryFormat, bool)
_STRIDES_ARE_KEPT = "strides" in TensorProperties.__dataclass_fields__


@dataclass(frozen=True, slots=True)
class _Name:
    """A class or function that the pickle names.

    Attributes:
        kind: Class of the objects that may be made without calling it.
        make: What calling it does here.
    """

    kind: type | None = None
    make: Callable[..., Any] | None = None


class PickledObjects:
    """Objects of one pickle of metadata, made field by field, and no others.

    Args:
        allowed: Names the classes that the user allows beside torch's; these are called as any
            unpickler calls them.
        more: Fields of further classes, each with the classes of its values; ``object`` for any.
            A class that has none is called, as an enumeration is with a value.
    """

    def __init__(
        self,
        allowed: SafeGlobals,
        more: Mapping[type, Mapping[str, tuple[type, ...]]] = MappingProxyType({}),
    ) -> None:
        self._allowed = allowed
        self._fields = {**_FIELDS, **more}
        self._names = _NAMES | {
            _full_name(kind): _Name(kind=kind) if fields else _Name(make=kind)
            for kind, fields in more.items()
        }
        # Objects that have been made, and not yet given their state, by id; the stack or the memo
        # of the reader keeps them alive.
        self._unbuilt: dict[int, Any] = {}

    def named(self, module: str, name: str) -> Any:
        """The constant, class or function that the pickle names."""
        full_name = f"{module}.{name}"
        if full_name in self._names:
            return self._names[full_name]
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        found = self._allowed.added(module, name)
        if found is None:
            raise UnsafeGlobalError(
                f"the metadata of the checkpoint refers to {full_name}, which may not be loaded "
                f"from a file, or from other ranks. If you trust it, pass safe_globals=[{name}], "
                f"or call torch.serialization.add_safe_globals([{name}])"
            )
        return _Name(found if isinstance(found, type) else None, found)

    def call(self, target: Any, args: Any) -> Any:
        if type(target) is not _Name or target.make is None or type(args) is not tuple:
            raise CorruptShardError("it calls what is no class or function")
        made = target.make(*args)
        if target.kind is not None and not isinstance(made, enum.Enum):
            self._unbuilt[id(made)] = made
        return made

    def new(self, target: Any, args: Any) -> Any:
        if type(target) is not _Name or target.kind is None or type(args) is not tuple:
            raise CorruptShardError("it makes an object of what is no class")
        made = target.kind.__new__(target.kind, *args)
        self._unbuilt[id(made)] = made
        return made

    def build(self, made: Any, state: Any) -> None:
        if self._unbuilt.pop(id(made), None) is None:
            # It is a class of this process, an object that others share, or one with a state.
            raise CorruptShardError("it gives a state to what it has not made")
        kind = type(made)
        if kind in self._fields:
            fields = self._fields[kind]
            for name, value in _fields(state).items():
                kinds = fields.get(name, _PLAIN)
                if type(name) is not str or (type(value) not in kinds and object not in kinds):
                    raise CorruptShardError(
                        f"{name!r:.100} of a {kind.__name__} is a {type(value).__name__}"
                    )
            made.__dict__.update(state)
        elif kind is TensorProperties:
            made.__setstate__(_properties(state))
        elif hasattr(made, "__setstate__"):
            made.__setstate__(state)
        else:
            made.__dict__.update(_fields(state))


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


def _properties(state: Any) -> tuple[Any, ...]:
    """The state of TensorProperties, as the installed torch takes it."""
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
    return state if _STRIDES_ARE_KEPT else state[: len(_PROPERTIES)]


def _fields(state: Any) -> dict[Any, Any]:
    if type(state) is not dict:
        raise CorruptShardError("a dict is missing")
    return state


def _size(values: Any) -> torch.Size:
    if type(values) is not tuple or any(type(value) is not int or value < 0 for value in values):
        raise CorruptShardError(f"a size is {values!r:.100}")
    return torch.Size(values)


def _layout(name: Any) -> torch.layout:
    layout = vars(torch).get(name.removeprefix("torch."))
    if not isinstance(layout, torch.layout):
        raise CorruptShardError(f"a layout is {name!r:.100}")
    return layout


def _memory_format(number: Any) -> MemoryFormat:
    if type(number) is not int:
        raise CorruptShardError(f"a memory format is {number!r:.100}")
    return MemoryFormat(number)


def _path(*parts: Any) -> PosixPath:
    if not all(type(part) is str for part in parts):
        raise CorruptShardError("a part of a path is no text")
    return PosixPath(*parts)


def _ordered_dict() -> OrderedDict[Any, Any]:
    # Its items follow.
    return OrderedDict()


def _full_name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


_KINDS = (*_FIELDS, TensorProperties, Metadata)
_NAMES: dict[str, _Name] = {
    **{_full_name(kind): _Name(kind=kind) for kind in _KINDS},
    _full_name(MemoryFormat): _Name(make=_memory_format),
    "torch.Size": _Name(make=_size),
    "torch.serialization._get_layout": _Name(make=_layout),
    "collections.OrderedDict": _Name(make=_ordered_dict),
    # Python 3.13 has them in another module.
    **{f"{home}.PosixPath": _Name(make=_path) for home in ("pathlib", "pathlib._local")},
}
