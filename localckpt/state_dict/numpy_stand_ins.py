"""Stand-ins for numpy's dtypes, arrays and random generators; see ``stand_ins.py``."""

from __future__ import annotations

import math
import re
from typing import Any, ClassVar, cast

import numpy

from localckpt.state_dict.stand_ins import (
    AnyObject,
    FixedObject,
    NamedClass,
    StandInTensor,
    function,
    refuse,
)

__all__ = ["NUMPY_STAND_INS", "Dtype"]

# Dtypes and arrays. A dtype's state is compared with that of a dtype which numpy makes.

_DTYPE = re.compile(r"[biufcmMOSUV][0-9]{0,10}")
# Flag of a dtype whose fields are aligned as in C (NPY_ALIGNED_STRUCT).
_ALIGNED = 0x80
_UNIT = re.compile(r"[A-Za-zμ]{1,7}")


class Dtype(FixedObject):
    """Stand-in for a dtype; ``value`` is a real dtype, made from checked parts."""

    made: ClassVar[list[Dtype]]
    """All dtypes of one skeleton."""
    value: Any
    _is_final = False
    _fields: tuple[dict[str, Any], dict[str, Any]] | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Picklers call dtype(text, align=False, copy=True); a copy may be changed by __setstate__.
        if kwargs or len(args) != 3 or type(args[0]) is not str or args[1:] != (False, True):
            refuse("makes a dtype")
        if not _DTYPE.fullmatch(args[0]):
            refuse(f"makes a dtype {args[0]!r}")
        made = object.__new__(cls)
        made.value = numpy.dtype(args[0])
        cls.made.append(made)
        return made

    def use(self) -> numpy.dtype[Any]:
        """Return the real dtype, and refuse all later changes of it."""
        self._is_final = True
        self.require_unchanged()
        return cast("numpy.dtype[Any]", self.value)

    def require_unchanged(self) -> None:
        """Refuse a skeleton that has changed a dtype's dict of fields after ``__setstate__``."""
        if self._fields is not None and self._fields[0] != self._fields[1]:
            refuse("changes the fields of a dtype")

    def __setstate__(self, state: Any) -> None:
        if self._is_final or type(state) is not tuple or len(state) not in (8, 9):
            refuse("changes a dtype")
        self._is_final = True
        _, order, subarray, names, fields, *sizes = state[:8]
        if names is not None or subarray is not None:
            if order != "|" or self.value.kind != "V":
                refuse("makes a dtype of others")
            if subarray is not None:
                inner, shape = subarray
                value = numpy.dtype((_dtype(inner), _shape(shape)))
            else:
                value = _structured(names, fields, sizes)
                self._fields = fields, dict(fields)
        else:
            value = self.value
            if order != "|":
                value = value.newbyteorder(_order(order))
            if value.kind in "mM":
                value = _with_unit(value, state[8] if len(state) == 9 else None)
        own: Any = value.__reduce__()
        own_sizes = own[2][5:8]
        # numpy 1 writes the flags as a signed byte. One flag marks items that are references.
        flags = (own_sizes[2], own_sizes[2] - 256)
        if (
            value.itemsize != self.value.itemsize
            or any(type(size) is not int for size in sizes)
            or tuple(sizes[:2]) != own_sizes[:2]
            or sizes[2] not in flags
        ):
            refuse(f"makes a dtype {value}")
        self.value = value


def _order(order: Any) -> Any:
    if order not in ("<", ">", "="):
        refuse("makes a dtype of an order that is none")
    return order


def _structured(names: Any, fields: Any, sizes: list[Any]) -> numpy.dtype[Any]:
    if type(names) is not tuple or type(fields) is not dict:
        refuse("makes a dtype of fields that are none")
    described = [fields[name] for name in names]
    titles = [field[2] if len(field) == 3 else None for field in described]
    if any(type(field) is not tuple or len(field) not in (2, 3) for field in described):
        refuse("makes a dtype of fields that are none")
    if set(fields) != {*names, *titles} - {None}:
        refuse("makes a dtype of fields that have no names")
    made: dict[str, Any] = {
        "names": list(names),
        "formats": [_dtype(field[0]) for field in described],
        "offsets": [field[1] for field in described],
        "itemsize": sizes[0],
    }
    if any(titles):
        made["titles"] = titles
    is_aligned = type(sizes[2]) is int and bool(sizes[2] & _ALIGNED)
    structured: numpy.dtype[Any] = numpy.dtype(made, align=is_aligned)  # type: ignore[call-overload]
    return structured


