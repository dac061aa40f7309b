"""How ``torch.save`` frames one tensor: the bytes before its values, and those after them.

A checkpoint of torch.distributed.checkpoint holds each tensor as ``torch.save`` writes it. With the
frame known, saving one is a copy of its values between two short runs of bytes.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

__all__ = ["Frame", "frame_of", "is_plain"]


class Frame(NamedTuple):
    """What stands around the values of a contiguous tensor in host memory."""

    head: bytes
    tail: bytes


def frame_of(dtype: torch.dtype, shape: Sequence[int]) -> Frame:
    """The frame of any tensor of this dtype and shape, as torch itself writes it."""
    recorder = _Recorder()
    with torch.serialization.skip_data():
        torch.save(torch.empty(tuple(shape), dtype=dtype), recorder)  # type: ignore[arg-type]
    return Frame(*(bytes(part) for part in recorder.parts))


def is_plain(tensor: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> bool:
    """Whether the values of a tensor, one after the other, are all that there is to it."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_meta
        and tensor.dtype is dtype
        and tensor.shape == torch.Size(shape)
    )


class _Recorder(io.RawIOBase):
    """Keeps what is written before and after the values, which torch leaves out by seeking."""

    def __init__(self) -> None:
        self.parts = (bytearray(), bytearray())
        self._part = self.parts[0]
        self._position = 0

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._part += data
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence != io.SEEK_CUR or self._part is self.parts[1]:
            raise io.UnsupportedOperation("torch.save seeks once, over the values of the tensor")
        self._part = self.parts[1]
        self._position += offset
        return self._position

    def tell(self) -> int:
        return self._position
