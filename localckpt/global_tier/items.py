"""What the items of a save plan hold: tensors, and everything else as ``torch.save`` writes it."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any, TypeGuard

import torch
import xxhash
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from localckpt.errors import CheckpointingException
from localckpt.global_tier.framing import is_plain
from localckpt.global_tier.objects import require_loadable

__all__ = ["ItemReader"]

# Values that tell by their text whether they changed, and that every reader takes.
_SIMPLE = (int, float, bool, str, type(None))
# Readers take no integers of more bytes.
_INTEGER_BITS = 8 * 255 - 1


class ItemReader:
    """Asks a planner for the items of one save after the other.

    Args:
        safe_globals: Classes and functions that objects may name, beyond torch's own.
    """

    def __init__(self, safe_globals: Iterable[Any] = ()) -> None:
        self._safe_globals = tuple(safe_globals)
        self._simple: dict[str, tuple[str, memoryview]] = {}
        self._checked: set[int] = set()
        self._checked_kinds: set[tuple[type, torch.dtype]] = set()

    def read(self, item: WriteItem, planner: SavePlanner) -> torch.Tensor | memoryview:
        """An item's values: a plain tensor of the item's dtype and shape, or a run of bytes.

        Raises:
            UnsafeGlobalError: It names a class that may not be loaded from a file.
            CheckpointingException: It could not be loaded again for another reason.
        """
        if item.type == WriteItemType.BYTE_IO:
            return self._read_object(item, planner)
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, torch.Tensor), "a planner gives tensors for items that are"
        if tensor.layout is not torch.strided:
            raise CheckpointingException(
                f"{item.index.fqn} is a {tensor.layout} tensor, whose parts cannot be loaded: "
                f"save tensor.to_dense(), or its indices and values"
            )
        if tensor.is_quantized:
            raise CheckpointingException(
                f"{item.index.fqn} is quantized, and its parts cannot be loaded: save "
                f"tensor.dequantize(), or tensor.int_repr() and its scale"
            )
        tensor = tensor.detach()
        data = item.tensor_data
        assert data is not None
        if is_plain(tensor, data.properties.dtype, data.chunk.sizes):
            return tensor
        stream = io.BytesIO()
        torch.save(tensor.cpu(), stream)
        kind = type(tensor), tensor.dtype
        if kind not in self._checked_kinds:
            require_loadable(item.index.fqn, stream, self._safe_globals)
            self._checked_kinds.add(kind)
        return _content(stream)

    def _read_object(self, item: WriteItem, planner: SavePlanner) -> memoryview:
        # What a planner of the user's makes of an object is known only when it is made, and is no
        # more than bytes to us.
        if not _looks_up(planner):
            return _content(_made(item, planner))
        name, value = item.index.fqn, planner.lookup_object(item.index)
        if type(value) in _SIMPLE and not (
            type(value) is int and value.bit_length() > _INTEGER_BITS
        ):
            text = f"{type(value).__name__} {value!r}"
            known, data = self._simple.get(name, ("", memoryview(b"")))
            if text != known:
                data = _content(_made(item, planner))
                self._simple[name] = (text, data)
            return data
        stream = _made(item, planner)
        data = _content(stream)
        digest = xxhash.xxh3_64_intdigest(data)
        if digest not in self._checked:
            require_loadable(name, stream, self._safe_globals)
            self._checked.add(digest)
        return data


def _made(item: WriteItem, planner: SavePlanner) -> io.BytesIO:
    stream = planner.resolve_data(item)
    assert isinstance(stream, io.BytesIO), "a planner gives bytes for items that are"
    return stream


def _content(stream: io.BytesIO) -> memoryview:
    """The bytes of a stream, which are not copied.

    With ``getbuffer`` the stream could not be closed while they are referred to, which Python 3.13
    complains of on stderr when it collects both.
    """
    return memoryview(stream.getvalue())


def _looks_up(planner: SavePlanner) -> TypeGuard[DefaultSavePlanner]:
    """Whether what is saved is what the planner finds, and nothing that it makes of it."""
    if not isinstance(planner, DefaultSavePlanner):
        return False
    kind = type(planner)
    return (
        kind.resolve_data is DefaultSavePlanner.resolve_data
        and kind.transform_object is DefaultSavePlanner.transform_object
    )
