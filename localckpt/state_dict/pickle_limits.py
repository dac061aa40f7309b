"""Refuses pickles that would take memory or stack beyond all measure, before one is read.

Most of a pickle are instructions that can do no harm. A regular expression skips runs of them, so
that looking through a pickle takes less time than reading it, and training can wait for it.
"""

from __future__ import annotations

import re
import struct

from localckpt.errors import CorruptShardError

__all__ = ["MAX_DEPTH", "check_opcodes"]

MAX_DEPTH = 10_000
"""Limit of tuples in tuples, which are hashed by a recursion of C without a limit of its own."""

# Each short text and number has a pattern of its length.
_SHORT = b"|".join(b"\\x%02x.{%d}" % (n, n) for n in range(64))
_NO_ARGUMENT = rb"012()NRQ\]}abdelosu\x81\x88\x89\x8f\x90\x92-\x94"
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
# How the length of an argument is written that stands behind it.
_LENGTHS = {
    **dict.fromkeys(b"UC\x8c\x8a", struct.Struct("<B")),
    **dict.fromkeys(b"TXB\x8b", struct.Struct("<i")),
    **dict.fromkeys(b"\x8d\x8e\x96", struct.Struct("<q")),
}
_LINES = {**dict.fromkeys(b"FILSVPgp", 1), **dict.fromkeys(b"ci", 2)}
_PUTS = {ord("q"): struct.Struct("<B"), ord("r"): struct.Struct("<I")}


def check_opcodes(skeleton: bytes, *, depth_is_limited: bool = False) -> None:
    """Look at each instruction of a pickle; nothing is made.

    Args:
        skeleton: The pickle.
        depth_is_limited: Whether it comes from a pickler that gives up before :data:`MAX_DEPTH`.

    Raises:
        CorruptShardError: No pickler writes such a pickle.
    """
    try:
        nested = _check(skeleton, _HARMLESS_OR_NESTING if depth_is_limited else _HARMLESS)
        too_deep = nested > MAX_DEPTH and _depth(skeleton) > MAX_DEPTH
    except (struct.error, IndexError, ValueError) as error:
        raise CorruptShardError(f"the skeleton cannot be read: {error!r}") from error
    if too_deep:
        raise CorruptShardError("the skeleton holds tuples in tuples without end")


def _check(pickle: bytes, harmless: re.Pattern[bytes]) -> int:
    """The number of instructions that put values into tuples, among those not skipped."""
    position, nested, puts = 0, 0, 0
    while True:
        position = _end(harmless, pickle, position)
        code = pickle[position]
        position += 1
        if code in _NESTING_CODES:
            nested += 1
        elif code in _LENGTHS:
            position = _behind_argument(pickle, position, _LENGTHS[code])
        elif code == _STOP:
            return nested
        elif code in _PUTS or code == ord("p"):
            # The memo is as large as the largest number in it, and picklers count from 0.
            (number, position) = _put_number(pickle, position, code)
            if number > puts:
                raise CorruptShardError(f"the skeleton remembers {number} values")
            puts += 1
        elif code in _LINES:
            for _ in range(_LINES[code]):
                position = pickle.index(b"\n", position) + 1
        else:
            raise CorruptShardError(f"the skeleton has an unknown instruction {code:#04x}")


def _end(harmless: re.Pattern[bytes], pickle: bytes, position: int) -> int:
    match = harmless.match(pickle, position)
    assert match is not None, "the pattern matches nothing, too"
    return match.end()


def _behind_argument(pickle: bytes, position: int, length: struct.Struct) -> int:
    (nbytes,) = length.unpack_from(pickle, position)
    end = position + length.size + int(nbytes)
    if nbytes < 0 or end > len(pickle):
        raise CorruptShardError(f"the skeleton has a value of {nbytes} bytes")
    return end


def _put_number(pickle: bytes, position: int, code: int) -> tuple[int, int]:
    """Return the number that a PUT has, and the position behind it."""
    if code in _PUTS:
        (number,) = _PUTS[code].unpack_from(pickle, position)
        return number, position + _PUTS[code].size
    end = pickle.index(b"\n", position)
    return int(pickle[position:end]), end + 1


# From here on, only pickles with very many tuples are looked at.

_ARGUMENT_NBYTES = {**dict.fromkeys(b"Kh\x80", 1), ord("M"): 2, **dict.fromkeys(b"Jj", 4)} | {
    **dict.fromkeys(b"G\x95", 8)
}
_MARK = -1
_OF_SEVERAL = {0x85: 1, 0x86: 2, 0x87: 3, ord("R"): 2, 0x81: 2, 0x92: 3}
# Lists, dicts and sets cannot be hashed, so what lies in them counts no further.
_TAKE_ONE, _TAKE_TWO, _TAKE_TO_MARK = frozenset(b"0ab"), frozenset(b"s"), frozenset(b"1eu\x90")
_TO_MARK = frozenset(b"t\x91oi")
_EMPTY_TO_MARK = frozenset(b"ld")
_NOTHING = frozenset(b"\x80\x95")


def _depth(pickle: bytes) -> int:
    """Return the greatest depth of tuples, frozen sets and made objects in each other."""
    stack: list[int] = []
    memo: dict[int, int] = {}
    position, deepest = 0, 0
    while (code := pickle[position]) != _STOP:
        position += 1
        start = position
        if code in _ARGUMENT_NBYTES:
            position += _ARGUMENT_NBYTES[code]
        elif code in _LENGTHS:
            position = _behind_argument(pickle, position, _LENGTHS[code])
        elif code in _PUTS or code == ord("p"):
            number, position = _put_number(pickle, position, code)
            memo[number] = stack[-1]
            continue
        elif code in _LINES:
            for _ in range(_LINES[code]):
                position = pickle.index(b"\n", position) + 1
        if code == 0x94:
            memo[len(memo)] = stack[-1]
        elif code in b"hjg":
            text = pickle[start:position]
            number = int(text) if code == ord("g") else int.from_bytes(text, "little")
            stack.append(memo.get(number, 0))
        elif code in _OF_SEVERAL:
            count = _OF_SEVERAL[code]
            depth = 1 + max(stack[-count:])
            deepest = max(deepest, depth)
            stack[-count:] = [depth]
        elif code in _TO_MARK:
            depth = 1 + max(_popped_to_mark(stack), default=0)
            deepest = max(deepest, depth)
            stack.append(depth)
        elif code in _EMPTY_TO_MARK:
            _popped_to_mark(stack)
            stack.append(0)
        elif code in _TAKE_TO_MARK:
            _popped_to_mark(stack)
        elif code in _TAKE_ONE:
            stack.pop()
        elif code in _TAKE_TWO:
            del stack[-2:]
        elif code == ord("("):
            stack.append(_MARK)
        elif code == ord("2"):
            stack.append(stack[-1])
        elif code == 0x93:
            stack[-2:] = [0]
        elif code == ord("Q"):
            stack[-1] = 0
        elif code not in _NOTHING:
            stack.append(0)
    return deepest


def _popped_to_mark(stack: list[int]) -> list[int]:
    values = []
    while (value := stack.pop()) != _MARK:
        values.append(value)
    return values
