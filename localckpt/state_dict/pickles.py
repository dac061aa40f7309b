"""Check of a pickle's instructions, which refuses one that takes unbounded memory or stack.

A regular expression skips runs of harmless ones, since training waits for the check.
"""

from __future__ import annotations

import pickletools
import re
import struct
from typing import Any, cast

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
_MARK = -1


def _depth(pickled: bytes) -> int:
    """Return the greatest depth of tuples, frozen sets and objects, which can be hashed."""
    stack: list[int] = []
    memo: dict[Any, int] = {}
    deepest = 0
    for opcode, argument, _ in pickletools.genops(pickled):
        name, before = opcode.name, opcode.stack_before
        if name == "MEMOIZE" or name.endswith("PUT"):
            memo[len(memo) if argument is None else argument] = stack[-1]
        elif name == "MARK":
            stack.append(_MARK)
        elif name.endswith("GET"):
            stack.append(memo.get(argument, 0))
        else:
            parts: list[int] = []
            fixed = len(before)
            if before and before[-1] is pickletools.stackslice:
                fixed = before.index(pickletools.markobject)
                while (part := stack.pop()) != _MARK:
                    parts.append(part)
            parts.extend(stack.pop() for _ in range(fixed))
            if name in _FILLS:
                stack.append(parts[-1])
            elif name in _MADE_OF_OTHERS:
                stack.append(1 + max(parts, default=0))
                deepest = max(deepest, stack[-1])
            elif opcode.stack_after:
                stack.append(0)
    return deepest


_FRAME_NBYTES = 9


def unframed(pickled: bytes) -> bytes:
    """Remove the frames of a pickle, so that an unpickler reads one instruction at a time."""
    parts, start = [], 0
    for opcode, _, position in pickletools.genops(pickled):
        if opcode.name == "FRAME" and position is not None:
            parts.append(pickled[start:position])
            start = position + _FRAME_NBYTES
    return b"".join([*parts, pickled[start:]])
