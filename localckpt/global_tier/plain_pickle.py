"""Reader of pickles of torch's descriptions of a checkpoint, without Python's unpickler.

Anybody who may write to shared storage may forge ``.metadata``, and anybody who reaches the job's
store what ranks send each other there. Python's unpickler can be made to change a class of the
process, to take memory that no file is worth, or to run out of C stack; the reader here takes the
instructions that picklers write, and makes nothing but plain values and torch's descriptions of a
checkpoint, field by field.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from struct import unpack_from
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from localckpt.errors import CheckpointingException, CorruptShardError
from localckpt.global_tier.metadata import PickledObjects, require_sound
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.skeleton import collection_paused

__all__ = ["read_metadata", "read_plain"]

# Their hashes take no recursion, and no time that a file may choose.
_KEYS = frozenset({str, int, float, bool, bytes, type(None), MetadataIndex, torch.Size})

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
            return require_sound(read_plain(data, PickledObjects(allowed)))
    except CheckpointingException:
        raise
    except Exception as error:
        # Damage can end anywhere; the caller needs to know only that it is damage.
        raise CorruptShardError(f"{type(error).__name__}: {error}") from error


def read_plain(data: bytes, objects: PickledObjects) -> Any:
    """Carry out the instructions of a pickle in one pass; returns its value.

    Raises:
        UnsafeGlobalError, CorruptShardError: As :func:`read_metadata`.
        Exception: It is damaged; damage can end anywhere.
    """
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
            stack[-1] = objects.call(stack[-1], args)
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
            stack[-1] = objects.new(stack[-1], args)
        elif op == _BUILD:
            state = pop()
            objects.build(stack[-1], state)
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
            stack[-1] = objects.named(stack[-1], name)
        elif op == _GLOBAL:
            middle = data.index(b"\n", at)
            end = data.index(b"\n", middle + 1)
            push(objects.named(data[at:middle].decode(), data[middle + 1 : end].decode()))
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


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise CorruptShardError("it appends to what is no list")
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
