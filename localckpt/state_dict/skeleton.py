"""Skeletons: object graphs without their tensors, and with the tensors put back.

The skeleton is the object's pickle with a number in place of each tensor. Tensors are found while
pickling, so whatever can be pickled can be saved, and the object is never changed. Reading goes
through an allow-list (``safe_globals.py``).
"""

from __future__ import annotations

import gc
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy
import torch

from localckpt.errors import (
    CheckpointingException,
    CorruptShardError,
    RestoreError,
    UnsafeGlobalError,
)
from localckpt.failure_texts import with_class
from localckpt.state_dict.foreign_values import (
    ArrayTensor,
    is_data,
    reduce_array,
    reduce_generator,
    type_of_constant,
)
from localckpt.state_dict.marks import marks_of, set_marks
from localckpt.state_dict.pickles import Place, check_opcodes, place_at, unframed
from localckpt.state_dict.safe_globals import Name, SafeGlobals
from localckpt.state_dict.sharded import is_sharded, reduce_sharded
from localckpt.state_dict.stand_ins import check_calls

__all__ = ["Taken", "check_skeleton", "collection_paused", "insert_tensors", "take_tensors"]

_PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, ArrayTensor})
_CONSTANTS = {type(value): value for value in (None, Ellipsis, NotImplemented)}


class Taken(NamedTuple):
    """An object graph that was split.

    Attributes:
        skeleton: A pickle without tensors.
        tensors: The distinct ones, arrays of numpy among them.
        has_objects: Whether the pickle holds anything but literals and tensors.
    """

    skeleton: bytes
    tensors: list[torch.Tensor]
    has_objects: bool


@contextmanager
def collection_paused() -> Iterator[None]:
    """Keep the garbage collector from running while very many objects are made that live on.

    Making 10,000 tensors would set off two full ones, each of which looks at every object of the
    trainer: 0.1 s with torch alone imported.
    """
    was_enabled = gc.isenabled()
    try:
        # Inside, so that an interrupt right after it does not leave the collector off.
        gc.disable()
        yield
    finally:
        if was_enabled:
            gc.enable()


def take_tensors(state: Any, *, arrays: bool = True) -> Taken:
    """Split an object graph.

    Args:
        state: The object.
        arrays: Whether the bytes of arrays count as tensors; else they are left out.

    Raises:
        CheckpointingException: The object holds something that cannot be saved; it is named.
    """
    buffer = io.BytesIO()
    pickler = _SkeletonPickler(buffer, arrays)
    try:
        pickler.dump(state)
    except CheckpointingException:
        raise
    except Exception as error:
        raise CheckpointingException(
            f"the state cannot be saved, because a value in it cannot be pickled: {error}"
        ) from error
    return Taken(buffer.getvalue(), pickler.tensors, pickler.has_objects)


def check_skeleton(
    skeleton: bytes | memoryview,
    allowed: SafeGlobals,
    tensors: int | None = None,
    *,
    depth_is_limited: bool = False,
) -> frozenset[Name]:
    """Look through a skeleton without making any object that it describes.

    What passes is read back by :func:`insert_tensors`; so this is also done before one is saved.

    Args:
        skeleton: The pickle.
        allowed: What it may name.
        tensors: How many tensors it may refer to; ``None`` for any number.
        depth_is_limited: Whether it comes from a pickler, which goes no deeper than a reader does.

    Returns:
        The classes and functions that it names.

    Raises:
        UnsafeGlobalError: It names classes or functions that are not allowed; all are told.
        CorruptShardError: It is not a skeleton.
    """
    pickled = bytes(skeleton)
    check_opcodes(pickled, depth_is_limited=depth_is_limited)
    return check_calls(pickled, allowed, tensors)


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
            f"the state cannot be rebuilt: {what} raised {with_class(error)}",
            *(place or (None, None)),
        ) from error


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


class _SkeletonPickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, arrays: bool) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[torch.Tensor] = []
        self.has_objects = False
        self._arrays = arrays
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        # Asked for every value, of which most are none.
        kind = type(obj)
        if kind is _Bare:
            obj = obj.tensor
        elif kind not in _PLAIN_TENSORS or not _has_own_bytes(obj) or marks_of(obj):
            return None
        # The list keeps the tensor alive, so its id() stays its own until the pickle is done.
        number = self._numbers.setdefault(id(obj), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(obj)
        return number

    def reducer_override(self, obj: Any) -> Any:
        self.has_objects = True
        if isinstance(obj, numpy.ndarray):
            if not self._arrays and is_data(obj):
                return type_of_constant, (None,)
            return reduce_array(obj)
        if isinstance(obj, torch.Generator):
            return reduce_generator(obj)
        if type(obj) is type and obj in _CONSTANTS:
            return type_of_constant, (_CONSTANTS[obj],)
        if isinstance(obj, torch.UntypedStorage | torch.TypedStorage):
            raise CheckpointingException(
                "the state holds a bare storage or a tensor of a kind that cannot be saved "
                "(quantized, for instance): save its dense values instead"
            )
        if isinstance(obj, torch.Tensor) and is_sharded(obj):
            return reduce_sharded(obj)
        if type(obj) in _PLAIN_TENSORS and _has_own_bytes(obj):
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
        if found is torch._utils._rebuild_nested_tensor:
            return _rebuild_nested_tensor
        return found

    def persistent_load(self, pid: Any) -> Any:
        if type(pid) is not int:
            raise CorruptShardError(f"the skeleton refers to a tensor by {pid!r}")
        return self._tensor(pid)


def _rebuild_sparse_tensor(layout: Any, data: Any) -> Any:
    """Do as torch's function, but refuse an index outside of the tensor."""
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


def _rebuild_nested_tensor(
    buffer: torch.Tensor, sizes: torch.Tensor, strides: torch.Tensor, offsets: torch.Tensor
) -> Any:
    """Do as torch's function, but refuse a part that reaches outside of the buffer."""
    if any(t.dtype is not torch.int64 for t in (sizes, strides, offsets)) or buffer.dim() != 1:
        raise CorruptShardError("the skeleton makes a nested tensor of other tensors")
    rows = zip(sizes.tolist(), strides.tolist(), offsets.tolist(), strict=True)
    for shape, steps, start in rows:
        reach = sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
        if min((start, *shape, *steps)) < 0 or (0 not in shape and start + reach >= buffer.numel()):
            raise CorruptShardError("a nested tensor reaches outside of its bytes")
    return torch._nested_view_from_buffer(buffer, sizes, strides, offsets)


def _has_own_bytes(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's value is what its storage holds, not made of tensors or scales."""
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


def _dispatches(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a wrapper (a DTensor, say), pickled as the tensors it wraps."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose attributes are set afterwards: it is pickled as a call of this."""
    return tensor


def _leave_marks(tensor: torch.Tensor, marks: Any) -> None:
    """Leave the tensor the attributes that it has, in place of ``set_marks``."""


def _restore_subclass(
    kind: type[torch.Tensor],
    base: torch.Tensor,
    requires_grad: bool,
    attributes: dict[str, Any],
) -> torch.Tensor:
    result = base.as_subclass(kind).requires_grad_(requires_grad)
    vars(result).update(attributes)
    return result
