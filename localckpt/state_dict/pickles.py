"""Checks of pickles that make none of the objects in them.

``check_opcodes`` runs before a pickle is read, and refuses one that would take unbounded memory or
stack. Most instructions of a pickle are harmless. A regular expression skips runs of them, so the
check takes less time than reading the pickle, and training can wait for it.

``place_at`` finds the place of an object in a state for error messages. It is slow, and called only
after a failure.
"""

from __future__ import annotations

import pickletools
import re
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from localckpt.errors import CorruptShardError

MAX_DEPTH = 10_000
"""Limit of the depth of tuples in tuples, since C hashes them by an unlimited recursion."""

# Alternatives for texts and numbers of 0 to 63 bytes: a length byte, then as many bytes.
_SHORT = b"|".join(b"\\x%02x.{%d}" % (n, n) for n in range(64))
# No pickler of protocol 2 and later writes DUP, by which few bytes make a tuple whose hash takes
# for ever, nor the instructions of earlier protocols.
_NO_ARGUMENT = rb"01()NRQ\]}abesu\x81\x88\x89\x8f\x90\x92-\x94"
_NESTING = rb"t\x85-\x87\x91"
_HARMLESS, _HARMLESS_OR_NESTING = (
    re.compile(
        rb"(?:[%b]|[Kh\x80].|M..|[Jj].{4}|[G\x95].{8}|[\x8c\x8a](?:%b))*+" % (plain, _SHORT),
        re.DOTALL,
    )
    for plain in (_NO_ARGUMENT, _NO_ARGUMENT + _NESTING)
)
_STOP = ord(".")
_NESTING_CODES = frozenset(b"t\x85\x86\x87\x91")
# Encoding of the length in front of an instruction's argument.
_LENGTHS = {
    **dict.fromkeys(b"C\x8c\x8a", struct.Struct("<B")),
    **dict.fromkeys(b"XB\x8b", struct.Struct("<i")),
    **dict.fromkeys(b"\x8d\x8e\x96", struct.Struct("<q")),
}
_GLOBAL = ord("c")
_PUTS = {ord("q"): struct.Struct("<B"), ord("r"): struct.Struct("<I")}


def check_opcodes(skeleton: bytes, *, depth_is_limited: bool = False) -> None:
    """Check each instruction of a pickle, whose pickler may fail before :data:`MAX_DEPTH`."""
    # Some of these bytes are no instructions, so at most this many are.
    most_nested = sum(skeleton.count(code) for code in _NESTING_CODES)
    is_flat = depth_is_limited or most_nested <= MAX_DEPTH
    try:
        nested = _check(skeleton, _HARMLESS_OR_NESTING if is_flat else _HARMLESS)
        too_deep = nested > MAX_DEPTH and _depth(skeleton) > MAX_DEPTH
    except (struct.error, IndexError, ValueError) as error:
        raise CorruptShardError(f"the pickle cannot be read: {error!r}") from error
    if too_deep:
        raise CorruptShardError("the pickle holds tuples in tuples without end")


def _check(pickle: bytes, harmless: re.Pattern[bytes]) -> int:
    """Check the instructions that ``harmless`` does not skip; count those that make tuples."""
    position, nested, puts = 0, 0, 0
    while True:
        # Never None: the pattern also matches the empty text.
        position = cast("re.Match[bytes]", harmless.match(pickle, position)).end()
        code = pickle[position]
        position += 1
        if code in _NESTING_CODES:
            nested += 1
        elif code in _LENGTHS:
            (nbytes,) = _LENGTHS[code].unpack_from(pickle, position)
            position += _LENGTHS[code].size + int(nbytes)
            if nbytes < 0 or position > len(pickle):
                raise CorruptShardError(f"the pickle has a value of {nbytes} bytes")
        elif code == _STOP:
            return nested
        elif code in _PUTS:
            (number,) = _PUTS[code].unpack_from(pickle, position)
            position += _PUTS[code].size
            # An unpickler allocates its memo up to the largest number. Picklers count from 0.
            if number > puts:
                raise CorruptShardError(f"the pickle remembers {number} values")
            puts += 1
        elif code == _GLOBAL:
            # The names of a module and of what is in it, each to the end of a line.
            position = pickle.index(b"\n", pickle.index(b"\n", position) + 1) + 1
        else:
            raise CorruptShardError(f"the pickle has an unknown instruction {code:#04x}")


