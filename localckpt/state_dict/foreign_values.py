"""Pickling of values of numpy and torch that are not tensors: arrays, numbers, dtypes, generators.

Each is written as plain data, and checked before a constructor of numpy is called. A large array
is stored among the tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, NoReturn

import numpy
import torch

from localckpt.errors import CheckpointingException, CorruptShardError
from localckpt.memory.host_memory import memory_at

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
    """Tensor view of an array's bytes, whose memory its contiguous ``run`` owns."""

    # Slots, because the __dict__ of a tensor holds the user's attributes (marks.py).
    __slots__ = ("array", "run")
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    array: numpy.ndarray[Any, Any]
    run: numpy.ndarray[Any, Any]


def reduce_numpy(value: Any) -> Any:
    """Reduce a value of numpy as ``__reduce__`` does; ``NotImplemented`` for other values."""
    kind: Any = type(value)
    if kind is numpy.ndarray:
        return restore_array, _parts_of(value)
    if isinstance(value, numpy.ndarray):
        # A class that pickles itself may hold more than its items.
        if kind.__reduce__ == numpy.ndarray.__reduce__:
            raise CheckpointingException(
                f"{kind.__module__}.{kind.__qualname__} is a class of arrays: save "
                f"numpy.asarray(array), and make it anew after loading"
            )
        return NotImplemented
    if isinstance(value, numpy.generic):
        return restore_number, _parts_of(numpy.asarray(value))
    if isinstance(value, numpy.dtype):
        return restore_dtype, _described(value)
    if not str(kind.__module__).startswith("numpy.random"):
        return NotImplemented
    reduced = value.__reduce__()
    if isinstance(value, numpy.random.BitGenerator):
        return restore_bit_generator, (kind.__name__, reduced[2])
    if isinstance(value, numpy.random.RandomState):
        return restore_random, (value._bit_generator, value.get_state(legacy=False))
    if isinstance(value, numpy.random.Generator):
        return restore_random, (value.bit_generator,)
    if kind is numpy.random.SeedSequence:
        _, checksum, state = reduced[1]
        return restore_seeds, (checksum, reduced[2] if state is None else state)
    return NotImplemented


def _parts_of(array: numpy.ndarray[Any, Any]) -> tuple[Any, ...]:
    """Return the arguments of :func:`restore_array`."""
    order: Literal["C", "F"] = "F" if array.flags.fnc else "C"
    described = _described(array.dtype)
    data = array.tobytes(order) if array.nbytes < _SMALL_NBYTES else _bytes_of(array)
    return data, described, array.shape, order, array.flags.writeable


def _bytes_of(array: numpy.ndarray[Any, Any]) -> ArrayTensor:
    run = numpy.asarray(array)
    run = run.T if run.flags.fnc else run
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
    described: tuple[str],
    shape: tuple[int, ...],
    order: str,
    is_writable: bool,
) -> numpy.ndarray[Any, Any]:
    """Make an array from its bytes; those of a tensor are not copied."""
    dtype = restore_dtype(*described)
    if any(type(n) is not int or n < 0 for n in shape):
        _refuse(f"an array of shape {shape!r:.100}")
    flat: Any
    if isinstance(data, torch.Tensor):
        if not data.is_cpu or not data.is_contiguous():
            _refuse("an array of what is no array")
        flat = data.detach().reshape(-1).view(torch.uint8).numpy()
    elif type(data) is bytes:
        flat = numpy.frombuffer(bytearray(data), dtype=numpy.uint8)
    else:
        _refuse("an array of something else than bytes")
    if math.prod(shape) * dtype.itemsize != flat.nbytes:
        _refuse(f"an array of shape {shape!r:.100} of {flat.nbytes} bytes")
    # Neither view() nor reshape() works with an item size of 0.
    array: numpy.ndarray[Any, Any]
    array = numpy.ndarray(shape, dtype, flat, order="F" if order == "F" else "C")
    array.flags.writeable = is_writable
    return array


def restore_number(*parts: Any) -> Any:
    """Make a number, text or date of numpy."""
    return restore_array(*parts)[()]


# Dtypes that are plain data, and no pointers to objects.
_SIMPLE = re.compile(r"[<>|=]?[?biufcmMSUV][0-9]{0,10}(\[[0-9]*[A-Za-zμ]{1,7}\])?")


