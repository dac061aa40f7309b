"""Files that somebody made up: their digests are right, and what they say is not.

Each is a small image with a part that was changed by hand, or at random.
"""

from __future__ import annotations

import collections
import decimal
import fractions
import json
import pickle
import struct
from collections.abc import Callable
from typing import Any

import numpy
import torch
from hypothesis import strategies as st

from localckpt.state_dict.safe_globals import _VALUES
from tests.faults.images import Parts, identity_in, sealed

__all__ = [
    "BOMBS",
    "ODD_ROWS",
    "Forged",
    "claiming",
    "headers",
    "identities",
    "pickles",
    "small_state",
    "tables",
]


class Forged:
    """A file, told by what was done to it."""

    def __init__(self, what: str, image: bytes) -> None:
        self.what = what.encode(errors="backslashreplace").decode()
        self.image = image

    def __repr__(self) -> str:
        return self.what


def small_state(iteration: int) -> dict[str, Any]:
    """A state of a few pages."""
    weight = torch.arange(600.0) * iteration
    return {
        "weight": weight.view(20, 30),
        "rows": weight[30:90],
        "half": torch.arange(7).to(torch.bfloat16),
        "step": torch.tensor(float(iteration)),
        "parameter": torch.nn.Parameter(torch.arange(5.0)),
        "array": numpy.arange(4),
        "iteration": iteration,
    }


class Call:
    """Pickles as a call of any function, whatever comes of it."""

    def __init__(self, function: Callable[..., Any], *args: Any, state: Any = None) -> None:
        self._reduced = (function, args) if state is None else (function, args, state)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduced


def _nested_key(depth: int) -> bytes:
    """A tuple in a tuple in a tuple, as a key: to hash it takes as many frames of C."""
    return b"\x80\x05}" + b")" + pickle.TUPLE1 * depth + b"K\x01s."


def _laughs(depth: int) -> bytes:
    """A list that holds one list twice, which holds one list twice, and so on."""
    text = b"\x80\x05]\x94"
    for level in range(depth):
        text += b"]\x94(" + 2 * (pickle.BINGET + bytes([level])) + b"e"
    return text + b"."


def _bare(module: str, name: str) -> bytes:
    """The opcodes that push a global."""
    return (
        b"".join(
            pickle.SHORT_BINUNICODE + bytes([len(text)]) + text.encode() for text in (module, name)
        )
        + pickle.STACK_GLOBAL
    )


_POINTERS = b"A" * 8
_FORGED_DTYPE = Call(
    numpy.dtype,
    "V8",
    state=(3, "|", None, ("a",), {"a": (numpy.dtype("O"), 0)}, 8, 1, 0),
)

BOMBS: dict[str, bytes] = {
    # Bytes that are taken for addresses of objects.
    "an array of objects out of bytes": pickle.dumps(
        Call(list, Call(numpy.ndarray, (1,), "O", _POINTERS))
    ),
    "an array of a forged dtype": pickle.dumps(Call(numpy.ndarray, (1,), _FORGED_DTYPE, _POINTERS)),
    # Few bytes that take much memory.
    "a memo of 1 GB": b"\x80\x05N" + pickle.LONG_BINPUT + struct.pack("<I", 1 << 26) + b".",
    "a list out of a range": pickle.dumps(Call(list, range(10_000_000))),
    "a set out of a range": pickle.dumps(Call(set, range(3_000_000))),
    "a counter out of a range": pickle.dumps(Call(collections.Counter, range(3_000_000))),
    "a deque out of a range": pickle.dumps(Call(collections.deque, range(10_000_000))),
    "a size out of a range": pickle.dumps(Call(torch.Size, range(5_000_000))),
    "bytes of 1 GB": pickle.dumps(Call(bytes, 1 << 30)),
    "a string of 1 TB": b"\x80\x05" + pickle.BINUNICODE8 + struct.pack("<Q", 1 << 40) + b".",
    "bytes of 1 TB": b"\x80\x05" + pickle.BINBYTES8 + struct.pack("<Q", 1 << 40) + b".",
    "an array of 1 TB": pickle.dumps(Call(numpy.ndarray, (1 << 40,))),
    "a tensor of 1 TB": pickle.dumps(Call(torch.Tensor, 1 << 38)),
    # Few bytes that take for ever.
    "a fraction of a huge power": pickle.dumps(Call(fractions.Fraction, "1e100000000")),
    "an integer of a huge power": pickle.dumps(Call(int, Call(decimal.Decimal, "1e100000000"))),
    # Depths at which C runs out of stack.
    "a key of tuples in tuples": _nested_key(300_000),
    "lists in lists": b"\x80\x05" + b"(" * 300_000 + b"l" * 300_000 + b".",
    "sharing without end": _laughs(200),
    # Classes of the running program, changed.
    "attributes for a class": b"\x80\x05"
    + _bare("argparse", "Namespace")
    + b"N}\x8c\x03fooK\x01s\x86b.",
}
"""Pickles that run nothing, and are not to be read all the same."""

