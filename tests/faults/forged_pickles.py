"""Pickles that somebody made up: of bombs, and of true ones whose instructions were changed."""

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

__all__ = ["ALLOWED_NAMES", "BOMBS", "forged", "instructions", "whole"]

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
    numpy.dtype, "V8", state=(3, "|", None, ("a",), {"a": (numpy.dtype("O"), 0)}, 8, 1, 0)
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


def forged(bases: Sequence[Sequence[bytes]], seed: int) -> bytes:
    """A true pickle, of its instructions, changed; mostly only a value of it is another."""
    draw = random.Random(seed)
    parts = list(draw.choice(bases))
    for _ in range(draw.choice((1, 1, 1, 2, 3, 6))):
        _change(parts, draw, bases)
    data = bytearray(whole(parts))
    if draw.random() < 0.1:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    if draw.random() < 0.05:
        del data[draw.randrange(len(data)) :]
    return bytes(data)


def _change(parts: list[bytes], draw: random.Random, bases: Sequence[Sequence[bytes]]) -> None:
    def one_of(opcodes: bytes) -> int:
        return draw.choice([n for n, part in enumerate(parts) if part[0] in opcodes] or [0])

    place = draw.randrange(len(parts))
    is_value = draw.random() < 0.6
    how = draw.choice(["number", "word", "data"] if is_value else ["gone", "again", "put", "name"])
    if how == "number":
        parts[one_of(b"JKM\x8a")] = pickle.dumps(draw.choice(_NUMBERS), 2)[2:-1]
    elif how == "word":
        # One that it has elsewhere, or another.
        words = [part for part in parts if part[0] in b"X\x8c"]
        parts[one_of(b"X\x8c")] = draw.choice([*words, *map(_text, _WORDS)])
    elif how == "data":
        data = draw.randbytes(draw.choice((0, 1, 8, 24, 200)))
        parts[one_of(b"BC")] = pickle.BINBYTES + len(data).to_bytes(4, "little") + data
    elif how == "gone":
        del parts[place : place + draw.choice((1, 1, 2, 5))]
        parts.extend([] if parts else [b"N"])
    elif how == "again":
        # Instructions of this or of another pickle, once more or often.
        source = draw.choice([parts, draw.choice(bases)])
        start, count = draw.randrange(len(source)), draw.choice((1, 2, 5, 20, 100))
        parts[place:place] = [*source[start : start + count]] * draw.choice((1, 1, 2, 50))
    elif how == "put":
        # In the place of an instruction, or before one.
        recalled = pickle.BINGET + bytes([draw.randrange(256)])
        new = draw.choice([recalled, draw.choice(_CONSTANTS), BOMBS[draw.choice(sorted(BOMBS))]])
        parts[place : place + draw.randint(0, 1)] = [new]
    else:
        # Another class: what its predecessor was made of is dropped from the stack.
        place = one_of(b"\x93c")
        parts[place] += b"0" + _named(*draw.choice(ALLOWED_NAMES))
