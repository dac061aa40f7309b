"""Reads the pickle of a checkpoint's metadata, without Python's unpickler.

Anybody who may write to shared storage may forge ``.metadata``. Python's unpickler can be made to
change a class of the process, to take memory that no file is worth, or to run out of C stack; the
reader here takes the instructions that picklers write, and makes nothing but plain values and
torch's descriptions of a checkpoint, field by field.
"""

from __future__ import annotations

import enum
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PosixPath, PurePosixPath
from struct import unpack_from
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from localckpt.errors import CheckpointingException, CorruptShardError, UnsafeGlobalError
from localckpt.global_tier.metadata_checks import require_sound
from localckpt.global_tier.torch_dcp import MemoryFormat, StorageInfo
from localckpt.state_dict.garbage import collection_paused
from localckpt.state_dict.safe_globals import SafeGlobals

__all__ = ["read_metadata"]

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
# Their hashes take no recursion, and no time that a file may choose.
_KEYS = frozenset({str, int, float, bool, bytes, _NOTHING, MetadataIndex, torch.Size})

_MARK = pickle.MARK[0]
_STOP = pickle.STOP[0]
_NONE = pickle.NONE[0]
_NEWTRUE = pickle.NEWTRUE[0]
_NEWFALSE = pickle.NEWFALSE[0]
_BININT = pickle.BININT[0]
_BININT1 = pickle.BININT1[0]
_BININT2 = pickle.BININT2[0]
_LONG1 = pickle.LONG1[0]
_BINFLOAT = pickle.BINFLOAT[0]
_BINUNICODE = pickle.BINUNICODE[0]
_SHORT_BINUNICODE = pickle.SHORT_BINUNICODE[0]
_BINBYTES = pickle.BINBYTES[0]
_SHORT_BINBYTES = pickle.SHORT_BINBYTES[0]
_PROTO = pickle.PROTO[0]
_FRAME = pickle.FRAME[0]
_EMPTY_DICT = pickle.EMPTY_DICT[0]
_EMPTY_LIST = pickle.EMPTY_LIST[0]
_EMPTY_TUPLE = pickle.EMPTY_TUPLE[0]
_EMPTY_SET = pickle.EMPTY_SET[0]
_SETITEM = pickle.SETITEM[0]
_SETITEMS = pickle.SETITEMS[0]
_APPEND = pickle.APPEND[0]
_APPENDS = pickle.APPENDS[0]
_ADDITEMS = pickle.ADDITEMS[0]
_FROZENSET = pickle.FROZENSET[0]
_TUPLE = pickle.TUPLE[0]
_TUPLE1 = pickle.TUPLE1[0]
_TUPLE2 = pickle.TUPLE2[0]
_TUPLE3 = pickle.TUPLE3[0]
_MEMOIZE = pickle.MEMOIZE[0]
_BINPUT = pickle.BINPUT[0]
_LONG_BINPUT = pickle.LONG_BINPUT[0]
_BINGET = pickle.BINGET[0]
_LONG_BINGET = pickle.LONG_BINGET[0]
_GLOBAL = pickle.GLOBAL[0]
_STACK_GLOBAL = pickle.STACK_GLOBAL[0]
_NEWOBJ = pickle.NEWOBJ[0]
_REDUCE = pickle.REDUCE[0]
_BUILD = pickle.BUILD[0]