ODD_ROWS: dict[str, Any] = {
    "slot in a list": {0: ["weight"]},
    "dtype a number": {1: 5},
    "dtype of a dunder": {1: "__name__"},
    "dtype that cannot be made": {1: "quint8"},
    "shape a number": {2: 5},
    "shape a text": {2: "20"},
    "shape beyond 64 bits": {2: [1 << 70]},
    "shape whose product overflows": {2: [1 << 40, 1 << 40], 6: [0, [0, 0]]},
    "shape of many dimensions": {2: [1] * 5000, 6: [0, [0] * 5000]},
    "empty, and beyond 64 bits": {2: [0, 1 << 70]},
    "device a number": {3: 5},
    "device a list": {3: []},
    "device that is none": {3: "nowhere"},
    "device with a huge number": {3: f"cuda:{1 << 70}"},
    "device null": {3: None},
    "kind a list": {4: []},
    "gradients for integers": {1: "int32", 5: 1},
    "view a number": {6: 5},
    "view with a huge offset": {6: [1 << 70, [30, 1]]},
    "view with huge strides": {2: [1, 1], 6: [0, [1 << 70, 1]]},
    "view of nothing with a huge offset": {2: [0], 6: [4 << 60, [1]]},
    "no data, beyond 64 bits": {0: None, 2: [1 << 70], 6: [0, [1]]},
    "no data, and no view": {0: None, 6: None},
}
"""What a row of a table of tensors says instead, by column."""


_NUMBERS = st.sampled_from(
    [0, 1, -1, 3, 7, 8, 24, 255, 2400, 4096, 2**31, 2**32, 2**62, 2**63, 2**64, 10**19, 10**30]
)
_TEXTS = st.sampled_from(
    [
        *("", "a", "weight", "float32", "int64", "F32", "U8", "cpu", "meta", "cuda:7", "tensor"),
        *("__metadata__", "__digests__", "__skeleton__", "../../x", "\0", "\ud800", "٣", "²"),
        *("0", "1", "2", "-1", "007", "20000000", "9" * 18, "9" * 19, "1" + "0" * 19, "9" * 5000),
        *("localckpt-4", "localckpt-6", "job", "x" * 300),
    ]
)
_ODD = st.recursive(
    st.none() | st.booleans() | _NUMBERS | _TEXTS | st.sampled_from([1.5, -0.0, 1e300]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXTS, inner, max_size=2),
    max_leaves=5,
)
_SHAPES = st.lists(_NUMBERS, max_size=4)


def claiming(image: bytes, **metadata: str) -> bytes:
    """The image with other things said in its metadata, whether they make sense or not."""
    start = 8 + int.from_bytes(image[:8], "little")
    entries = json.loads(image[8:start])
    entries["__metadata__"] |= metadata
    return _resealed(
        _with_header(json.dumps(entries, separators=(",", ":")).encode(), image[start:]), image
    )


@st.composite
def identities(draw: st.DrawFn, image: bytes) -> Forged:
    """The image with another identity."""
    keys = ["epoch", "sequence", "iteration", "rank", "world_size", "session", "format"]
    claims = draw(st.dictionaries(st.sampled_from(keys), _TEXTS, min_size=1, max_size=2))
    return Forged(f"{claims!r:.200}", claiming(image, **claims))


@st.composite
def headers(draw: st.DrawFn, image: bytes) -> Forged:
    """The image with a header that says something else."""
    start = 8 + int.from_bytes(image[:8], "little")
    entries = json.loads(image[8:start])
    steps = [_change_header(draw, entries) for _ in range(draw(st.integers(1, 3)))]
    text = json.dumps(entries, separators=(",", ":")).encode()
    extra = draw(st.sampled_from(["", "", "", "again", "nested", "behind"]))
    if extra == "again":
        text = text[:-1] + b"," + text[1:]
    elif extra == "nested":
        text = text[:-1] + b',"deep":' + b"[" * 3000 + b"]" * 3000 + b"}"
    elif extra == "behind":
        text += b"{}"
    forged = _with_header(text, image[start:])
    claimed = int.from_bytes(forged[:8], "little")
    if draw(st.integers(0, 5)) == 0:
        claimed = draw(st.sampled_from([0, 1, claimed - 8, claimed + 8, 10**10, 2**63, 2**64 - 1]))
        forged = claimed.to_bytes(8, "little") + forged[8:]
    return Forged(f"{', '.join(steps)}, {extra}, {claimed=}", _resealed(forged, image))


