"""Pickles that somebody made up: of bombs, and of true ones whose instructions were changed.

A pickle is taken apart into its instructions, and put together again with some of them changed,
moved, repeated, or with others between them.
"""

from __future__ import annotations

import collections
import decimal
import fractions
import pickle
import pickletools
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch

from localckpt.state_dict.safe_globals import _VALUES

__all__ = ["ALLOWED_NAMES", "BOMBS", "Forger", "instructions", "whole"]

ALLOWED_NAMES = [(module, name) for module, names in sorted(_VALUES.items()) for name in names]


def instructions(data: bytes) -> list[bytes]:
    """The instructions of a pickle, but for what only divides it."""
    places = [(opcode.name, place) for opcode, _, place in pickletools.genops(data)]
    ends = [place for _, place in places[1:]] + [len(data)]
    return [
        data[place:end]
        for (name, place), end in zip(places, ends, strict=True)
        if name not in ("PROTO", "FRAME", "STOP") and place is not None
    ]


def whole(parts: Sequence[bytes]) -> bytes:
    """The pickle of some instructions."""
    return pickle.PROTO + b"\x05" + b"".join(parts) + pickle.STOP


def _text(text: str) -> bytes:
    data = text.encode(errors="surrogatepass")
    if len(data) < 256:
        return pickle.SHORT_BINUNICODE + bytes([len(data)]) + data
    return pickle.BINUNICODE + struct.pack("<I", len(data)) + data


def _named(module: str, name: str) -> bytes:
    return _text(module) + _text(name) + pickle.STACK_GLOBAL


class _Call:
    """Pickles as a call of any function, whatever comes of it."""

    def __init__(self, function: Callable[..., Any], *args: Any, state: Any = None) -> None:
        self._reduced = (function, args) if state is None else (function, args, state)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduced


def _call(function: Callable[..., Any], *args: Any, state: Any = None) -> bytes:
    pickled = pickle.dumps(_Call(function, *args, state=state), 4)
    return b"".join(instructions(pickletools.optimize(pickled)))


def _laughs(depth: int) -> bytes:
    """A list that holds one list twice, which holds one list twice, and so on."""
    text = b"]\x94"
    for level in range(depth):
        text += b"]\x94(" + 2 * (pickle.BINGET + bytes([level])) + b"e"
    return text


_POINTERS = b"A" * 8
_FORGED_DTYPE = _Call(
    numpy.dtype,
    "V8",
    state=(3, "|", None, ("a",), {"a": (numpy.dtype("O"), 0)}, 8, 1, 0),
)
_METADATA = "torch.distributed.checkpoint.metadata"
_ATTRIBUTES = b"N}" + _text("version") + _text("forged") + b"s\x86b"
_RANGE = _named("builtins", "range") + b"J\xff\xff\xff\x7f\x85R\x85R"

BOMBS: dict[str, bytes] = {
    # Bytes that are taken for addresses of objects.
    "an array of objects out of bytes": _call(list, _Call(numpy.ndarray, (1,), "O", _POINTERS)),
    "an array of a forged dtype": _call(numpy.ndarray, (1,), _FORGED_DTYPE, _POINTERS),
    # Few bytes that take much memory.
    "a memo of 16 GB": b"N" + pickle.LONG_BINPUT + struct.pack("<I", 2**31 - 1),
    "a list out of a range": _named("builtins", "list") + _RANGE,
    "a counter out of a range": _call(collections.Counter, range(3_000_000)),
    "a deque out of a range": _call(collections.deque, range(10_000_000)),
    "a size out of a range": _named("torch", "Size") + _RANGE,
    "bytes of a number": _named("builtins", "bytes") + b"J\xff\xff\xff\x7f\x85R",
    "a string of 1 TB": pickle.BINUNICODE8 + struct.pack("<Q", 1 << 40),
    "a string of 4 GB": pickle.BINUNICODE + b"\xff\xff\xff\xff",
    "bytes of 1 TB": pickle.BINBYTES8 + struct.pack("<Q", 1 << 40),
    "a frame of 4 EB": pickle.FRAME + struct.pack("<Q", 1 << 62) + b"N",
    "an integer of 2 GB": pickle.LONG4 + b"\xff\xff\xff\x7f",
    "an array of 1 TB": _call(numpy.ndarray, (1 << 40,)),
    "a tensor of 1 TB": _call(torch.Tensor, 1 << 38),
    # Few bytes that take for ever.
    "a fraction of a huge power": _call(fractions.Fraction, "1e100000000"),
    "an integer of a huge power": _call(int, _Call(decimal.Decimal, "1e100000000")),
    "a key that takes for ever": b"})" + b"2\x86" * 200 + b"Ns",
    "sharing without end": _laughs(200),
    # Depths at which C runs out of stack.
    "a tuple of tuples as a key": b"})" + pickle.TUPLE1 * 300_000 + b"Ns",
    "lists of lists": b"(" * 300_000 + b"l" * 300_000,
    # Classes of the running program, changed.
    "attributes for a class": _named("argparse", "Namespace") + _ATTRIBUTES,
    "attributes for a class of torch": _named(_METADATA, "Metadata") + _ATTRIBUTES,
    "another value for a member of an enumeration": _named(_METADATA, "_MEM_FORMAT_ENCODING")
    + b"K\x00\x85R}"
    + _text("_value_")
    + b"K\x07sb",
    "items for a class": _named(_METADATA, "Metadata") + b"NNs",
    # What is run.
    "a registered extension": pickle.EXT1 + b"\x01",
    "a command": _named("os", "system") + _text("exit 7") + b"\x85R",
    "an attribute": _named("builtins", "getattr") + _named("torch", "Size") + _text("x") + b"\x86R",
    "a tensor out of bytes": _named("torch.storage", "_load_from_bytes") + b"C\x01a\x85R",
    "an inner name": _named("torch", "Size.__init__.__globals__"),
}
"""Instructions that make one value, and must do no harm wherever in a pickle they stand."""