def _with_unit(value: numpy.dtype[Any], metadata: Any) -> numpy.dtype[Any]:
    if metadata is None:
        return value
    unit, count, divisor, _ = metadata[1]
    unit = unit.decode()
    if type(count) is not int or divisor != 1 or not _UNIT.fullmatch(unit):
        refuse("makes a dtype of a unit that is none")
    if unit == "generic":
        return value
    with_unit: numpy.dtype[Any] = numpy.dtype(f"{value.str[:3]}[{count}{unit}]")
    return with_unit


def _dtype(value: Any) -> numpy.dtype[Any]:
    if not isinstance(value, Dtype):
        refuse("takes something for a dtype")
    return value.use()


def _shape(value: Any) -> tuple[int, ...]:
    if type(value) is not tuple or any(type(n) is not int or n < 0 for n in value):
        refuse("takes something for a shape")
    return value


class _Array(FixedObject):
    """Stand-in for an array."""

    def __init__(
        self, dtype: numpy.dtype[Any] | None = None, shape: tuple[int, ...] | None = None
    ) -> None:
        self.dtype, self.shape = dtype, shape

    def __setstate__(self, state: Any) -> None:
        if self.dtype is not None:
            refuse("changes an array")
        shape, dtype, is_fortran, data = state[-4:]
        self.dtype, self.shape = _dtype(dtype), _shape(shape)
        if type(is_fortran) not in (bool, int):
            refuse("makes an array of an order that is none")
        items = math.prod(self.shape)
        # The items of an object array are a list; bytes would become pointers.
        if self.dtype.hasobject:
            good = type(data) is list and len(data) == items
        else:
            good = type(data) is bytes and len(data) == items * self.dtype.itemsize
        if not good:
            refuse("makes an array of another size")


def _check_reconstruct(kind: Any, shape: Any, typecode: Any) -> _Array:
    if not isinstance(kind, type) or shape != (0,) or typecode not in (b"b", "b"):
        refuse("makes an array")
    return _Array()


def _check_frombuffer(
    data: Any, dtype: Any, shape: Any, order: Any, axis_order: Any = None
) -> _Array:
    found, size = _dtype(dtype), _shape(shape)
    if type(data) not in (bytes, bytearray) or found.hasobject:
        refuse("makes an array of something else than bytes")
    if len(data) != math.prod(size) * found.itemsize or order not in ("C", "F", "K"):
        refuse("makes an array of another size")
    return _Array(found, size)


def _check_scalar(dtype: Any, data: Any) -> FixedObject:
    found = _dtype(dtype)
    if found.hasobject or type(data) is not bytes or len(data) != found.itemsize:
        refuse("makes a number of something else than its bytes")
    return FixedObject()


def _check_restored(data: Any, dtype: Any, shape: Any, order: Any, is_writable: Any) -> _Array:
    found, size = _dtype(dtype), _shape(shape)
    if found.hasobject or order not in ("C", "F") or type(is_writable) is not bool:
        refuse("makes an array")
    nbytes = math.prod(size) * found.itemsize
    if not isinstance(data, StandInTensor) and (type(data) is not bytes or len(data) != nbytes):
        refuse("makes an array of another size")
    return _Array(found, size)


# Generators. They use the positions in their states as indices without a check.

_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
_PLACES = {"pos": 624, "buffer_pos": 4, "has_uint32": 1, "has_gauss": 1}


class _BitGeneratorClass(NamedClass):
    """Stand-in for a class of bit generators."""


