"""Check of each call in a skeleton, before any of these calls is made.

The skeleton is unpickled once with a stand-in for every class, function and object that it names. A
stand-in refuses all arguments but those that a pickler writes, so the real constructor later gets
no others. Functions that the user allows may be called with anything.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn, cast

import numpy

from localckpt.errors import CheckpointingException, CorruptShardError, UnsafeGlobalError
from localckpt.state_dict.safe_globals import Name, SafeGlobals

__all__ = ["check_calls"]


def check_calls(
    skeleton: bytes | memoryview, allowed: SafeGlobals, tensors: int | None = None
) -> frozenset[Name]:
    """Check a skeleton without making any object in it.

    Args:
        skeleton: A pickle that has passed :func:`~localckpt.state_dict.pickles.check_opcodes`.
        allowed: Allow-list for the classes and functions in the pickle.
        tensors: Number of tensors that the pickle may refer to; ``None`` for any number.

    Returns:
        The classes and functions that the pickle names.

    Raises:
        UnsafeGlobalError: Classes or functions are not allowed; the error names all of them.
        CorruptShardError: The bytes are not a skeleton, or no pickler makes a value so.
    """
    unpickler = _CheckingUnpickler(io.BytesIO(skeleton), allowed, tensors)
    try:
        unpickler.load()
    except (CheckpointingException, MemoryError):
        if unpickler.refused:
            raise allowed.refusal(unpickler.refused) from None
        raise
    except Exception as error:
        # A damaged pickle can raise any exception; callers expect one for all of them.
        if unpickler.refused:
            raise allowed.refusal(unpickler.refused) from None
        raise CorruptShardError(f"the skeleton cannot be read: {error!r}") from error
    if unpickler.refused:
        raise allowed.refusal(unpickler.refused)
    return frozenset(unpickler.named)


class _CheckingUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, allowed: SafeGlobals, tensors: int | None) -> None:
        super().__init__(file)
        self.named: set[Name] = set()
        self.refused: list[Name] = []
        self._allowed = allowed
        self._tensors = tensors
        self._dtypes: list[_Dtype] = []
        self._dtype = type("_OwnDtype", (_Dtype,), {"made": self._dtypes})

    def load(self) -> None:
        super().load()
        for dtype in self._dtypes:
            dtype.require_unchanged()

    def find_class(self, module: str, name: str) -> Any:
        named = Name(module, name)
        self.named.add(named)
        try:
            found = self._allowed.find(module, name)
        except UnsafeGlobalError:
            if named not in self.refused:
                self.refused.append(named)
            return _Any
        # numpy 1 has the same functions in numpy.core, numpy 2 in numpy._core.
        full_name = f"{module.replace('numpy._core', 'numpy.core')}.{name}"
        if full_name == "numpy.dtype":
            return self._dtype
        if isinstance(found, type) and issubclass(found, numpy.generic):
            return _Named
        return _STAND_INS.get(full_name, _Any)

    def persistent_load(self, pid: Any) -> Any:
        if type(pid) is not int:
            raise CorruptShardError(f"the skeleton refers to a tensor by {pid!r}")
        if self._tensors is not None and not 0 <= pid < self._tensors:
            raise CorruptShardError(f"the skeleton refers to tensor {pid} of {self._tensors}")
        return _Tensor()


def _refuse(what: str) -> NoReturn:
    raise CorruptShardError(f"the skeleton {what}, in a way that no pickle does")


class _Any:
    """Stand-in for a class, function or object that accepts any call and any state."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return object.__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, item: Any) -> None:
        pass

    def extend(self, items: Any) -> None:
        pass

    def add(self, item: Any) -> None:
        pass


class _Fixed(_Any):
    """Stand-in for an object that a pickle never changes after making it."""

    def __setstate__(self, state: Any) -> None:
        _refuse("gives a state to a value that has none")

    def __setitem__(self, key: Any, value: Any) -> None:
        self.add(value)

    def append(self, item: Any) -> None:
        self.add(item)

    def extend(self, items: Any) -> None:
        self.add(items)

    def add(self, item: Any) -> None:
        _refuse("puts items into a value that takes none")


class _Tensor(_Fixed):
    """Stand-in for a tensor."""


class _Named(_Fixed):
    """Stand-in for a class that a pickle uses as a value and never calls."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        _refuse("calls a class that is not called")


class _MadeOfLiterals(_Any):
    """Stand-in for a class that a pickle calls with plain containers and texts only."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, _Any) for value in args):
            _refuse("makes a value of another")
        return object.__new__(cls)


