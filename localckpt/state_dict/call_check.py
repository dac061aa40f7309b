"""Check of each call in a skeleton, before any of these calls is made.

The skeleton is unpickled once with a stand-in for every class, function and object that it names,
so the real constructor later gets no other arguments than a pickler writes. Functions that the user
allows may be called with anything.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, ClassVar, NamedTuple

import numpy

from localckpt.errors import CheckpointingException, CorruptShardError, UnsafeGlobalError
from localckpt.state_dict.numpy_stand_ins import NUMPY_STAND_INS, Dtype
from localckpt.state_dict.safe_globals import Name, SafeGlobals
from localckpt.state_dict.stand_ins import (
    AnyObject,
    FixedObject,
    MadeOfLiterals,
    NamedClass,
    StandInTensor,
    conversion,
    function,
    refuse,
)

__all__ = ["Contents", "check_calls"]


class Contents(NamedTuple):
    """Contents of a skeleton that was checked.

    Attributes:
        names: The classes and functions that the pickle names.
        of_meshes: Numbers of the tensors in which device meshes keep their ranks.
        composed: Numbers of the tensors that sparse and nested tensors are made of.
    """

    names: frozenset[Name]
    of_meshes: frozenset[int]
    composed: frozenset[int]


def check_calls(
    skeleton: bytes | memoryview, allowed: SafeGlobals, tensors: int | None = None
) -> Contents:
    """Check a skeleton without making any object in it.

    Args:
        skeleton: A pickle that has passed :func:`~localckpt.state_dict.pickles.check_opcodes`.
        allowed: Allow-list for the classes and functions in the pickle.
        tensors: Number of tensors that the pickle may refer to; ``None`` for any number.

    Raises:
        UnsafeGlobalError: Classes or functions are not allowed; the error names all of them.
        CorruptShardError: The bytes are not a skeleton, or no pickler makes a value so.
    """
    unpickler = _CheckingUnpickler(io.BytesIO(skeleton), allowed, tensors)
    try:
        unpickler.load()
    except Exception as error:
        if unpickler.refused:
            raise allowed.refusal(unpickler.refused) from None
        if isinstance(error, (CheckpointingException, MemoryError)):
            raise
        # A damaged pickle can raise any exception; callers expect one for all of them.
        raise CorruptShardError(f"the skeleton cannot be read: {error!r}") from error
    if unpickler.refused:
        raise allowed.refusal(unpickler.refused)
    numbers = map(frozenset, (unpickler.of_meshes, unpickler.composed))
    return Contents(frozenset(unpickler.named), *numbers)


class _CheckingUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, allowed: SafeGlobals, tensors: int | None) -> None:
        super().__init__(file)
        self.named: set[Name] = set()
        self.refused: list[Name] = []
        self._allowed = allowed
        self._tensors = tensors
        self._dtypes: list[Dtype] = []
        self._dtype = type("_OwnDtype", (Dtype,), {"made": self._dtypes})
        self.of_meshes: set[int] = set()
        self._mesh = type("_OwnMesh", (_Mesh,), {"found": self.of_meshes})
        self.composed: set[int] = set()
        self._composer = type("_OwnComposer", (_Composer,), {"found": self.composed})

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
            return AnyObject
        # numpy 1 has the same functions in numpy.core, numpy 2 in numpy._core.
        full_name = f"{module.replace('numpy._core', 'numpy.core')}.{name}"
        if full_name == "numpy.dtype":
            return self._dtype
        if full_name == _MESH:
            return self._mesh
        if full_name in _COMPOSERS:
            return self._composer
        if isinstance(found, type) and issubclass(found, numpy.generic):
            return NamedClass
        return _STAND_INS.get(full_name, AnyObject)

    def persistent_load(self, pid: Any) -> Any:
        if type(pid) is not int:
            raise CorruptShardError(f"the skeleton refers to a tensor by {pid!r}")
        if self._tensors is not None and not 0 <= pid < self._tensors:
            raise CorruptShardError(f"the skeleton refers to tensor {pid} of {self._tensors}")
        return StandInTensor(pid)


_COMPOSERS = ("torch._utils._rebuild_sparse_tensor", "torch._utils._rebuild_nested_tensor")
_MESH = "torch.distributed.device_mesh.DeviceMesh"


class _Mesh(AnyObject):
    """Stand-in for a device mesh."""

    found: ClassVar[set[int]]

    def __setstate__(self, state: Any) -> None:
        if type(state) is dict:
            inside = [part for part in state.values() if isinstance(part, StandInTensor)]
            self.found.update(part.number for part in inside if part.number is not None)


class _Fraction(MadeOfLiterals):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Converting a text with an exponent, such as "1e999999999", could take for ever.
        if any(isinstance(value, str) and "e" in value.lower() for value in args):
            refuse("makes a fraction")
        return super().__new__(cls, *args, **kwargs)


class _TensorMaker(FixedObject):
    """Stand-in for a function that makes a tensor from others, and checks its own arguments."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return StandInTensor()


