"""Finds where in a state an object stands, from the state's pickle and a position in it.

The pickle is followed without making any object, so it may name classes that cannot be made. It is
for error messages: slow, and called when something has failed.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["Place", "place_at", "unframed"]

# Attributes of localckpt's own wrapper around a plain state.
_WRAPPER = "state_dict"
_FRAME_NBYTES = 9
_CALLS = frozenset({"REDUCE", "NEWOBJ", "NEWOBJ_EX"})
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_GETS = frozenset({"GET", "BINGET", "LONG_BINGET"})
_PUTS = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})


class Place(NamedTuple):
    """Where an object stands in a state.

    Attributes:
        class_name: Its class, or the function that makes it.
        path: Keys, indices and attributes that lead to it, joined by dots; empty for the state.
    """

    class_name: str
    path: str


@dataclass(slots=True, eq=False)
class _Node:
    """A value that may hold others: a container, or an object."""

    class_name: str
    parent: _Node | None = None
    key: Any = None
    count: int = 0

    def take(self, key: Any, child: Any) -> None:
        """Make ``child`` a part of this value, unless it is a part of another one already."""
        if isinstance(child, _Node) and child.parent is None and child is not self:
            child.parent, child.key = self, key


class _Name(str):
    """The full name of a class or function, as an item of the stack."""

    __slots__ = ()


_MARK = object()


def unframed(pickled: bytes) -> bytes:
    """The same pickle without frames: an unpickler reads it one instruction after the other."""
    parts, start = [], 0
    for opcode, _, position in pickletools.genops(pickled):
        if opcode.name == "FRAME" and position is not None:
            parts.append(pickled[start:position])
            start = position + _FRAME_NBYTES
    return b"".join([*parts, pickled[start:]])


def place_at(pickled: bytes, end: int) -> Place | None:
    """The object that the instruction which ends at byte ``end`` makes or fills.

    Returns:
        ``None`` if no instruction that makes or fills an object ends there.
    """
    wanted: _Node | None = None
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    instructions = list(pickletools.genops(pickled))
    ends = [position for _, _, position in instructions[1:]] + [len(pickled)]
    for (opcode, argument, _), ends_at in zip(instructions, ends, strict=True):
        node = _step(opcode, argument, stack, memo)
        if ends_at == end:
            wanted = node
    if wanted is None:
        return None
    return Place(wanted.class_name, _path_of(wanted))


def _path_of(node: _Node) -> str:
    keys = []
    seen: set[int] = set()
    at: _Node | None = node
    while at is not None and at.parent is not None and id(at) not in seen:
        seen.add(id(at))
        if at.key is not None:
            keys.append(str(at.key))
        at = at.parent
    path = ".".join(reversed(keys))
    return path.removeprefix(f"{_WRAPPER}.") if path != _WRAPPER else ""


def _step(opcode: Any, argument: Any, stack: list[Any], memo: dict[int, Any]) -> _Node | None:
    """Follow one instruction; returns what it makes or fills."""
    name = opcode.name
    if name == "MARK":
        stack.append(_MARK)
    elif name == "MEMOIZE":
        memo[len(memo)] = stack[-1]
    elif name in _PUTS:
        memo[int(argument)] = stack[-1]
    elif name in _GETS:
        stack.append(memo.get(int(argument)))
    elif name == "STACK_GLOBAL":
        attribute, module = stack.pop(), stack.pop()
        stack.append(_Name(f"{module}.{attribute}"))
    elif name == "GLOBAL":
        stack.append(_Name(str(argument).replace(" ", ".")))
    elif name in _CALLS:
        return _call(name, stack)
    elif name == "BUILD":
        # The members of the state become attributes: the dict that holds them has no name.
        state = stack.pop()
        return _fill(stack[-1], [(None, state)])
    elif name in ("SETITEM", "SETITEMS"):
        values = [stack.pop(-2), stack.pop()] if name == "SETITEM" else _to_mark(stack)
        return _fill(stack[-1], list(zip(values[::2], values[1::2], strict=True)))
    elif name in ("APPEND", "APPENDS", "ADDITEMS"):
        values = [stack.pop()] if name == "APPEND" else _to_mark(stack)
        whole = stack[-1]
        first = whole.count if isinstance(whole, _Node) else 0
        return _fill(whole, list(enumerate(values, first)))
    elif name in _TUPLES:
        values = [stack.pop() for _ in range(_TUPLES[name])][::-1]
        stack.append(_made("builtins.tuple", values))
    elif name in ("TUPLE", "LIST", "FROZENSET"):
        stack.append(_made(f"builtins.{name.lower()}", _to_mark(stack)))
    elif name in ("EMPTY_DICT", "EMPTY_LIST", "EMPTY_SET", "EMPTY_TUPLE"):
        stack.append(_Node(f"builtins.{name.removeprefix('EMPTY_').lower()}"))
    else:
        _others(opcode, argument, stack)
    return None


def _call(name: str, stack: list[Any]) -> _Node:
    keywords = stack.pop() if name == "NEWOBJ_EX" else None
    arguments, called = stack.pop(), stack.pop()
    made = _Node(str(called) if isinstance(called, _Name) else "an object")
    for part in (arguments, keywords):
        # What a function is called with stands at the place of what it makes.
        made.take(None, part)
    stack.append(made)
    return made


def _fill(whole: Any, members: list[tuple[Any, Any]]) -> _Node | None:
    if not isinstance(whole, _Node):
        return None
    for key, child in members:
        whole.take(key, child)
    whole.count += len(members)
    return whole


def _made(class_name: str, values: list[Any]) -> _Node:
    made = _Node(class_name)
    _fill(made, list(enumerate(values)))
    return made


def _others(opcode: Any, argument: Any, stack: list[Any]) -> None:
    """An instruction that makes nothing with members: numbers, text, and what clears the stack."""
    if opcode.name == "DUP":
        stack.append(stack[-1])
        return
    for kind in opcode.stack_before:
        if kind is pickletools.stackslice:
            _to_mark(stack)
        elif kind is not pickletools.markobject and stack:
            stack.pop()
    stack += [argument] * len(opcode.stack_after)


def _to_mark(stack: list[Any]) -> list[Any]:
    values = []
    while stack and (value := stack.pop()) is not _MARK:
        values.append(value)
    return values[::-1]
