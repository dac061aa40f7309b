"""Views of the tensors of a captured image, and a look for values that are not finite.

No value is copied, and the skeleton is not unpickled: each tensor has its name in the image.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from localckpt.state_dict.identify import read_header
from localckpt.state_dict.layout import TensorSlot
from localckpt.state_dict.source import MemorySource
from localckpt.state_dict.tensor_table import dtype_named

__all__ = ["find_not_finite", "tensor_views"]

_CHUNK_NBYTES = 8 << 20


def tensor_views(image: memoryview) -> dict[str, torch.Tensor]:
    """Return the tensors of a captured image by name, in the image's own memory.

    A tensor of a dtype that safetensors cannot name, and bytes that several tensors share, are
    plain bytes.

    Raises:
        CorruptShardError: The header is damaged.
    """
    header = read_header(MemorySource(image))
    return {name: _view(image, header.data_start, slot) for name, slot in header.slots.items()}


def find_not_finite(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Look for the first tensor with a value that is infinite or no number.

    Returns:
        The name of the tensor and the value; ``None`` if all values are finite.
    """
    for name, tensor in tensors.items():
        if tensor.is_floating_point() or tensor.is_complex():
            values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            flat = values.reshape(-1)
            for part in torch.split(flat, max(1, _CHUNK_NBYTES // flat.element_size())):
                if (found := _worst(part)) is not None:
                    return f"{name} has the value {found}"
    return None


def _view(image: memoryview, data_start: int, slot: TensorSlot) -> torch.Tensor:
    dtype, start = dtype_named(slot.dtype), data_start + slot.offset
    if not slot.nbytes:
        return torch.empty(slot.shape, dtype=dtype)
    return torch.frombuffer(image[start : start + slot.nbytes], dtype=dtype).view(slot.shape)


def _worst(part: torch.Tensor) -> float | None:
    """Return a value that is not finite; ``None`` if there is none."""
    if not part.numel():
        return None
    # torch has no minimum of numbers of a byte.
    values = part.float() if part.element_size() == 1 else part
    # One pass; where any value is no number, both are none.
    for bound in torch.aminmax(values):
        if not math.isfinite(value := bound.item()):
            return float(value)
    return None