class _Composer(_TensorMaker):
    """Stand-in for a function that makes a sparse or nested tensor."""

    found: ClassVar[set[int]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        parts = (part for arg in args for part in (arg if isinstance(arg, tuple) else (arg,)))
        inside = (part.number for part in parts if isinstance(part, StandInTensor))
        cls.found.update(number for number in inside if number is not None)
        return super().__new__(cls, *args, **kwargs)


def _check_rebuilt(function: Any, kind: Any, args: Any, state: Any) -> StandInTensor:
    is_maker = isinstance(function, type) and issubclass(function, _TensorMaker)
    if not (is_maker or function is AnyObject) or not isinstance(kind, type):
        refuse("makes a tensor")
    return StandInTensor()


def _check_subclass(kind: Any, base: Any, requires_grad: Any, attributes: Any) -> StandInTensor:
    is_tensor = isinstance(base, StandInTensor)
    if not isinstance(kind, type) or not is_tensor or type(attributes) is not dict:
        refuse("makes a tensor of a class")
    return StandInTensor()


def _check_itself(tensor: Any) -> StandInTensor:
    if not isinstance(tensor, StandInTensor):
        refuse("gives attributes to what is no tensor")
    return tensor


def _check_marks(tensor: Any, marks: Any) -> None:
    if not isinstance(tensor, StandInTensor) or type(marks) is not dict:
        refuse("gives attributes to what is no tensor")


def _check_generator_of_torch(device: Any, state: Any) -> FixedObject:
    # restore_generator() calls bytearray(state), which allocates n bytes if the state is a number.
    if type(device) is not str or type(state) is not bytes:
        refuse("makes a generator")
    return FixedObject()


_STAND_INS: dict[str, type[AnyObject]] = {
    **{
        f"builtins.{name}": conversion(list, tuple, set, frozenset, dict)
        for name in ("list", "tuple", "set", "frozenset")
    },
    "builtins.dict": conversion(dict, list, tuple),
    "builtins.str": conversion(str),
    "builtins.bytes": conversion(bytes),
    "builtins.int": conversion(int, bool),
    "builtins.bool": conversion(int, bool),
    "builtins.float": conversion(float, int),
    **{
        f"collections.{name}": MadeOfLiterals
        for name in ("OrderedDict", "defaultdict", "Counter", "deque")
    },
    "torch.Size": MadeOfLiterals,
    "decimal.Decimal": MadeOfLiterals,
    "fractions.Fraction": _Fraction,
    **{f"torch.{name}": NamedClass for name in ("Tensor", "dtype", "Generator")},
    **{f"torch.nn.parameter.{name}": NamedClass for name in ("Parameter", "Buffer")},
    "torch._utils._rebuild_wrapper_subclass": _TensorMaker,
    "torch._tensor._rebuild_from_type_v2": function(_check_rebuilt),
    "localckpt.state_dict.skeleton._restore_subclass": function(_check_subclass),
    "localckpt.state_dict.skeleton._itself": function(_check_itself),
    "localckpt.state_dict.marks.set_marks": function(_check_marks),
    "localckpt.state_dict.replicated.given": function(lambda value: value),
    "localckpt.state_dict.sharded.restore_sharded": _TensorMaker,
    "localckpt.state_dict.foreign_values.restore_generator": function(_check_generator_of_torch),
    **NUMPY_STAND_INS,
}