def _with_header(text: bytes, behind: bytes) -> bytes:
    length = -(-(len(text) + 8) // 4096) * 4096
    return (length - 8).to_bytes(8, "little") + text.ljust(length - 8) + behind


def _change_header(draw: st.DrawFn, entries: dict[str, Any]) -> str:
    metadata = draw(st.booleans())
    names = ["__metadata__"] if metadata else sorted(entries)
    if not names:
        return "nothing"
    name = draw(st.sampled_from(names))
    entry = entries.get(name)
    how = draw(st.sampled_from(["field", "field", "field", "drop", "odd", "rename", "offsets"]))
    if how == "field" and isinstance(entry, dict) and entry:
        key = draw(st.sampled_from(sorted(entry)))
        entry[key] = value = draw(_TEXTS if metadata else _ODD | _SHAPES)
        return f"{name}.{key} = {value!r:.80}"
    if how == "offsets" and isinstance(entry, dict) and isinstance(entry.get("shape"), list):
        shift = draw(st.sampled_from([-8, -4, -1, 1, 4, 8, 4096]))
        entry["data_offsets"] = [n + shift if type(n) is int else n for n in _pair(entry)]
        return f"{name} shifted by {shift}"
    if how == "rename":
        entries[to := draw(_TEXTS)] = entries.pop(name, None)
        return f"{name} is called {to!r:.80}"
    if how == "odd":
        entries[name] = value = draw(_ODD)
        return f"{name} = {value!r:.80}"
    entries.pop(name, None)
    return f"no {name}"


def _pair(entry: dict[str, Any]) -> list[Any]:
    offsets = entry.get("data_offsets")
    return offsets if isinstance(offsets, list) else [0, 0]


def _resealed(forged: bytes, image: bytes) -> bytes:
    """With digests that are right, if it can be said for what."""
    try:
        return sealed(forged, identity_in(forged))
    except Exception:  # noqa: BLE001 - then it is only a file that is refused
        return sealed(forged, identity_in(image))


@st.composite
def tables(draw: st.DrawFn, image: bytes) -> Forged:
    """The image with a table of tensors that says something else."""
    parts = Parts.of(image)
    rows: Any = parts.rows
    steps = []
    for _ in range(draw(st.integers(1, 3))):
        number = draw(st.integers(0, len(rows) - 1))
        row = rows[number]
        how = draw(st.sampled_from(["field", "field", "field", "row", "drop", "more"]))
        if how == "field" and isinstance(row, list) and row:
            column = draw(st.integers(0, len(row) - 1))
            views = st.tuples(_NUMBERS, _SHAPES).map(list)
            row[column] = value = draw(_ODD | _SHAPES | views)
            steps.append(f"row {number}, column {column} = {value!r:.80}")
        elif how == "drop" and len(rows) > 1:
            del rows[number]
            steps.append(f"no row {number}")
        elif how == "more":
            rows.append(row)
            steps.append(f"row {number} again")
        else:
            rows[number] = value = draw(_ODD)
            steps.append(f"row {number} = {value!r:.80}")
    return Forged(", ".join(steps), parts.with_rows(rows).image())


_ALLOWED = [(module, name) for module, names in sorted(_VALUES.items()) for name in names]
_CONSTANTS = st.sampled_from(
    [
        *(b"N", b"\x88", b"\x89", b"K\x00", b"K\x01", b"K\x07", b"M\xff\xff", b"J\xff\xff\xff\xff"),
        *(b"\x8c\x00", b"\x8c\x01a", b"\x8c\x01O", b"\x8c\x02u1", b"\x8c\x02V8", b"\x8c\x05dtype"),
        *(b"C\x00", b"C\x08AAAAAAAA", b"G\x3f\xf8" + bytes(6)),
        *(b"K\x00Q", b"K\x01Q", b"K\x63Q", b"NQ", b"\x96" + struct.pack("<Q", 4) + b"abcd"),
        *(b"h\x00", b"h\x01", b"j\xff\x00\x00\x00"),
    ]
)


def _values(marker: str) -> st.SearchStrategy[bytes]:
    refused = [("os", "system"), ("posix", "system"), ("builtins", "eval"), ("builtins", "exec")]
    run = pickle.dumps(f"touch {marker}", 0)[:-1]
    names = st.sampled_from(_ALLOWED) | st.sampled_from(_ALLOWED + refused)
    classes = names.map(lambda name: _bare(*name))
    leaves = _CONSTANTS | classes | st.just(run)

    def more(inner: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
        several = st.lists(inner, max_size=3).map(b"".join)
        tuples = several.map(lambda items: b"(" + items + b"t")
        lists = several.map(lambda items: b"](" + items + b"e")
        pairs = st.tuples(inner, inner).map(b"".join)
        dicts = st.lists(pairs, max_size=2).map(lambda items: b"}(" + b"".join(items) + b"u")
        sets = several.map(lambda items: b"\x8f(" + items + b"\x90")
        calls = st.tuples(classes, tuples).map(lambda call: b"".join(call) + b"R")
        made = st.tuples(classes, tuples).map(lambda call: b"".join(call) + b"\x81")
        built = st.tuples(calls | made | classes, inner).map(lambda pair: b"".join(pair) + b"b")
        kept = inner.map(lambda value: value + b"\x94")
        return tuples | lists | dicts | sets | calls | made | built | kept

    return st.recursive(leaves, more, max_leaves=8)


@st.composite
def pickles(draw: st.DrawFn, image: bytes, marker: str) -> Forged:
    """The image with a pickle that makes whatever it can."""
    body = draw(_values(marker))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 4]))):
        place = draw(st.integers(0, len(body)))
        body = body[:place] + draw(st.binary(min_size=1, max_size=2)) + body[place + 1 :]
    pickled = b"\x80\x05" + body + b"."
    return Forged(repr(pickled), Parts.of(image).replace(pickled=pickled).image())
