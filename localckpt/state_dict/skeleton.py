"""Skeletons: pickles of object graphs with a number in place of each tensor.

Tensors are found while pickling, so whatever can be pickled can be saved, and the object is never
changed. Loading uses an allow-list (``safe_globals.py``).
"""

from __future__ import annotations

import gc
import io
import pickle
from collections.abc import Callable, Iterator, Mapping
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
from localckpt.state_dict.dtensors import (
    REBUILD_WRAPPED,
    EqualParts,
    GivenDTensors,
    rebuild_wrapped,
)
from localckpt.state_dict.foreign_values import (
    ArrayTensor,
    reduce_generator,
    reduce_numpy,
    type_of_constant,
)
from localckpt.state_dict.marks import marks_of, set_marks
from localckpt.state_dict.replicated import Chunk, Replicated, given
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.sharded import is_sharded, reduce_sharded
from localckpt.state_dict.unpickler import Unpickler, place_of

_PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, ArrayTensor})
_CONSTANTS = {type(value): value for value in (None, Ellipsis, NotImplemented)}


class Taken(NamedTuple):
    """Object graph, split; ``has_objects`` where it holds more than literals and tensors.

    ``checked`` is a pickle with all that may not be loadable in a skeleton like one that is.
    """

    skeleton: bytes
    tensors: list[torch.Tensor]
    has_objects: bool
    checked: bytes


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause the garbage collector while many long-lived objects are made.

    Making 10,000 tensors would trigger two full collections, each of which visits every object of
    the trainer: 0.1 s with only torch imported.
    """
    was_enabled = gc.isenabled()
    try:
        # Inside the try block, so that an interrupt right after it cannot leave the collector off.
        gc.disable()
        yield
    finally:
        if was_enabled:
            gc.enable()


def take_tensors(state: Any) -> Taken:
    pickler = SkeletonPickler()
    skeleton = pickler.dumped(state, pickle.STOP)
    return Taken(skeleton, pickler.tensors, pickler.has_objects, skeleton)


def find_tensors(state: Any) -> list[torch.Tensor]:
    """Find the tensors of an object graph, in the order of :func:`take_tensors`.

    Arrays are left out, and what device meshes keep their ranks in, which belongs to the job.
    """
    pickler = _FindingPickler()
    pickler.dumped(state, pickle.STOP)
    return pickler.tensors


def insert_tensors(
    skeleton: bytes | memoryview,
    tensor: Callable[[int], Any],
    allowed: SafeGlobals,
    *,
    marked: bool = True,
    dtensors: Mapping[int, Any] | None = None,
) -> Any:
    """Rebuild the object graph, with ``tensor(n)`` in place of the n-th tensor.

    The tensors should hold their values, since an object may read them while it is rebuilt. They
    get their saved attributes if ``marked``. ``dtensors`` has by ``id(tensor)`` the DTensor that is
    returned instead of the saved one with this local tensor.

    Any error of a class is a RestoreError, since it does not mean that the bytes are damaged.
    """

    def load(file: io.BytesIO) -> Any:
        given = GivenDTensors(dtensors or {})

        def find(module: str, name: str) -> Any:
            found = allowed.find(module, name)
            if found is set_marks and not marked:
                return _leave_marks
            return given.rebuild if found is REBUILD_WRAPPED else checked_maker(found)

        state = Unpickler(file, find, tensor).load()
        given.finish()
        return state

    try:
        return load(io.BytesIO(skeleton))
    except UnsafeGlobalError:
        raise
    except Exception as error:
        place = place_of(error, bytes(skeleton), load)
        what = "an object in it" if place is None else f"{place[0]} at {place[1]!r}"
        raise RestoreError(
            f"the state cannot be rebuilt: {what} raised {with_class(error)}",
            *(place or (None, None)),
        ) from error


class SkeletonPickler(pickle.Pickler):
    """Pickler that finds the tensors of a state, and writes their numbers in their places."""

    def __init__(self) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, protocol=5)
        self.tensors: list[torch.Tensor] = []
        self.has_objects = False
        self._numbers: dict[int, int] = {}
        self._parts = EqualParts()

    def dumped(self, value: Any, last: bytes) -> bytes:
        """Return the pickle of a value, with another instruction as its last."""
        try:
            self.dump(value)
        except CheckpointingException:
            raise
        except Exception as error:
            raise CheckpointingException(
                f"the state cannot be saved, because a value in it cannot be pickled: {error}"
            ) from error
        pickled = self._file.getvalue()
        self._file.seek(0)
        self._file.truncate()
        return pickled[:-1] + last

    def persistent_id(self, obj: Any) -> int | None:
        # Called for every value of the state; most values are no tensors.
        kind = type(obj)
        if kind is _Bare:
            obj = obj.tensor
        elif kind not in _PLAIN_TENSORS or not _has_own_bytes(obj) or marks_of(obj):
            return None
        return self.number_of(obj)

    def number_of(self, tensor: torch.Tensor) -> int:
        # The list keeps the tensor alive, so its id() stays unique until the pickle is done.
        number = self._numbers.setdefault(id(tensor), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(tensor)
        return number

    def reducer_override(self, obj: Any) -> Any:
        self.has_objects = True
        kind = type(obj)
        if kind is self._parts.dtensor:
            return self._parts.reduce_dtensor(obj)
        if kind is self._parts.spec:
            return self._parts.reduce_spec(obj)
        if kind is Replicated or kind is Chunk:
            return given, (obj.data if kind is Chunk else obj.value,)
        if isinstance(obj, torch.Generator):
            return reduce_generator(obj)
        if kind is type and obj in _CONSTANTS:
            return type_of_constant, (_CONSTANTS[obj],)
        if isinstance(obj, torch.UntypedStorage | torch.TypedStorage):
            raise CheckpointingException(
                "the state holds a bare storage or a tensor of a kind that cannot be saved "
                "(quantized, for instance): save its dense values instead"
            )
        if isinstance(obj, torch.Tensor) and is_sharded(obj):
            return reduce_sharded(obj)
        if isinstance(obj, torch.Tensor) and obj.is_nested:
            raise CheckpointingException(
                "it is a nested tensor: save the list of tensors that its unbind() gives"
            )
        if kind in _PLAIN_TENSORS and _has_own_bytes(obj):
            return _itself, (_Bare(obj),), marks_of(obj), None, None, set_marks
        if isinstance(obj, torch.Tensor) and _has_own_bytes(obj) and not _dispatches(obj):
            base = obj.detach().as_subclass(torch.Tensor)
            return _restore_subclass, (kind, base, obj.requires_grad, dict(vars(obj)))
        return reduce_numpy(obj)


class _FindingPickler(SkeletonPickler):
    """Pickler whose pickle nobody reads, which leaves out what finds no tensor."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is self._parts.dtensor:
            # All in it that can hold tensors, in the order of its own pickle. That takes ten times
            # as long, and a restart waits for this.
            return _itself, ((vars(obj), obj._local_tensor),)
        is_numpy = type(obj) is numpy.ndarray or isinstance(obj, numpy.generic)
        if is_numpy or type(obj) is self._parts.mesh:
            return type_of_constant, (None,)
        if type(obj) in _PLAIN_TENSORS and not _has_own_bytes(obj):
            # Another one may be made of more items.
            return type_of_constant, (None,)
        return super().reducer_override(obj)


