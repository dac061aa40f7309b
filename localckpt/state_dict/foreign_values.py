"""Pickling of values of numpy and torch that are not tensors: arrays, generators, constants.

A large array is stored among the tensors, so it is saved and loaded as fast as a tensor. numpy
itself pickles an array only if it holds Python objects.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy
import torch

from localckpt.errors import CorruptShardError
from localckpt.memory.host_memory import memory_at

__all__ = [
    "ArrayTensor",
    "is_data",
    "reduce_array",
    "reduce_generator",
    "restore_array",
    "restore_generator",
    "type_of_constant",
]

# A smaller array is written into the skeleton: its slot in the header would be larger than it.
_SMALL_NBYTES = 4096

_TORCH_DTYPES = {
    numpy.dtype(name): getattr(torch, name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64"),
    )
}


class ArrayTensor(torch.Tensor):
    """Tensor view of an array's bytes.

    Attributes:
        array: The array in the state.
        run: Contiguous array with the same values, which owns the memory of the tensor.
    """

    # Slots, because the __dict__ of a tensor holds the user's attributes (marks.py).
    __slots__ = ("array", "run")
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    array: numpy.ndarray[Any, Any]
    run: numpy.ndarray[Any, Any]


def is_data(value: Any) -> bool:
    """Return whether a value is an array that is stored among the tensors."""
    return (
        type(value) is numpy.ndarray and value.nbytes >= _SMALL_NBYTES and not _has_objects(value)
    )


def reduce_array(array: numpy.ndarray[Any, Any]) -> Any:
    """Reduce an array as ``__reduce__`` does; ``NotImplemented`` if numpy must pickle it."""
    if type(array) is not numpy.ndarray or _has_objects(array):
        return NotImplemented
    order: Literal["C", "F"] = "F" if array.flags.fnc else "C"
    data: Any
    if array.nbytes < _SMALL_NBYTES:
        data = array.tobytes(order)
    else:
        data = _bytes_of(array)
    return restore_array, (data, array.dtype, array.shape, order, array.flags.writeable)


def _has_objects(array: numpy.ndarray[Any, Any]) -> bool:
    # Kind "T", numpy's variable-length text, is made of pointers, too.
    return bool(array.dtype.hasobject) or array.dtype.kind == "T"


def _bytes_of(array: numpy.ndarray[Any, Any]) -> ArrayTensor:
    run = array.T if array.flags.fnc else array
    if not run.flags.c_contiguous:
        run = numpy.ascontiguousarray(run)
    address, _ = run.__array_interface__["data"]
    flat = torch.frombuffer(memory_at(address, run.nbytes), dtype=torch.uint8)
    if run.dtype in _TORCH_DTYPES:
        flat = flat.view(_TORCH_DTYPES[run.dtype]).view(run.shape)
    tensor = flat.as_subclass(ArrayTensor)
    tensor.array, tensor.run = array, run
    return tensor


def restore_array(
    data: bytes | torch.Tensor,
    dtype: numpy.dtype[Any],
    shape: tuple[int, ...],
    order: str,
    is_writable: bool,
) -> numpy.ndarray[Any, Any]:
    """Make an array from its bytes; a tensor's bytes are not copied."""
    if isinstance(data, torch.Tensor):
        if not data.is_cpu or not data.is_contiguous() or dtype.hasobject:
            raise CorruptShardError("the skeleton makes an array of what is no array")
        flat = data.detach().reshape(-1).view(torch.uint8).numpy()
    else:
        flat = numpy.frombuffer(bytearray(data), dtype=numpy.uint8)
    # Neither view() nor reshape() works with an item size of 0.
    array = numpy.ndarray(shape, dtype, flat, order="F" if order == "F" else "C")
    if array.nbytes != flat.nbytes:
        raise CorruptShardError(
            f"the skeleton says {array.nbytes} bytes of an array that has {flat.nbytes}"
        )
    array.flags.writeable = is_writable
    return array


def reduce_generator(generator: torch.Generator) -> Any:
    """Reduce a torch generator and its state as ``__reduce__`` does."""
    state = generator.get_state()
    return restore_generator, (str(generator.device), state.numpy().tobytes())


def restore_generator(device: str, state: bytes) -> torch.Generator:
    """Make a torch generator on a device, with a saved state."""
    generator = torch.Generator(device)
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return generator


def type_of_constant(value: Any) -> type:
    """Return the class of a constant, which cannot be pickled by name."""
    if value is not None and value is not Ellipsis and value is not NotImplemented:
        raise CorruptShardError("the skeleton asks for the class of another value")
    return type(value)
