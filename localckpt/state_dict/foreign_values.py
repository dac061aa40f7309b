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


def is_data(value: Any) -> bool:
    """Return whether a value of numpy is stored among the tensors."""
    is_numpy = isinstance(value, numpy.ndarray | numpy.generic)
    return is_numpy and value.nbytes >= _SMALL_NBYTES and not value.dtype.hasobject


def reduce_numpy(value: Any) -> Any:
    """Reduce a value of numpy as ``__reduce__`` does; ``NotImplemented`` for other values."""
    kind = type(value)
    if isinstance(value, numpy.ndarray):
        # A class that pickles itself may hold more than its items.
        is_plain = kind.__reduce__ == numpy.ndarray.__reduce__  # type: ignore[comparison-overlap]
        return (restore_array, _parts_of(value)) if is_plain else NotImplemented
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
    data: Any
    if array.dtype.hasobject and array.dtype.names is not None:
        raise CheckpointingException(
            f"an array of dtype {array.dtype} has objects in its fields: save each field as an "
            f"array of its own"
        )
    if array.dtype.hasobject:
        data = array.ravel(order).tolist()
    elif is_data(array):
        data = _bytes_of(array)
    else:
        data = array.tobytes(order)
    parts = data, described, array.shape, order, array.flags.writeable
    return parts if type(array) is numpy.ndarray else (*parts, type(array))


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
    data: bytes | list[Any] | torch.Tensor,
    described: tuple[Any, ...],
    shape: tuple[int, ...],
    order: str,
    is_writable: bool,
    kind: type[numpy.ndarray[Any, Any]] = numpy.ndarray,
) -> numpy.ndarray[Any, Any]:
    """Make an array from its bytes or items; a tensor's bytes are not copied."""
    dtype = restore_dtype(*described)
    if any(type(n) is not int or n < 0 for n in shape):
        _refuse(f"an array of shape {shape!r:.100}")
    array: Any
    flat: Any
    if dtype.hasobject:
        # The items of such an array are a list; bytes would become pointers.
        if dtype.names or type(data) is not list or len(data) != math.prod(shape):
            _refuse("an array of other items")
        array = numpy.fromiter(data, dtype, len(data)).reshape(shape, order=order)  # type: ignore[call-overload]
    else:
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
        array = numpy.ndarray(shape, dtype, flat, order="F" if order == "F" else "C")
    if kind is not numpy.ndarray:
        array = array.view(kind)
    array.flags.writeable = is_writable
    return array  # type: ignore[no-any-return]


def restore_number(*parts: Any) -> Any:
    """Make a number, text, date or record of numpy."""
    return restore_array(*parts)[()]


_SIMPLE = re.compile(r"[<>|=]?[?biufcmMOSUV][0-9]{0,10}(\[[0-9]*[A-Za-zμ]{1,7}\])?")


def _described(dtype: numpy.dtype[Any]) -> tuple[Any, ...]:
    """Return the arguments of :func:`restore_dtype`."""
    plain: Any
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        plain = _described(base), shape
    elif dtype.names is not None and dtype.fields is not None:
        fields = [dtype.fields[name] for name in dtype.names]
        plain = {
            "names": list(dtype.names),
            "formats": [_described(field[0]) for field in fields],
            "offsets": [field[1] for field in fields],
            "titles": [field[2] if len(field) == 3 else None for field in fields],
            "itemsize": dtype.itemsize,
            "aligned": dtype.isalignedstruct,
        }
    elif dtype.metadata is None:
        return _text_of(dtype)
    else:
        (plain,) = _text_of(dtype)
    if dtype.kind == "V" and dtype.type is not numpy.void:
        raise CheckpointingException(f"dtype {dtype} is of another class, {dtype.type.__name__}")
    return (plain,) if dtype.metadata is None else (plain, dict(dtype.metadata))


# One tuple for equal dtypes, so that it stands in a pickle once.
@lru_cache
def _text_of(dtype: numpy.dtype[Any]) -> tuple[str]:
    if not _SIMPLE.fullmatch(dtype.str) or numpy.dtype(dtype.str) != dtype:
        raise CheckpointingException(f"dtype {dtype} is not one of numpy's plain ones")
    return (dtype.str,)


def restore_dtype(plain: Any, metadata: dict[str, Any] | None = None) -> numpy.dtype[Any]:
    """Make a dtype of its description: a text, a base and a shape, or a dict of fields."""
    described: Any = plain
    align = False
    if type(plain) is tuple:
        base, shape = plain
        described = restore_dtype(*base), shape
    elif type(plain) is dict:
        described = {key: value for key, value in plain.items() if key != "aligned"}
        described["formats"] = [restore_dtype(*part) for part in plain["formats"]]
        if not any(plain["titles"]):
            del described["titles"]
        align = plain["aligned"] is True
    elif type(plain) is not str or not _SIMPLE.fullmatch(plain):
        _refuse(f"a dtype of {plain!r:.100}")
    made: numpy.dtype[Any] = numpy.dtype(described, align=align)
    return made if metadata is None else numpy.dtype(made, metadata=metadata)


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
