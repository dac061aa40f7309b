"""Files that somebody made up: their digests are right, and what they say is not.

Each is a small image with a part that was changed by hand, or at random.
"""

from __future__ import annotations

import json
from typing import Any

import numpy
import torch
from hypothesis import strategies as st

from tests.faults.images import Parts, identity_in, sealed

__all__ = [
    "ODD_ROWS",
    "Forged",
    "claiming",
    "headers",
    "identities",
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