_MADE_OF_OTHERS = frozenset(
    {
        *("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "FROZENSET"),
        *("REDUCE", "NEWOBJ", "NEWOBJ_EX"),
    }
)
_FILLS = frozenset({"BUILD", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS"})


def _depth(pickle: bytes) -> int:
    """Return the greatest nesting depth of tuples, frozen sets and objects.

    The depth starts again at 0 inside lists, dicts and sets, which cannot be hashed.
    """

    def depth(name: str, _: Any, parts: list[int]) -> int:
        if name in _FILLS:
            return parts[0]
        return 1 + max(parts, default=0) if name in _MADE_OF_OTHERS else 0

    return max((made for _, made in _follow(pickle, depth, unknown=0)), default=0)


def _follow(
    pickled: bytes, make: Callable[[str, Any, list[Any]], Any], unknown: Any = None
) -> Iterator[tuple[int, Any]]:
    """Interpret a pickle's instructions with a stand-in for each value.

    Args:
        make: Returns the stand-in of the value that an instruction makes or fills, given the
            instruction's name, its argument, and the stand-ins that it takes from the stack.
        unknown: Stand-in for a value that the pickle reads from its memo but never stored there.
    """
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    for opcode, argument, position in pickletools.genops(pickled):
        name, before = opcode.name, opcode.stack_before
        if name == "MEMOIZE" or name.endswith("PUT"):
            memo[len(memo) if argument is None else argument] = stack[-1]
            continue
        if name == "MARK":
            stack.append(_MARK)
            continue
        if name.endswith("GET"):
            made = memo.get(argument, unknown)
        else:
            parts: list[Any] = []
            fixed = len(before)
            if before and before[-1] is pickletools.stackslice:
                fixed = before.index(pickletools.markobject)
                while (part := stack.pop()) is not _MARK:
                    parts.append(part)
            parts.extend(stack.pop() for _ in range(fixed))
            if not opcode.stack_after:
                continue
            parts.reverse()
            made = make(name, argument, parts)
        stack.append(made)
        yield position or 0, made


_MARK = object()

# Attribute of localckpt's wrapper that holds a plain state.
_WRAPPER = "state_dict"
_FRAME_NBYTES = 9
_CONTAINERS = frozenset({"TUPLE", "LIST", "DICT", "SET", "FROZENSET"})


class Place(NamedTuple):
    """Place of an object in a state: keys, indices and attributes, joined by dots."""

    class_name: str
    path: str


def place_at(pickled: bytes, end: int) -> Place | None:
    """Find the place of the object that the instruction before byte ``end`` makes, if any."""
    wanted = None
    # Follow the pickle to its end, since an object's containers may be filled after it is made.
    for position, made in _follow(pickled, _make_node):
        wanted = made if position < end else wanted
    return Place(wanted.class_name, _path_of(wanted)) if isinstance(wanted, _Node) else None


def unframed(pickled: bytes) -> bytes:
    """Remove the frames of a pickle, so that an unpickler reads one instruction at a time."""
    parts, start = [], 0
    for opcode, _, position in pickletools.genops(pickled):
        if opcode.name == "FRAME" and position is not None:
            parts.append(pickled[start:position])
            start = position + _FRAME_NBYTES
    return b"".join([*parts, pickled[start:]])


@dataclass(slots=True, eq=False)
class _Node:
    """Stand-in of a value that may hold others: a container, or an object."""

    class_name: str
    parent: _Node | None = None
    key: Any = None
    count: int = 0

    def fill(self, members: Iterable[tuple[Any, Any]]) -> None:
        """Record this value as the parent of others, unless these have a parent already."""
        for key, child in members:
            self.count += 1
            if isinstance(child, _Node) and child.parent is None and child is not self:
                child.parent, child.key = self, key


class _Name(str):
    """Stand-in of a class or function: its full name."""

    __slots__ = ()


def _make_node(name: str, argument: Any, parts: list[Any]) -> Any:
    container = name.rstrip("123").removeprefix("EMPTY_")
    if name in _FILLS:
        whole, *members = parts
        if not isinstance(whole, _Node):
            return whole
        if name == "BUILD":
            # The state's members become attributes, so the dict around them adds no key to paths.
            whole.fill([(None, members[0])])
        elif name.startswith("SETITEM"):
            whole.fill(zip(members[::2], members[1::2], strict=True))
        else:
            whole.fill(enumerate(members, whole.count))
        return whole
    if name in _MADE_OF_OTHERS and container not in _CONTAINERS:
        called, *arguments = parts
        made = _Node(str(called) if isinstance(called, _Name) else "an object")
        # A function's arguments get the path of its result.
        made.fill((None, part) for part in arguments)
        made.count = 0
        return made
    if container in _CONTAINERS:
        made = _Node(f"builtins.{container.lower()}")
        made.fill(enumerate(parts))
        return made
    if name == "STACK_GLOBAL":
        return _Name(".".join(map(str, parts)))
    return _Name(argument.replace(" ", ".")) if name == "GLOBAL" else argument


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
