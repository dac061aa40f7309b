"""Bytes of tensors: addresses, the span that a tensor touches, and copies of any dtype."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Those that torch.iinfo knows, and bool.
_INTEGER_DTYPES = {
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
}
# Other classes may have no memory of their own.
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_number(dtype: torch.dtype) -> bool:
    """Return whether all programs of torch know the dtype: no quantized one, no bits."""
    return dtype.is_floating_point or dtype.is_complex or dtype in _INTEGER_DTYPES


def storage_bytes(tensor: torch.Tensor, span: tuple[int, int]) -> torch.Tensor:
    """Return a uint8 view of bytes ``span[0]`` to ``span[1]`` of a tensor's storage."""
    result = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return result.set_(tensor.untyped_storage(), span[0], (span[1] - span[0],), (1,))


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a flat tensor as bytes, even if a dimension of size 1 has stride 0 (``view`` fails)."""
    start = int(tensor.storage_offset()) * tensor.itemsize
    return storage_bytes(tensor, (start, start + tensor.numel() * tensor.itemsize))


def integer_view(tensor: torch.Tensor, itemsize: int | None = None) -> torch.Tensor:
    """View a tensor's values, or flat bytes, as integers of ``itemsize`` bytes."""
    return tensor.view(_INTEGERS.get(itemsize or tensor.itemsize, torch.complex128))


def narrowed(tensor: torch.Tensor, starts: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, size)
    return tensor


def copy_values(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Call ``target.copy_(source)`` for two tensors of one shape and any dtype, without overlap."""
    if is_host_run(target) and is_host_run(source):
        # torch would share the work among its threads, which wait for each other for milliseconds
        # when another process keeps a core busy.
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel() * source.itemsize)
        return
    integers = _INTEGERS.get(source.itemsize)
    if integers is not None and not is_lazy(target) and not is_lazy(source):
        # torch cannot copy the values of a dozen dtypes.
        target, source = target.view(integers), source.view(integers)
    target.copy_(source, non_blocking=non_blocking)


def is_host_run(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's value is one run of bytes of host memory, and nothing else."""
    return type(tensor) in _PLAIN and tensor.is_cpu and is_flat(tensor)


def byte_span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the range of bytes, start and end, that a tensor touches in its storage."""
    if tensor.numel() == 0:
        return (0, 0)
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset())
    return (start * tensor.itemsize, (start + reach + 1) * tensor.itemsize)


def composing(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """Return the tensors that a tensor is made of; ``None`` for one with memory of its own."""
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if callable(flatten := getattr(tensor, "__tensor_flatten__", None)):
        parts = (getattr(tensor, name) for name in flatten()[0])
        return [part for part in parts if isinstance(part, torch.Tensor)]
    return None


def same_view(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors of one storage are the same view of it."""
    return (
        a.storage_offset() == b.storage_offset()
        and a.dtype == b.dtype
        and a.shape == b.shape
        and a.stride() == b.stride()
    )


def is_flat(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's value is one run of bytes in its storage."""
    return tensor.is_contiguous() and not is_lazy(tensor)


def is_lazy(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a conjugation or negation that its storage does not hold yet."""
    return tensor.is_conj() or tensor.is_neg()


def storage_address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage, in host or device memory."""
    return tensor.untyped_storage().data_ptr()
