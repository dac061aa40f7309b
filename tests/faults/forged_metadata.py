"""Metadata of a shared checkpoint that somebody made up, by changing what torch wrote.

A pickle is taken apart into its instructions, and put together again with some of them changed,
moved, repeated, or with others between them.
"""

from __future__ import annotations

import pickle
import pickletools
import random
import struct
from collections.abc import Callable, Sequence

__all__ = ["METADATA_BOMBS", "forged", "instructions"]


def _text(text: str) -> bytes:
    data = text.encode(errors="surrogatepass")
    if len(data) < 256:
        return pickle.SHORT_BINUNICODE + bytes([len(data)]) + data
    return pickle.BINUNICODE + struct.pack("<I", len(data)) + data


def _named(module: str, name: str) -> bytes:
    return _text(module) + _text(name) + pickle.STACK_GLOBAL


_METADATA = "torch.distributed.checkpoint.metadata"
_ATTRIBUTES = b"N}" + _text("version") + _text("forged") + b"s\x86b"
_FIELDS = b"}" + _text("_value_") + b"K\x07sb"

METADATA_BOMBS: dict[str, bytes] = {
    "a memo of 16 GB": b"N" + pickle.LONG_BINPUT + struct.pack("<I", 2**31 - 1) + b"0",
    "bytes of 1 TB": pickle.BINBYTES8 + struct.pack("<Q", 1 << 40),
    "bytes of 4 GB": pickle.BINBYTES + b"\xff\xff\xff\xff",
    "a string of 4 GB": pickle.BINUNICODE + b"\xff\xff\xff\xff",
    "a frame of 4 EB": pickle.FRAME + struct.pack("<Q", 1 << 62),
    "an integer of 2 GB": pickle.LONG4 + b"\xff\xff\xff\x7f",
    "a tuple of tuples as a key": b"})" + pickle.TUPLE1 * 300_000 + b"Ns",
    "tuples of tuples": b")" + pickle.TUPLE1 * 300_000,
    "lists of lists": b"(" * 300_000 + b"l" * 300_000,
    "a key that takes for ever": b"})" + b"2\x86" * 200 + b"Ns",
    "attributes for a class": _named(_METADATA, "Metadata") + _ATTRIBUTES,
    "attributes for an enumeration": _named(_METADATA, "_MEM_FORMAT_ENCODING") + _ATTRIBUTES,
    "another value for a member": _named(_METADATA, "_MEM_FORMAT_ENCODING")
    + b"K\x00\x85R"
    + _FIELDS,
    "items for a class": _named(_METADATA, "Metadata") + b"NNs",
    "a registered extension": pickle.EXT1 + b"\x01",
    "a list out of a range": _named("builtins", "list")
    + _named("builtins", "range")
    + b"J\xff\xff\xff\x7f\x85R\x85R",
    "bytes of a number": _named("builtins", "bytes") + b"J\xff\xff\xff\x7f\x85R",
    "a size of a range": _named("torch", "Size")
    + _named("builtins", "range")
    + b"J\xff\xff\xff\x7f\x85R\x85R",
    "a tensor of 1 TB": _named("torch", "Tensor") + b"\x8a\x05\0\0\0\0\x40\x85R",
    "a command": _named("os", "system") + _text("exit 7") + b"\x85R",
    "an attribute": _named("builtins", "getattr") + _named("torch", "Size") + _text("x") + b"\x86R",
    "an expression": _named("builtins", "eval") + _text("1/0") + b"\x85R",
    "a tensor out of bytes": _named("torch.storage", "_load_from_bytes") + b"C\x01a\x85R",
    "an inner name": _named("torch", "Size.__init__.__globals__"),
}
"""Instructions that must not be carried out, wherever in a pickle they stand."""

_NUMBERS = (
    *(-1, 0, 1, 2, 7, 255, 256, 1000, 4096, 2**15, 2**31 - 1, 2**31, 2**32, 15_000_000_000),
    *(2**40, 2**62, 2**63 - 1, 2**63, 2**64, 2**200, -(2**31), -(2**63), 2**2000),
)
_TEXTS = (
    *("", "/etc/passwd", "../../../etc/passwd", "..", ".", "__0_0.distcp", "\0", "\udcff", "w"),
    *("torch", "builtins", "list", "os", "system", "Size", "float64", "strided", "__dict__"),
    *("_MEM_FORMAT_ENCODING", "Metadata", "offset", "length", "chunks", "size", "index", "fqn"),
)
_CONSTANTS = (b"N", b"\x88", b"\x89", b")", b"]", b"}", b"\x8f", b"K\x01", b"C\x01a", b"(t", b"2")


