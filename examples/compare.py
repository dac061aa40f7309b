"""Whether two trainings ended bit for bit alike."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from examples.report import Comparison

__all__ = ["compare"]


def compare(reference: Path, other: Path, ranks: int) -> Comparison:
    """Compare the bytes of everything that the ranks held at the end of two trainings."""
    nbytes, values, different = 0, 0, []
    for rank in range(ranks):
        expected = _end_of(reference, rank)
        actual = _end_of(other, rank)
        for name in sorted(expected.keys() | actual.keys()):
            values += 1
            nbytes += len(expected.get(name, b""))
            if expected.get(name) != actual.get(name):
                different.append(name)
    return Comparison(nbytes, values, different)


def _end_of(folder: Path, rank: int) -> dict[str, bytes]:
    state = torch.load(folder / f"rank{rank}.pt", weights_only=True)
    return dict(_leaves(state, f"rank {rank}"))


def _leaves(value: Any, name: str) -> Iterator[tuple[str, bytes]]:
    """Every value of a state by its path, as bytes that are equal only for the same bits."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{name}[{index}]")
    elif isinstance(value, torch.Tensor):
        kind = f"{value.dtype} {tuple(value.shape)}:".encode()
        yield name, kind + value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    else:
        exact = value.hex() if isinstance(value, float) else repr(value)
        yield name, f"{type(value).__name__}:{exact}".encode()