class _BitGenerator(FixedObject):
    """Stand-in for a bit generator."""

    def __setstate__(self, state: Any) -> None:
        numbers, seeds = state if type(state) is tuple else (state, None)
        if seeds is not None and not isinstance(seeds, _SeedSequence):
            refuse("gives a state to a generator")
        _check_numbers(numbers)


class _Generator(FixedObject):
    """Stand-in for numpy's Generator or RandomState."""

    def __setstate__(self, state: Any) -> None:
        if type(state) is tuple and len(state) in (3, 5):
            key, place, *gauss = state[1:]
            _check_numbers({"state": {"key": key, "pos": place}, "has_gauss": (gauss or [0])[0]})
        elif state is not None:
            _check_numbers(state)


def _check_numbers(state: Any) -> None:
    if type(state) is not dict:
        refuse("gives a state to a generator")
    for name, value in state.items():
        if type(value) is dict:
            _check_numbers(value)
        elif name in _PLACES:
            if type(value) not in (int, bool) or not 0 <= value <= _PLACES[name]:
                refuse(f"has a generator go on at {value!r}")
        elif isinstance(value, AnyObject) and not isinstance(value, _Array):
            refuse("gives a state to a generator")


def _check_bit_generator(kind: Any = "MT19937") -> _BitGenerator:
    if kind not in _BIT_GENERATORS and kind is not _BitGeneratorClass:
        refuse("makes a generator")
    return _BitGenerator()


def _check_generator(bits: Any = "MT19937", make: Any = None) -> _Generator:
    if not (isinstance(bits, _BitGenerator) or (type(bits) is str and bits in _BIT_GENERATORS)):
        refuse("makes a generator")
    if make is not None and make is not _MAKES_BIT_GENERATORS:
        refuse("makes a generator by another function")
    return _Generator()


class _SeedSequence(FixedObject):
    """Stand-in for a SeedSequence."""

    def __setstate__(self, state: Any) -> None:
        _check_seeds(state)


class _SeedSequenceClass(NamedClass):
    """Stand-in for the class SeedSequence."""


def _check_seed_sequence(kind: Any, checksum: Any, state: Any) -> _SeedSequence:
    if kind is not _SeedSequenceClass or type(checksum) is not int:
        refuse("makes seeds")
    if state is not None:
        _check_seeds(state)
    return _SeedSequence()


def _check_seeds(state: Any) -> None:
    if type(state) is not tuple or len(state) not in (5, 6):
        refuse("gives a state to seeds")
    pool, size = state[2:4]
    if not isinstance(pool, _Array) or pool.dtype != numpy.uint32 or pool.shape != (size,):
        refuse("gives seeds a pool of another size")


_MAKES_BIT_GENERATORS = function(_check_bit_generator)

NUMPY_STAND_INS: dict[str, type[AnyObject]] = {
    "numpy.dtype": Dtype,
    "numpy.ndarray": NamedClass,
    "numpy.core.multiarray._reconstruct": function(_check_reconstruct),
    "numpy.core.multiarray.scalar": function(_check_scalar),
    "numpy.core.numeric._frombuffer": function(_check_frombuffer),
    "localckpt.state_dict.foreign_values.restore_array": function(_check_restored),
    "numpy.random._pickle.__bit_generator_ctor": _MAKES_BIT_GENERATORS,
    "numpy.random._pickle.__generator_ctor": function(_check_generator),
    "numpy.random._pickle.__randomstate_ctor": function(_check_generator),
    "numpy.random._mt19937.MT19937": _BitGeneratorClass,
    "numpy.random._pcg64.PCG64": _BitGeneratorClass,
    "numpy.random._pcg64.PCG64DXSM": _BitGeneratorClass,
    "numpy.random._philox.Philox": _BitGeneratorClass,
    "numpy.random._sfc64.SFC64": _BitGeneratorClass,
    "numpy.random.bit_generator.SeedSequence": _SeedSequenceClass,
    "numpy.random.bit_generator.__pyx_unpickle_SeedSequence": function(_check_seed_sequence),
}
