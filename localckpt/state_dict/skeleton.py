"""Takes the tensors out of any object graph, and puts them back.

The skeleton is the object's pickle with a number in place of each tensor. Tensors are found while
pickling, so whatever can be pickled can be saved, and the object is never changed. Reading goes
through an allow-list (``safe_globals.py``).
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from localckpt.errors import (
    CheckpointingException,
    CorruptShardError,
    RestoreError,
    UnsafeGlobalError,
)
from localckpt.state_dict.marks import marks_of, set_marks
from localckpt.state_dict.pickle_limits import check_opcodes
from localckpt.state_dict.pickle_places import Place, place_at, unframed
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.sharded import is_sharded, reduce_sharded

__all__ = ["check_names", "described", "insert_tensors", "take_tensors"]

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def take_tensors(state: Any) -> tuple[bytes, list[torch.Tensor], frozenset[str]]:
    """Split an object graph.

    Returns:
        A pickle without tensors, but with their attributes, the distinct tensors, and the names of
        the classes and functions that the pickle refers to.

    Raises:
        CheckpointingException: The object holds something that cannot be saved; it is named.
    """
    buffer = io.BytesIO()
    pickler = _SkeletonPickler(buffer)
    try:
        pickler.dump(state)
    except CheckpointingException:
        raise
    except Exception as error:
        raise CheckpointingException(
            f"the state cannot be saved, because a value in it cannot be pickled: {error}"
        ) from error
    return buffer.getvalue(), pickler.tensors, frozenset(pickler.globals)


def check_names(skeleton: bytes | memoryview, allowed: SafeGlobals, tensors: int) -> None:
    """Look through a skeleton without making any object that it describes.

    Args:
        skeleton: The pickle.
        allowed: What it may name.
        tensors: How many tensors it may refer to.

    Raises:
        UnsafeGlobalError: It names a class or function that is not allowed.
        CorruptShardError: It is not a skeleton.
    """

    def tensor(number: int) -> _Inert:
        if not 0 <= number < tensors:
            raise CorruptShardError(f"the skeleton refers to tensor {number} of {tensors}")
        return _Inert()

    check_opcodes(skeleton)
    _load(_NamesOnly(io.BytesIO(skeleton), tensor, allowed))


def insert_tensors(
    skeleton: bytes | memoryview,
    tensor: Callable[[int], Any],
    allowed: SafeGlobals,
    *,
    marked: bool = True,
) -> Any:
    """Rebuild the object graph, with ``tensor(n)`` in place of the n-th tensor.

    The tensors should hold their values: a class may look at them while it is rebuilt.

    Args:
        skeleton: The pickle.
        tensor: Gives the tensors.
        allowed: What the pickle may name.
        marked: Whether the tensors get the attributes that were saved with them.

    Raises:
        UnsafeGlobalError: It names a class or function that is not allowed.
        RestoreError: An object in it cannot be made. Whatever a class raises, its own
            CheckpointingException too, says nothing about the bytes.
    """

    def load(file: io.BytesIO) -> Any:
        return _SkeletonUnpickler(file, tensor, allowed, marked=marked).load()

    try:
        return load(io.BytesIO(skeleton))
    except UnsafeGlobalError:
        raise
    except Exception as error:
        place = _place_of(error, bytes(skeleton), load)
        what = f"{place.class_name} at {place.path!r}" if place else "an object in it"
        raise RestoreError(
            f"the state cannot be rebuilt: {what} raised {described(error)}",
            *(place or (None, None)),
        ) from error


def described(error: BaseException) -> str:
    """An error's class and text; some have no text."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _place_of(error: Exception, skeleton: bytes, load: Callable[[io.BytesIO], Any]) -> Place | None:
    """The object whose making raised an error, found by making the state once more.

    An unpickler does not tell how far it came. Without frames it reads one instruction at a time.
    """
    try:
        pickled = unframed(skeleton)
        file = io.BytesIO(pickled)
        try:
            load(file)
        except type(error):
            return place_at(pickled, file.tell())
    except Exception:  # noqa: BLE001 - the error that is to be described is raised in any case
        return None
    return None


def _load(unpickler: _SkeletonUnpickler) -> Any:
    try:
        return unpickler.load()
    except (CheckpointingException, MemoryError):
        raise
    except Exception as error:
        # A damaged pickle can raise anything; the caller needs to know only that it is one.
        raise CorruptShardError(f"the skeleton cannot be read: {error!r}") from error


