"""Digests of values, equal for equal values of different processes.

Bytes of a pickle are not: they depend on which equal objects are one object, and on the order of
sets. Dicts with equal items are equal in any order.
"""

from __future__ import annotations

import inspect
import struct
from collections.abc import Callable
from typing import Any

import numpy
import torch
import xxhash

from localckpt.memory.tensor_bytes import composing, flat_bytes
from localckpt.state_dict.values import Placeholder

__all__ = ["digest_of"]

# Deeper values are unequal to all others: rather an error that names them than no end.
_MAX_DEPTH = 200
_PLAIN = (bool, int, str, bytes, type(None))


def digest_of(value: Any, of_placeholder: Callable[[Placeholder], str]) -> str:
    """Compute the digest of a value.

    Args:
        value: Anything that a skeleton can hold.
        of_placeholder: Returns the digest of the tensors that a placeholder stands for.
    """
    return str(_digest(value, of_placeholder, 0).hexdigest())


def _digest(value: Any, of_placeholder: Callable[[Placeholder], str], depth: int) -> Any:
    kind = type(value)
    hasher = xxhash.xxh3_64(f"{kind.__module__}.{kind.__qualname__}|".encode())
    if depth > _MAX_DEPTH:
        hasher.update(str(id(value)).encode())
        return hasher

    def inner(part: Any) -> bytes:
        return bytes(_digest(part, of_placeholder, depth + 1).digest())

    if kind is float:
        hasher.update(struct.pack("<d", value))
    elif kind is str:
        hasher.update(value.encode(errors="surrogatepass"))
    elif kind is bytes:
        hasher.update(value)
    elif kind in _PLAIN:
        hasher.update(repr(value).encode())
    elif kind is Placeholder:
        hasher.update(of_placeholder(value).encode())
    elif isinstance(value, torch.Tensor):
        _add_tensor(hasher, value)
    elif isinstance(value, torch.Generator):
        hasher.update(str(value.device).encode())
        _add_tensor(hasher, value.get_state())
    elif kind is numpy.ndarray and not value.dtype.hasobject:
        hasher.update(f"{value.dtype.str}{value.shape}".encode())
        hasher.update(numpy.ascontiguousarray(value).tobytes())
    elif isinstance(value, dict) and not hasattr(value, "__dict__"):
        for item in sorted(inner(key) + inner(member) for key, member in value.items()):
            hasher.update(item)
    elif kind in (set, frozenset):
        for item in sorted(map(inner, value)):
            hasher.update(item)
    elif kind in (list, tuple) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        for member in value:
            hasher.update(inner(member))
    elif isinstance(value, type) or inspect.isroutine(value):
        hasher.update(f"{value.__module__}.{value.__qualname__}".encode())
    else:
        _add_object(hasher, value, inner)
    return hasher


def _add_object(hasher: Any, value: Any, inner: Callable[[Any], bytes]) -> None:
    """Add an object by what pickle would make it of."""
    reduced = value.__reduce_ex__(4)
    if isinstance(reduced, str):
        hasher.update(reduced.encode())
        return
    make, arguments, *rest = (*reduced, None, None, None)[:5]
    hasher.update(f"{make.__module__}.{make.__qualname__}".encode())
    members = [] if rest[1] is None else list(rest[1])
    items = [] if rest[2] is None else dict(rest[2])
    for part in (tuple(arguments), rest[0], members, items):
        hasher.update(inner(part))


def _add_tensor(hasher: Any, tensor: torch.Tensor) -> None:
    shape = tensor.numel() if tensor.is_nested else tuple(tensor.shape)
    hasher.update(f"{tensor.dtype}{shape}{tensor.layout}".encode())
    if tensor.is_meta:
        return
    if (parts := composing(tensor)) is not None:
        for part in parts:
            _add_tensor(hasher, part)
        return
    run = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    hasher.update(flat_bytes(run).numpy())