class _Fraction(_MadeOfLiterals):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Converting a text with an exponent, such as "1e999999999", could take for ever.
        if any(isinstance(value, str) and "e" in value.lower() for value in args):
            _refuse("makes a fraction")
        return super().__new__(cls, *args, **kwargs)


def _conversion(*kinds: type) -> type[_Any]:
    """Make a stand-in for a class that is called with one value of these types, or none."""

    class Conversion(_Any):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            if len(args) > 1 or kwargs or any(type(value) not in kinds for value in args):
                _refuse("converts a value")
            return object.__new__(cls)

    return Conversion


def _function(check: Callable[..., Any]) -> type[_Any]:
    """Make a stand-in for a function; ``check(*args)`` returns the stand-in of the result."""

    class Function(_Named):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            if kwargs:
                _refuse("names arguments of a function")
            try:
                return check(*args)
            except TypeError:
                _refuse("calls a function with other arguments")

    return Function


# Tensors made from other tensors.


class _TensorMaker(_Fixed):
    """Stand-in for a function that makes a tensor from others, and checks its own arguments."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return _Tensor()


def _check_rebuilt(function: Any, kind: Any, args: Any, state: Any) -> _Tensor:
    is_maker = isinstance(function, type) and issubclass(function, _TensorMaker)
    if not (is_maker or function is _Any) or not isinstance(kind, type):
        _refuse("makes a tensor")
    return _Tensor()


def _check_subclass(kind: Any, base: Any, requires_grad: Any, attributes: Any) -> _Tensor:
    if not isinstance(kind, type) or not isinstance(base, _Tensor) or type(attributes) is not dict:
        _refuse("makes a tensor of a class")
    return _Tensor()


def _check_itself(tensor: Any) -> _Tensor:
    if not isinstance(tensor, _Tensor):
        _refuse("gives attributes to what is no tensor")
    return tensor


def _check_marks(tensor: Any, marks: Any) -> None:
    if not isinstance(tensor, _Tensor) or type(marks) is not dict:
        _refuse("gives attributes to what is no tensor")


# numpy's dtypes and arrays. A dtype's state is compared with that of a dtype which numpy makes.

_DTYPE = re.compile(r"[biufcmMOSUV][0-9]{0,10}")
# Flag of a dtype whose fields are aligned as in C (NPY_ALIGNED_STRUCT).
_ALIGNED = 0x80
_UNIT = re.compile(r"[A-Za-zμ]{1,7}")


class _Dtype(_Fixed):
    """Stand-in for a dtype; ``value`` is a real dtype, made from checked parts."""

    made: ClassVar[list[_Dtype]]
    """All dtypes of one skeleton."""
    value: Any
    _is_final = False
    _fields: tuple[dict[str, Any], dict[str, Any]] | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Picklers call dtype(text, align=False, copy=True); a copy may be changed by __setstate__.
        if kwargs or len(args) != 3 or type(args[0]) is not str or args[1:] != (False, True):
            _refuse("makes a dtype")
        if not _DTYPE.fullmatch(args[0]):
            _refuse(f"makes a dtype {args[0]!r}")
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
            _refuse("changes the fields of a dtype")

    def __setstate__(self, state: Any) -> None:
        if self._is_final or type(state) is not tuple or len(state) not in (8, 9):
            _refuse("changes a dtype")
        self._is_final = True
        _, order, subarray, names, fields, *sizes = state[:8]
        if names is not None or subarray is not None:
            if order != "|" or self.value.kind != "V":
                _refuse("makes a dtype of others")
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
            _refuse(f"makes a dtype {value}")
        self.value = value


def _order(order: Any) -> Any:
    if order not in ("<", ">", "="):
        _refuse("makes a dtype of an order that is none")
    return order


def _structured(names: Any, fields: Any, sizes: list[Any]) -> numpy.dtype[Any]:
    if type(names) is not tuple or type(fields) is not dict:
        _refuse("makes a dtype of fields that are none")
    described = [fields[name] for name in names]
    titles = [field[2] if len(field) == 3 else None for field in described]
    if any(type(field) is not tuple or len(field) not in (2, 3) for field in described):
        _refuse("makes a dtype of fields that are none")
    if set(fields) != {*names, *titles} - {None}:
        _refuse("makes a dtype of fields that have no names")
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
        _refuse("makes a dtype of a unit that is none")
    if unit == "generic":
        return value
    with_unit: numpy.dtype[Any] = numpy.dtype(f"{value.str[:3]}[{count}{unit}]")
    return with_unit


def _dtype(value: Any) -> numpy.dtype[Any]:
    if not isinstance(value, _Dtype):
        _refuse("takes something for a dtype")
    return value.use()


def _shape(value: Any) -> tuple[int, ...]:
    if type(value) is not tuple or any(type(n) is not int or n < 0 for n in value):
        _refuse("takes something for a shape")
    return value


class _Array(_Fixed):
    """Stand-in for an array."""

    def __init__(
        self, dtype: numpy.dtype[Any] | None = None, shape: tuple[int, ...] | None = None
    ) -> None:
        self.dtype, self.shape = dtype, shape

    def __setstate__(self, state: Any) -> None:
        if self.dtype is not None:
            _refuse("changes an array")
        shape, dtype, is_fortran, data = state[-4:]
        self.dtype, self.shape = _dtype(dtype), _shape(shape)
        if type(is_fortran) not in (bool, int):
            _refuse("makes an array of an order that is none")
        items = math.prod(self.shape)
        # The items of an object array are a list; bytes would become pointers.
        if self.dtype.hasobject:
            good = type(data) is list and len(data) == items
        else:
            good = type(data) is bytes and len(data) == items * self.dtype.itemsize
        if not good:
            _refuse("makes an array of another size")


def _check_reconstruct(kind: Any, shape: Any, typecode: Any) -> _Array:
    if not isinstance(kind, type) or shape != (0,) or typecode not in (b"b", "b"):
        _refuse("makes an array")
    return _Array()


def _check_frombuffer(
    data: Any, dtype: Any, shape: Any, order: Any, axis_order: Any = None
) -> _Array:
    found, size = _dtype(dtype), _shape(shape)
    if type(data) not in (bytes, bytearray) or found.hasobject:
        _refuse("makes an array of something else than bytes")
    if len(data) != math.prod(size) * found.itemsize or order not in ("C", "F", "K"):
        _refuse("makes an array of another size")
    return _Array(found, size)


def _check_scalar(dtype: Any, data: Any) -> _Fixed:
    found = _dtype(dtype)
    if found.hasobject or type(data) is not bytes or len(data) != found.itemsize:
        _refuse("makes a number of something else than its bytes")
    return _Fixed()


def _check_restored(data: Any, dtype: Any, shape: Any, order: Any, is_writable: Any) -> _Array:
    found, size = _dtype(dtype), _shape(shape)
    if found.hasobject or order not in ("C", "F") or type(is_writable) is not bool:
        _refuse("makes an array")
    nbytes = math.prod(size) * found.itemsize
    if not isinstance(data, _Tensor) and (type(data) is not bytes or len(data) != nbytes):
        _refuse("makes an array of another size")
    return _Array(found, size)


def _check_generator_of_torch(device: Any, state: Any) -> _Fixed:
    # restore_generator() calls bytearray(state), which allocates n bytes if the state is a number.
    if type(device) is not str or type(state) is not bytes:
        _refuse("makes a generator")
    return _Fixed()


# numpy's generators. They use the positions in their states as indices without a check.

_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
_PLACES = {"pos": 624, "buffer_pos": 4, "has_uint32": 1, "has_gauss": 1}


class _BitGeneratorClass(_Named):
    """Stand-in for a class of bit generators."""


class _BitGenerator(_Fixed):
    """Stand-in for a bit generator."""

    def __setstate__(self, state: Any) -> None:
        numbers, seeds = state if type(state) is tuple else (state, None)
        if seeds is not None and not isinstance(seeds, _SeedSequence):
            _refuse("gives a state to a generator")
        _check_numbers(numbers)


class _Generator(_Fixed):
    """Stand-in for numpy's Generator or RandomState."""

    def __setstate__(self, state: Any) -> None:
        if type(state) is tuple and len(state) in (3, 5):
            key, place, *gauss = state[1:]
            _check_numbers({"state": {"key": key, "pos": place}, "has_gauss": (gauss or [0])[0]})
        elif state is not None:
            _check_numbers(state)