class _SkeletonPickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[torch.Tensor] = []
        self.globals: set[str] = set()
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) is _Bare:
            obj = obj.tensor
        elif not isinstance(obj, torch.Tensor) or not _is_plain(obj) or marks_of(obj):
            return None
        # The list keeps the tensor alive, so its id() stays its own until the pickle is done.
        number = self._numbers.setdefault(id(obj), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(obj)
        return number

    def reducer_override(self, obj: Any) -> Any:
        name = getattr(obj, "__qualname__", None)
        if name is not None:
            self.globals.add(f"{getattr(obj, '__module__', None)}.{name}")
        if isinstance(obj, torch.UntypedStorage | torch.TypedStorage):
            raise CheckpointingException(
                "the state holds a bare storage or a tensor of a kind that cannot be saved "
                "(quantized, for instance): save its dense values instead"
            )
        if isinstance(obj, torch.Tensor) and is_sharded(obj):
            return reduce_sharded(obj)
        if isinstance(obj, torch.Tensor) and _is_plain(obj):
            return _itself, (_Bare(obj),), marks_of(obj), None, None, set_marks
        if isinstance(obj, torch.Tensor) and _has_own_bytes(obj) and not _dispatches(obj):
            base = obj.detach().as_subclass(torch.Tensor)
            return _restore_subclass, (type(obj), base, obj.requires_grad, dict(vars(obj)))
        return NotImplemented


class _Bare(NamedTuple):
    """A tensor without its attributes, while they are pickled beside it."""

    tensor: torch.Tensor


class _SkeletonUnpickler(pickle.Unpickler):
    def __init__(
        self,
        file: io.BytesIO,
        tensor: Callable[[int], Any],
        allowed: SafeGlobals,
        *,
        marked: bool = True,
    ) -> None:
        super().__init__(file)
        self._tensor = tensor
        self._allowed = allowed
        self._marked = marked

    def find_class(self, module: str, name: str) -> Any:
        found = self._allowed.find(module, name)
        if found is set_marks and not self._marked:
            return _leave_marks
        if found is torch._utils._rebuild_sparse_tensor:
            return _rebuild_sparse_tensor
        return found

    def persistent_load(self, pid: Any) -> Any:
        if type(pid) is not int:
            raise CorruptShardError(f"the skeleton refers to a tensor by {pid!r}")
        return self._tensor(pid)


# A pickle names these as classes of arrays and factories, and calls none of them: called with what
# a forged one gives, they take memory without end, or bytes for pointers.
_NEVER_CALLED = frozenset(
    {
        *("builtins.list", "builtins.dict", "builtins.tuple", "builtins.int", "builtins.float"),
        *("builtins.str", "builtins.bytes", "builtins.bool", "builtins.set"),
        *("builtins.frozenset", "numpy.ndarray"),
    }
)
# These are called with containers and text that stand in the pickle, never with other objects.
_CALLED_WITH_LITERALS = frozenset(
    {
        *("collections.OrderedDict", "collections.defaultdict", "collections.Counter"),
        *("collections.deque", "torch.Size", "fractions.Fraction", "decimal.Decimal"),
    }
)


def _rebuild_sparse_tensor(layout: Any, data: Any) -> Any:
    """As torch's, but an index outside of the tensor is an error."""
    if layout == torch.sparse_coo:
        indices, values, size, *coalesced = data
        is_coalesced = coalesced[0] if coalesced else None
        return torch.sparse_coo_tensor(
            indices, values, size, check_invariants=True, is_coalesced=is_coalesced
        )
    compressed, plain, values, size = data
    return torch.sparse_compressed_tensor(
        compressed, plain, values, size, layout=layout, check_invariants=True
    )


class _NamesOnly(_SkeletonUnpickler):
    def find_class(self, module: str, name: str) -> Any:
        super().find_class(module, name)
        full_name = f"{module}.{name}"
        if full_name in _NEVER_CALLED:
            return _NeverCalled
        if full_name == "fractions.Fraction":
            return _InertFraction
        return _OfLiterals if full_name in _CALLED_WITH_LITERALS else _Inert


class _Inert:
    """Stands for every class, function and object while only the names matter."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Inert:
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


class _NeverCalled(_Inert):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        raise CorruptShardError("the skeleton calls a class that a pickle never calls")


class _OfLiterals(_Inert):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, _Inert) for value in args):
            raise CorruptShardError("the skeleton makes a value in a way that no pickle does")
        return object.__new__(cls)


class _InertFraction(_OfLiterals):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Text with an exponent could name a number that takes for ever to write out.
        if any(isinstance(value, str) and "e" in value.lower() for value in args):
            raise CorruptShardError("the skeleton makes a fraction in a way that no pickle does")
        return super().__new__(cls, *args, **kwargs)


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in _PLAIN_TENSORS and _has_own_bytes(tensor)


def _has_own_bytes(tensor: torch.Tensor) -> bool:
    """Whether its value is what its storage holds, and not made of other tensors or scales."""
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


def _dispatches(tensor: torch.Tensor) -> bool:
    """Whether it is a wrapper (a DTensor, say) that pickles as the tensors it wraps."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor with attributes is pickled as a call of; they are set afterwards."""
    return tensor


def _leave_marks(tensor: torch.Tensor, marks: Any) -> None:
    """In place of ``set_marks``: the tensor keeps the attributes that it has."""


def _restore_subclass(
    kind: type[torch.Tensor],
    base: torch.Tensor,
    requires_grad: bool,
    attributes: dict[str, Any],
) -> torch.Tensor:
    result = base.as_subclass(kind).requires_grad_(requires_grad)
    vars(result).update(attributes)
    return result