def instructions(data: bytes) -> list[bytes]:
    """The instructions of a pickle, but for what only divides it."""
    places = [(opcode.name, place) for opcode, _, place in pickletools.genops(data)]
    ends = [place for _, place in places[1:]] + [len(data)]
    return [
        data[place:end]
        for (name, place), end in zip(places, ends, strict=True)
        if name not in ("PROTO", "FRAME", "STOP") and place is not None
    ]


def forged(told: Sequence[bytes], seed: int) -> tuple[str, bytes]:
    """What was done to these instructions, and the pickle that came of it."""
    draw = random.Random(seed)
    changed, steps = list(told), []
    for _ in range(draw.randint(1, 4)):
        step = draw.choice(_STEPS)
        steps.append(f"{step.__name__} {step(draw, changed)}")
    data = bytearray(pickle.PROTO + b"\x04" + b"".join(changed) + pickle.STOP)
    if draw.random() < 0.1:
        place = draw.randrange(len(data))
        data[place] ^= 1 << draw.randrange(8)
        steps.append(f"a bit of byte {place}")
    if draw.random() < 0.05:
        del data[draw.randrange(len(data)) :]
        steps.append(f"cut at {len(data)}")
    return ", ".join(steps), bytes(data)


def _number(draw: random.Random, told: list[bytes]) -> str:
    places = [i for i, part in enumerate(told) if part[:1] in b"JKM\x8a"]
    place, number = draw.choice(places or [0]), draw.choice(_NUMBERS)
    told[place] = pickle.dumps(number, 2)[2:-1]
    return f"{number:.3g} at {place}" if abs(number) < 1e300 else f"huge at {place}"


def _string(draw: random.Random, told: list[bytes]) -> str:
    texts = [i for i, part in enumerate(told) if part[:1] in b"X\x8c"]
    place, text = draw.choice(texts or [0]), _text(draw.choice(_TEXTS))
    if draw.random() < 0.5 and texts:
        text = told[draw.choice(texts)]
    told[place] = text
    return f"{text!r:.40} at {place}"


def _bomb(draw: random.Random, told: list[bytes]) -> str:
    what, place = draw.choice(sorted(METADATA_BOMBS)), draw.randrange(len(told) + 1)
    # In the place of a value, or before one.
    told[place : place + draw.randint(0, 1)] = [METADATA_BOMBS[what]]
    return f"{what} at {place}"


def _constant(draw: random.Random, told: list[bytes]) -> str:
    place, value = draw.randrange(len(told)), draw.choice(_CONSTANTS)
    told[place : place + draw.randint(0, 1)] = [value]
    return f"{value!r} at {place}"


def _gone(draw: random.Random, told: list[bytes]) -> str:
    place = draw.randrange(len(told))
    count = draw.choice([1, 1, 2, 5])
    del told[place : place + count]
    told.extend([] if told else [b"N"])
    return f"{count} from {place}"


def _swapped(draw: random.Random, told: list[bytes]) -> str:
    one, other = draw.randrange(len(told)), draw.randrange(len(told))
    told[one], told[other] = told[other], told[one]
    return f"{one} with {other}"


def _repeated(draw: random.Random, told: list[bytes]) -> str:
    start, count = draw.randrange(len(told)), draw.choice([1, 2, 5, 20, 100])
    place, times = draw.randrange(len(told)), draw.choice([1, 1, 2, 50])
    told[place:place] = told[start : start + count] * times
    return f"{count} from {start} {times} times at {place}"


def _recalled(draw: random.Random, told: list[bytes]) -> str:
    place, number = draw.randrange(len(told)), draw.randrange(256)
    told[place : place + draw.randint(0, 1)] = [pickle.BINGET + bytes([number])]
    return f"{number} at {place}"


_STEPS: list[Callable[[random.Random, list[bytes]], str]] = [
    *(_number, _number, _number, _string, _string, _bomb, _constant, _gone, _swapped),
    *(_repeated, _recalled, _recalled),
]