_NUMBERS = (
    *(-1, 0, 1, 2, 7, 255, 256, 625, 4096, 2**15, 2**31 - 1, 2**31, 2**32, 15_000_000_000, 2**40),
    *(2**62, 2**63 - 1, 2**63, 2**64, 2**200, -(2**31), -(2**63), 2**2000),
)
_WORDS = (
    *("", "/etc/passwd", "../../../etc/passwd", "..", "__0_0.distcp", "\0", "\udcff", "w", "O8"),
    *("torch", "builtins", "list", "os", "system", "Size", "float64", "strided", "__dict__", "V8"),
    *("_MEM_FORMAT_ENCODING", "Metadata", "offset", "length", "chunks", "size", "index", "fqn"),
    *("V2000000000", "U7", "f8", "M8", "<", "|", "pos", "buffer_pos", "state", "key", "MT19937"),
    *("Philox", "meta", "cuda:9", "data", "__class__", "requires_grad", "1e9999", "ns"),
)
_CONSTANTS = (
    *(b"N", b"\x88", b")", b"]", b"}", b"\x8f", b"(", b"0", b"1", b"2", b"t", b"l", b"d", b"e"),
    *(b"a", b"s", b"u", b"\x90", b"\x91", b"\x85", b"\x86", b"R", b"b", b"\x81", b"\x92", b"\x93"),
    *(b"\x94", b"o", b"K\x01", b"K\x00Q", b"K\x63Q", b"C\x08AAAAAAAA", b"\x97", b"\x98", b"(t"),
)


class Forger:
    """Changes true pickles at random.

    Args:
        bases: The instructions of each.
    """

    def __init__(self, bases: Sequence[Sequence[bytes]]) -> None:
        self._bases = bases
        self._changes = [self._number, self._word, self._data, self._gone, self._swapped]
        self._changes += [self._repeated, self._recalled, self._constant, self._name, self._bomb]

    def forge(self, seed: int) -> bytes:
        """A pickle, the same for each seed; mostly only a value of a true one is another."""
        self._draw = draw = random.Random(seed)
        parts = list(draw.choice(self._bases))
        for _ in range(draw.choice((1, 1, 1, 2, 3, 6))):
            changes = self._changes[:3] if draw.random() < 0.6 else self._changes
            draw.choice(changes)(parts)
        forged = bytearray(whole(parts))
        if draw.random() < 0.1:
            forged[draw.randrange(len(forged))] ^= 1 << draw.randrange(8)
        if draw.random() < 0.05:
            del forged[draw.randrange(len(forged)) :]
        return bytes(forged)

    def _one_of(self, parts: list[bytes], opcodes: bytes) -> int:
        places = [place for place, part in enumerate(parts) if part[0] in opcodes]
        return self._draw.choice(places or [0])

    def _number(self, parts: list[bytes]) -> None:
        number = self._draw.choice(_NUMBERS)
        parts[self._one_of(parts, b"JKM\x8a")] = pickle.dumps(number, 2)[2:-1]

    def _word(self, parts: list[bytes]) -> None:
        place, other = (self._one_of(parts, b"X\x8c") for _ in range(2))
        is_word = parts[other][0] in b"X\x8c"
        new = _text(self._draw.choice(_WORDS))
        parts[place] = parts[other] if is_word and self._draw.random() < 0.5 else new

    def _data(self, parts: list[bytes]) -> None:
        data = self._draw.randbytes(self._draw.choice((0, 1, 8, 24, 200)))
        place = self._one_of(parts, b"BC")
        if parts[place][0] in b"BC":
            parts[place] = pickle.BINBYTES + len(data).to_bytes(4, "little") + data
        else:
            self._number(parts)

    def _gone(self, parts: list[bytes]) -> None:
        place = self._draw.randrange(len(parts))
        del parts[place : place + self._draw.choice((1, 1, 2, 5))]
        parts.extend([] if parts else [b"N"])

    def _swapped(self, parts: list[bytes]) -> None:
        one, other = (self._draw.randrange(len(parts)) for _ in range(2))
        parts[one], parts[other] = parts[other], parts[one]

    def _repeated(self, parts: list[bytes]) -> None:
        """Instructions of this or of another pickle, once more or often."""
        source = self._draw.choice([parts, self._draw.choice(self._bases)])
        start, count = self._draw.randrange(len(source)), self._draw.choice((1, 2, 5, 20, 100))
        place = self._draw.randrange(len(parts))
        parts[place:place] = [*source[start : start + count]] * self._draw.choice((1, 1, 2, 50))

    def _recalled(self, parts: list[bytes]) -> None:
        self._put(parts, pickle.BINGET + bytes([self._draw.randrange(256)]))

    def _constant(self, parts: list[bytes]) -> None:
        self._put(parts, self._draw.choice(_CONSTANTS))

    def _name(self, parts: list[bytes]) -> None:
        """Another class: what its predecessor was made of is dropped from the stack."""
        name = _named(*self._draw.choice(ALLOWED_NAMES))
        place = self._one_of(parts, b"\x93c")
        parts[place] = parts[place] + b"0" + name

    def _bomb(self, parts: list[bytes]) -> None:
        self._put(parts, BOMBS[self._draw.choice(sorted(BOMBS))])

    def _put(self, parts: list[bytes], part: bytes) -> None:
        """In the place of an instruction, or before one."""
        place = self._draw.randrange(len(parts))
        parts[place : place + self._draw.randint(0, 1)] = [part]
