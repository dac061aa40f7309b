"""Files that somebody made up: their digests are right, and what they say is not.

Each is a small image with a part that was changed by hand, or at random.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch

from tests.faults.images import Parts, identity_in, sealed

__all__ = ["ODD_ROWS", "claiming", "forged_header", "forged_table", "small_state"]


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


_ODD: tuple[Any, ...] = (
    *(None, True, 0, 1, -1, 3, 7, 8, 24, 255, 2400, 4096, 2**31, 2**32, 2**62, 2**63, 10**30),
    *(1.5, -0.0, 1e300, [], {}, [[0]], [20, 30], [1 << 40, 1 << 40], {"a": None}),
    *("", "a", "weight", "float32", "int64", "F32", "U8", "cpu", "meta", "cuda:7", "tensor", "\0"),
    *("__metadata__", "__digests__", "__skeleton__", "../../x", "\ud800", "٣", "²", "x" * 300, "0"),
    *("-1", "007", "20000000", "9" * 18, "9" * 19, "9" * 5000, "localckpt-4", "localckpt-6", "job"),
)


def changed(draw: random.Random, value: Any) -> Any:
    """JSON with one place of it changed: another value, a number shifted, one dropped or again."""
    places = list(_places(value))
    if not places:
        return value
    holder, key = draw.choice(places)
    how = draw.choice(("odd", "odd", "shift", "drop", "again", "rename"))
    if how == "shift" and type(holder[key]) is int:
        holder[key] += draw.choice((-4096, -8, -4, -1, 1, 4, 8, 4096))
    elif how == "drop":
        del holder[key]
    elif how == "again" and isinstance(holder, list):
        holder.append(holder[key])
    elif how == "rename" and isinstance(holder, dict):
        holder[str(draw.choice(_ODD))] = holder.pop(key)
    else:
        holder[key] = draw.choice(_ODD)
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """All places in JSON: what holds it, and its key or number there."""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


def claiming(image: bytes, **metadata: str) -> bytes:
    """The image with other things said in its metadata, whether they make sense or not."""
    entries, start = _header(image)
    entries["__metadata__"] |= metadata
    return _resealed(_with_header(_compact(entries), image[start:]), image)


def forged_header(image: bytes, seed: int) -> bytes:
    """The image with a header that says something else."""
    draw = random.Random(seed)
    entries, start = _header(image)
    for _ in range(draw.choice((1, 1, 2, 3))):
        # Half of them in what the shard says that it is.
        metadata = entries.get("__metadata__")
        is_metadata = isinstance(metadata, dict) and draw.random() < 0.5
        changed(draw, metadata if is_metadata else entries)
    text = _compact(entries)
    if draw.random() < 0.2:
        deep = b',"deep":' + b"[" * 3000 + b"]" * 3000 + b"}"
        text = draw.choice((text[:-1] + b"," + text[1:], text[:-1] + deep, text + b"{}"))
    forged = _with_header(text, image[start:])
    if draw.random() < 0.2:
        claimed = int.from_bytes(forged[:8], "little")
        other = draw.choice((0, 1, claimed - 8, claimed + 8, 10**10, 2**63, 2**64 - 1))
        forged = other.to_bytes(8, "little") + forged[8:]
    return _resealed(forged, image)


def forged_table(image: bytes, seed: int) -> bytes:
    """The image with a table of tensors that says something else."""
    draw, parts = random.Random(seed), Parts.of(image)
    rows = parts.rows
    for _ in range(draw.choice((1, 1, 2, 3))):
        changed(draw, rows)
    return parts.with_rows(rows).image()


def _header(image: bytes) -> tuple[dict[str, Any], int]:
    start = 8 + int.from_bytes(image[:8], "little")
    return json.loads(image[8:start]), start


def _compact(entries: Any) -> bytes:
    return json.dumps(entries, separators=(",", ":")).encode()


def _with_header(text: bytes, behind: bytes) -> bytes:
    length = -(-(len(text) + 8) // 4096) * 4096
    return (length - 8).to_bytes(8, "little") + text.ljust(length - 8) + behind


def _resealed(forged: bytes, image: bytes) -> bytes:
    """With digests that are right, if it can be said for what."""
    try:
        return sealed(forged, identity_in(forged))
    except Exception:  # noqa: BLE001 - then it is only a file that is refused
        return sealed(forged, identity_in(image))