def _check_numbers(state: Any) -> None:
    if type(state) is not dict:
        _refuse("gives a state to a generator")
    for name, value in state.items():
        if type(value) is dict:
            _check_numbers(value)
        elif name in _PLACES:
            if type(value) not in (int, bool) or not 0 <= value <= _PLACES[name]:
                _refuse(f"has a generator go on at {value!r}")
        elif isinstance(value, _Any) and not isinstance(value, _Array):
            _refuse("gives a state to a generator")


def _check_bit_generator(kind: Any = "MT19937") -> _BitGenerator:
    if kind not in _BIT_GENERATORS and kind is not _BitGeneratorClass:
        _refuse("makes a generator")
    return _BitGenerator()


def _check_generator(bits: Any = "MT19937", make: Any = None) -> _Generator:
    if not (isinstance(bits, _BitGenerator) or (type(bits) is str and bits in _BIT_GENERATORS)):
        _refuse("makes a generator")
    if make is not None and make is not _MAKES_BIT_GENERATORS:
        _refuse("makes a generator by another function")
    return _Generator()


class _SeedSequence(_Fixed):
    """Stand-in for a SeedSequence."""

    def __setstate__(self, state: Any) -> None:
        _check_seeds(state)


class _SeedSequenceClass(_Named):
    """Stand-in for the class SeedSequence."""