def _described(dtype: numpy.dtype[Any]) -> tuple[str]:
    """Return the arguments of :func:`restore_dtype`."""
    # Dtypes that differ in one of these are equal for numpy, and so for a cache.
    is_another = dtype.metadata is not None or (dtype.kind == "V" and dtype.type is not numpy.void)
    if is_another or (described := _text_of(dtype)) is None:
        raise CheckpointingException(
            f"dtype {dtype} is not one of numpy's plain ones: save an array of a plain dtype for "
            f"each field, or a list of the items (tolist())"
        )
    return described


# One tuple for equal dtypes, so that it stands in a pickle once.
@lru_cache
def _text_of(dtype: numpy.dtype[Any]) -> tuple[str] | None:
    is_simple = _SIMPLE.fullmatch(dtype.str) and numpy.dtype(dtype.str) == dtype
    return (dtype.str,) if is_simple else None


def restore_dtype(plain: str) -> numpy.dtype[Any]:
    """Make a dtype of its text."""
    if type(plain) is not str or not _SIMPLE.fullmatch(plain):
        _refuse(f"a dtype of {plain!r:.100}")
    return numpy.dtype(plain)


# Generators use the positions in their states as indices without a check.
_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
_PLACES = {"pos": 624, "buffer_pos": 4, "has_uint32": 1, "has_gauss": 1}


def restore_bit_generator(name: str, state: Any) -> numpy.random.BitGenerator:
    """Make a bit generator with a state; newer releases of numpy keep its seeds beside that."""
    numbers, seeds = state if type(state) is tuple else (state, None)
    if name not in _BIT_GENERATORS or not isinstance(seeds, numpy.random.SeedSequence | None):
        _refuse("a generator")
    _check_places(numbers)
    made: Any = getattr(numpy.random, name)(0)
    made.__setstate__(state)
    return made  # type: ignore[no-any-return]


def restore_random(bits: Any, state: Any = None) -> Any:
    """Make a Generator, or with a state a RandomState, that draws from a bit generator."""
    if not isinstance(bits, numpy.random.BitGenerator):
        _refuse("a generator")
    if state is None:
        return numpy.random.Generator(bits)
    _check_places(state)
    made = numpy.random.RandomState(bits)
    made.set_state(state)
    return made


def restore_seeds(checksum: int, state: tuple[Any, ...]) -> numpy.random.SeedSequence:
    """Make the seeds of generators, by the function that numpy's own pickles call."""
    pool, size = state[2:4]
    if not isinstance(pool, numpy.ndarray) or pool.dtype != numpy.uint32 or pool.shape != (size,):
        _refuse("seeds with a pool of another size")
    make: Callable[..., Any] = numpy.random.bit_generator.__pyx_unpickle_SeedSequence  # type: ignore[attr-defined]
    return make(numpy.random.SeedSequence, checksum, state)  # type: ignore[no-any-return]


def _check_places(state: Any) -> None:
    if type(state) is not dict:
        _refuse("the state of a generator")
    for name, value in state.items():
        if type(value) is dict:
            _check_places(value)
        elif name in _PLACES and (
            type(value) not in (int, bool) or not 0 <= value <= _PLACES[name]
        ):
            _refuse(f"a generator that goes on at {value!r:.100}")


def reduce_generator(generator: torch.Generator) -> Any:
    """Reduce a torch generator and its state as ``__reduce__`` does."""
    state = generator.get_state()
    return restore_generator, (str(generator.device), state.numpy().tobytes())


def restore_generator(device: str, state: bytes) -> torch.Generator:
    """Make a torch generator on a device, with a saved state."""
    # bytearray() of a number would take that many bytes.
    if type(device) is not str or type(state) is not bytes:
        _refuse("a generator")
    generator = torch.Generator(device)
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return generator


def type_of_constant(value: Any) -> type:
    """Return the class of a constant, which cannot be pickled by name."""
    if value is not None and value is not Ellipsis and value is not NotImplemented:
        _refuse("the class of another value")
    return type(value)


def _refuse(what: str) -> NoReturn:
    raise CorruptShardError(f"the skeleton makes {what}, in a way that no pickle does")
