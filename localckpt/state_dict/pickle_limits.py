"""Refuses pickles that would take memory or stack beyond all measure, before one is read."""

from __future__ import annotations

import pickletools

from localckpt.errors import CorruptShardError

__all__ = ["check_opcodes"]

_PUTS = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
_GETS = frozenset({"GET", "BINGET", "LONG_BINGET"})
# Of these, values in values are hashed or freed by a recursion of C, which has no limit of its own.
_NESTING = frozenset({"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "FROZENSET"})
_MAX_DEPTH = 10_000


def check_opcodes(skeleton: bytes | memoryview) -> None:
    """Look at each instruction of a pickle; nothing is made.

    Raises:
        CorruptShardError: No pickler writes such a pickle.
    """
    pickle = bytes(skeleton)
    nested = 0
    try:
        for number, (opcode, argument, _) in enumerate(pickletools.genops(pickle)):
            # The memo is as large as the largest number in it.
            if opcode.name in _PUTS and int(argument or 0) > number:
                raise CorruptShardError(f"the skeleton remembers {argument} values")
            nested += opcode.name in _NESTING
        too_deep = nested > _MAX_DEPTH and _depth(pickle) > _MAX_DEPTH
    except (CorruptShardError, MemoryError):
        raise
    except Exception as error:
        # A damaged pickle can raise anything; the caller needs to know only that it is one.
        raise CorruptShardError(f"the skeleton cannot be read: {error!r}") from error
    if too_deep:
        raise CorruptShardError("the skeleton holds tuples in tuples without end")


def _depth(pickle: bytes) -> int:
    """How deep values lie in each other, at most."""
    stack: list[int] = []
    memo: dict[int, int] = {}
    deepest = 0
    for opcode, argument, _ in pickletools.genops(pickle):
        if opcode.name == "MARK":
            stack.append(-1)
        elif opcode.name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif opcode.name in _PUTS:
            memo[int(argument or 0)] = stack[-1]
        elif opcode.name in _GETS:
            stack.append(memo.get(int(argument or 0), 0))
        else:
            taken: list[int] = []
            for kind in reversed(opcode.stack_before):
                if kind is pickletools.stackslice:
                    while stack and stack[-1] != -1:
                        taken.append(stack.pop())
                elif stack:
                    taken.append(max(0, stack.pop()))
            depth = 1 + max(taken, default=-1)
            deepest = max(deepest, depth)
            stack += [depth] * len(opcode.stack_after)
    return deepest