def _check_seed_sequence(kind: Any, checksum: Any, state: Any) -> _SeedSequence:
    if kind is not _SeedSequenceClass or type(checksum) is not int:
        _refuse("makes seeds")
    if state is not None:
        _check_seeds(state)
    return _SeedSequence()


def _check_seeds(state: Any) -> None:
    if type(state) is not tuple or len(state) not in (5, 6):
        _refuse("gives a state to seeds")
    pool, size = state[2:4]
    if not isinstance(pool, _Array) or pool.dtype != numpy.uint32 or pool.shape != (size,):
        _refuse("gives seeds a pool of another size")


_MAKES_BIT_GENERATORS = _function(_check_bit_generator)

_STAND_INS: dict[str, type[_Any]] = {
    **{
        f"builtins.{name}": _conversion(list, tuple, set, frozenset, dict)
        for name in ("list", "tuple", "set", "frozenset")
    },
    "builtins.dict": _conversion(dict, list, tuple),
    "builtins.str": _conversion(str),
    "builtins.bytes": _conversion(bytes),
    "builtins.int": _conversion(int, bool),
    "builtins.bool": _conversion(int, bool),
    "builtins.float": _conversion(float, int),
    **{
        f"collections.{name}": _MadeOfLiterals
        for name in ("OrderedDict", "defaultdict", "Counter", "deque")
    },
    "torch.Size": _MadeOfLiterals,
    "decimal.Decimal": _MadeOfLiterals,
    "fractions.Fraction": _Fraction,
    **{f"torch.{name}": _Named for name in ("Tensor", "dtype", "Generator")},
    **{f"torch.nn.parameter.{name}": _Named for name in ("Parameter", "Buffer")},
    **{
        f"torch._utils.{name}": _TensorMaker
        for name in (
            "_rebuild_sparse_tensor",
            "_rebuild_nested_tensor",
            "_rebuild_wrapper_subclass",
        )
    },
    "torch._tensor._rebuild_from_type_v2": _function(_check_rebuilt),
    "localckpt.state_dict.skeleton._restore_subclass": _function(_check_subclass),
    "localckpt.state_dict.skeleton._itself": _function(_check_itself),
    "localckpt.state_dict.marks.set_marks": _function(_check_marks),
    "localckpt.state_dict.replicated.given": _function(lambda value: value),
    "localckpt.state_dict.sharded.restore_sharded": _TensorMaker,
    "numpy.dtype": _Dtype,
    "numpy.ndarray": _Named,
    "numpy.core.multiarray._reconstruct": _function(_check_reconstruct),
    "numpy.core.multiarray.scalar": _function(_check_scalar),
    "numpy.core.numeric._frombuffer": _function(_check_frombuffer),
    "localckpt.state_dict.foreign_values.restore_array": _function(_check_restored),
    "localckpt.state_dict.foreign_values.restore_generator": _function(_check_generator_of_torch),
    "numpy.random._pickle.__bit_generator_ctor": _MAKES_BIT_GENERATORS,
    "numpy.random._pickle.__generator_ctor": _function(_check_generator),
    "numpy.random._pickle.__randomstate_ctor": _function(_check_generator),
    "numpy.random._mt19937.MT19937": _BitGeneratorClass,
    "numpy.random._pcg64.PCG64": _BitGeneratorClass,
    "numpy.random._pcg64.PCG64DXSM": _BitGeneratorClass,
    "numpy.random._philox.Philox": _BitGeneratorClass,
    "numpy.random._sfc64.SFC64": _BitGeneratorClass,
    "numpy.random.bit_generator.SeedSequence": _SeedSequenceClass,
    "numpy.random.bit_generator.__pyx_unpickle_SeedSequence": _function(_check_seed_sequence),
}