def read_metadata(data: bytes, allowed: SafeGlobals) -> Metadata:
    """Read and check what torch pickled.

    Args:
        data: The pickle.
        allowed: Names the classes that the user allows beside torch's; these are called as any
            unpickler calls them.

    Raises:
        UnsafeGlobalError: It names a class or function that is not allowed.
        CorruptShardError: It is damaged, or no pickler of metadata wrote it.
    """
    try:
        with collection_paused():
            return require_sound(_Reader(data, allowed).read())
    except CheckpointingException:
        raise
    except Exception as error:
        # Damage can end anywhere; the caller needs to know only that it is damage.
        raise CorruptShardError(f"{type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class _Name:
    """A class or function that the pickle names.

    Attributes:
        kind: Of what objects may be made without calling it.
        make: What calling it does here.
    """

    kind: type | None = None
    make: Callable[..., Any] | None = None


class _Reader:
    """One pass over the instructions of a pickle.

    Args:
        data: The pickle.
        allowed: As for :func:`read_metadata`.
    """

    def __init__(self, data: bytes, allowed: SafeGlobals) -> None:
        self._data = data
        self._allowed = allowed
        # Objects that have been made, and not yet given their state, by id; the stack or the memo
        # of the pass keeps them alive.
        self._unbuilt: dict[int, Any] = {}

    def read(self) -> Any:
        """Carry out the instructions; returns the value of the pickle."""
        data = self._data
        stack: list[Any] = []
        marks: list[int] = []
        memo: list[Any] = []
        push, pop = stack.append, stack.pop
        at = 0
        # The most frequent come first.
        while True:
            op = data[at]
            at += 1
            if op == _MEMOIZE:
                memo.append(stack[-1])
            elif op == _BINGET:
                push(memo[data[at]])
                at += 1
            elif op == _LONG_BINGET:
                push(memo[int.from_bytes(data[at : at + 4], "little")])
                at += 4
            elif op == _BININT1:
                push(data[at])
                at += 1
            elif op == _BININT2:
                push(int.from_bytes(data[at : at + 2], "little"))
                at += 2
            elif op == _TUPLE1:
                stack[-1:] = [(stack[-1],)]
            elif op == _TUPLE2:
                stack[-2:] = [(stack[-2], stack[-1])]
            elif op == _REDUCE:
                args = pop()
                stack[-1] = self._call(stack[-1], args)
            elif op == _MARK:
                marks.append(len(stack))
            elif op == _SETITEMS:
                start = marks.pop()
                _put(stack[start - 1], stack[start::2], stack[start + 1 :: 2])
                del stack[start:]
            elif op == _EMPTY_DICT:
                push({})
            elif op == _EMPTY_TUPLE:
                push(())
            elif op == _NEWOBJ:
                args = pop()
                stack[-1] = self._new(stack[-1], args)
            elif op == _BUILD:
                state = pop()
                self._build(stack[-1], state)
            elif op == _APPENDS:
                start = marks.pop()
                _list(stack[start - 1]).extend(stack[start:])
                del stack[start:]
            elif op == _SHORT_BINUNICODE:
                start, at = at + 1, at + 1 + data[at]
                push(data[start:at].decode("utf-8", "surrogatepass"))
            elif op == _NONE:
                push(None)
            elif op == _NEWFALSE:
                push(False)
            elif op == _NEWTRUE:
                push(True)
            elif op == _TUPLE:
                start = marks.pop()
                stack[start:] = [tuple(stack[start:])]
            elif op == _TUPLE3:
                stack[-3:] = [(stack[-3], stack[-2], stack[-1])]
            elif op == _BININT:
                push(int.from_bytes(data[at : at + 4], "little", signed=True))
                at += 4
            elif op == _APPEND:
                item = pop()
                _list(stack[-1]).append(item)
            elif op in (_BINPUT, _LONG_BINPUT):
                nbytes = 1 if op == _BINPUT else 4
                if int.from_bytes(data[at : at + nbytes], "little") != len(memo):
                    raise CorruptShardError("it remembers values in an order that no pickler has")
                memo.append(stack[-1])
                at += nbytes
            elif op == _EMPTY_LIST:
                push([])
            elif op == _LONG1:
                start, at = at + 1, at + 1 + data[at]
                push(int.from_bytes(data[start:at], "little", signed=True))
            elif op == _BINUNICODE:
                start = at + 4
                at = start + int.from_bytes(data[at:start], "little")
                push(data[start:at].decode("utf-8", "surrogatepass"))
            elif op == _STACK_GLOBAL:
                name = pop()
                stack[-1] = self._named(stack[-1], name)
            elif op == _GLOBAL:
                middle = data.index(b"\n", at)
                end = data.index(b"\n", middle + 1)
                push(self._named(data[at:middle].decode(), data[middle + 1 : end].decode()))
                at = end + 1
            elif op == _SETITEM:
                value, key = pop(), pop()
                _put(stack[-1], [key], [value])
            elif op == _BINFLOAT:
                push(unpack_from(">d", data, at)[0])
                at += 8
            elif op == _SHORT_BINBYTES:
                start, at = at + 1, at + 1 + data[at]
                push(data[start:at])
            elif op == _BINBYTES:
                start = at + 4
                at = start + int.from_bytes(data[at:start], "little")
                push(data[start:at])
            elif op == _EMPTY_SET:
                push(set())
            elif op == _ADDITEMS:
                start = marks.pop()
                set.update(stack[start - 1], map(_key, stack[start:]))
                del stack[start:]
            elif op == _FROZENSET:
                start = marks.pop()
                stack[start:] = [frozenset(map(_key, stack[start:]))]
            elif op == _FRAME:
                # How much a reader should read at once; all of it is here.
                at += 8
            elif op == _PROTO:
                at += 1
            elif op == _STOP:
                (value,) = stack
                return value
            else:
                raise CorruptShardError(f"no pickler of metadata writes the instruction {op:#x}")

    def _named(self, module: str, name: str) -> Any:
        """The constant, class or function that the pickle names."""
        full_name = f"{module}.{name}"
        if full_name in _NAMES:
            return _NAMES[full_name]
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        found = self._allowed.added(module, name)
        if found is None:
            raise UnsafeGlobalError(
                f"the metadata of the checkpoint refers to {full_name}, which may not be loaded "
                f"from a file. If you trust it, pass safe_globals=[{name}], or call "
                f"torch.serialization.add_safe_globals([{name}])"
            )
        return _Name(found if isinstance(found, type) else None, found)

    def _call(self, target: Any, args: Any) -> Any:
        if type(target) is not _Name or target.make is None or type(args) is not tuple:
            raise CorruptShardError("it calls what is no class or function")
        made = target.make(*args)
        if target.kind is not None and not isinstance(made, enum.Enum):
            self._unbuilt[id(made)] = made
        return made

    def _new(self, target: Any, args: Any) -> Any:
        if type(target) is not _Name or target.kind is None or type(args) is not tuple:
            raise CorruptShardError("it makes an object of what is no class")
        made = target.kind.__new__(target.kind, *args)
        self._unbuilt[id(made)] = made
        return made

    def _build(self, made: Any, state: Any) -> None:
        if self._unbuilt.pop(id(made), None) is None:
            # It is a class of this process, an object that others share, or one with a state.
            raise CorruptShardError("it gives a state to what it has not made")
        kind = type(made)
        if kind in _FIELDS:
            fields = _FIELDS[kind]
            for name, value in _dict(state).items():
                if type(name) is not str or type(value) not in fields.get(name, _PLAIN):
                    raise CorruptShardError(
                        f"{name!r:.100} of a {kind.__name__} is a {type(value).__name__}"
                    )
            made.__dict__.update(state)
        elif kind is TensorProperties:
            made.__setstate__(_properties(state))
        elif hasattr(made, "__setstate__"):
            made.__setstate__(state)
        else:
            made.__dict__.update(_dict(state))


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


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise CorruptShardError("it appends to what is no list")
    return value


def _dict(value: Any) -> dict[Any, Any]:
    if type(value) is not dict:
        raise CorruptShardError("a dict is missing")
    return value


def _put(target: Any, keys: list[Any], values: list[Any]) -> None:
    if type(target) is not dict and type(target) is not OrderedDict:
        raise CorruptShardError("it puts items into what is no dict")
    target.update(zip(map(_key, keys), values, strict=True))


def _key(value: Any) -> Any:
    if type(value) in _KEYS:
        return value
    if type(value) is tuple and all(type(item) in _KEYS for item in value):
        return value
    raise CorruptShardError(f"a {type(value).__name__} is a key, or a member of a set")


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