class _Bare(NamedTuple):
    """Wrapper that makes the pickler store a tensor without its attributes."""

    tensor: torch.Tensor


def checked_maker(function: Any) -> Any:
    """Return the function in place of one of torch's that believes what a file says."""
    if function is torch._utils._rebuild_sparse_tensor:
        return _rebuild_sparse_tensor
    return rebuild_wrapped if function is REBUILD_WRAPPED else function


def _rebuild_sparse_tensor(layout: Any, data: Any) -> Any:
    """Replace torch's function of this name; refuses an index outside of the tensor."""
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


def _has_own_bytes(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is plain: not sparse, quantized or nested."""
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


def _dispatches(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a wrapper (such as a DTensor), pickled as its inner tensors."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor; in the pickle of a tensor with attributes, the call that precedes them."""
    return tensor


def _leave_marks(tensor: torch.Tensor, marks: Any) -> None:
    """Replace ``set_marks`` where a tensor keeps its present attributes."""


def _restore_subclass(
    kind: type[torch.Tensor],
    base: torch.Tensor,
    requires_grad: bool,
    attributes: dict[str, Any],
) -> torch.Tensor:
    if not isinstance(base, torch.Tensor):
        raise CorruptShardError(
            "the skeleton makes a tensor of a class, in a way that no pickle does"
        )
    result = base.as_subclass(kind).requires_grad_(requires_grad)
    vars(result).update(attributes)
    return result
