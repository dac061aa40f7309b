"""DTensors in pickles: written in torch's own form, and replaced by those of a running job.

Most of the tuples that describe a DTensor are equal in all of a model. Each is the first of its
equals, to which a pickle refers back.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from localckpt.errors import CheckpointingException, CorruptShardError
from localckpt.state_dict.global_view import LocalParts, has_other_order

_PROTOCOL = 5
REBUILD_WRAPPED: Callable[..., Any] = torch._tensor._rebuild_from_type_v2
"""Function that torch's pickles of DTensors, and of tensors with attributes, call."""


class EqualParts:
    """Equal tuples of the DTensors of one pickle.

    Only tuples are shared, since their values cannot change. A mesh or a spec can change, so each
    stays the object that it is in the state. The classes of DTensors, of meshes and of specs are
    ``None`` where their modules are not imported.
    """

    def __init__(self) -> None:
        # A value of these classes exists only where their modules are imported, which takes long.
        home = "torch.distributed.tensor"
        self.dtensor = getattr(sys.modules.get(home), "DTensor", None)
        meshes = sys.modules.get("torch.distributed.device_mesh")
        self.mesh = getattr(meshes, "DeviceMesh", None)
        self.spec = getattr(sys.modules.get(f"{home}._dtensor_spec"), "DTensorSpec", None)
        self._arguments: dict[Any, Any] = {}
        self._by_bytes: dict[bytes, Any] = {}
        # Each tuple, which keeps its id() unique, and the first tuple that is equal to it.
        self._by_id: dict[int, tuple[Any, Any]] = {}

    def reduce_dtensor(self, tensor: Any) -> Any:
        """Reduce a DTensor, as ``__reduce__`` does, with shared shapes, strides and dtypes."""
        if tensor.storage_offset():
            raise CheckpointingException(
                "its local part is a view at an offset in a larger tensor; make it of a copy, "
                "local.clone()"
            )
        reduced = tensor.__reduce_ex__(_PROTOCOL)
        match reduced:
            case rebuild, (make, kind, tuple(arguments), state):
                # torch makes these of a tensor's own properties, so equal ones have equal classes.
                arguments = self._arguments.setdefault(arguments, arguments)
                return rebuild, (make, kind, arguments, state)
        return reduced

    def reduce_spec(self, spec: Any) -> Any:
        """Reduce the description of a DTensor, with shared placements and shapes."""
        reduced = spec.__reduce_ex__(_PROTOCOL)
        match reduced:
            case make, arguments, dict(state), *rest:
                parts = {
                    name: self._first_equal(value) if isinstance(value, tuple) else value
                    for name, value in state.items()
                }
                return make, arguments, parts, *rest
        return reduced

    def _first_equal(self, part: tuple[Any, ...]) -> Any:
        """Return the first tuple with the pickle of this one.

        The operator ``==`` ignores classes: it holds for a ``torch.Size`` and a tuple, and for a
        ``Shard`` and a placement of a class derived from it.
        """
        if id(part) not in self._by_id:
            first = self._by_bytes.setdefault(pickle.dumps(part, _PROTOCOL), part)
            self._by_id[id(part)] = part, first
        return self._by_id[id(part)][1]


def rebuild_wrapped(make: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """Call torch's function; refuses a class as what makes the tensor, which takes any size."""
    if isinstance(make, type):
        raise CorruptShardError("the skeleton makes a tensor, in a way that no pickle does")
    return REBUILD_WRAPPED(make, kind, arguments, state)


class GivenDTensors:
    """DTensors that take the places of saved ones, by the ``id()`` of their local tensors.

    The mesh may be another now: what was saved and is not given, as states of an optimizer, goes to
    the mesh and the placements of the given ones.
    """

    def __init__(self, by_local: Mapping[int, Any]) -> None:
        self._by_local = by_local
        # Saved specs, each with the one of the given DTensor in its place.
        self._replaced: list[tuple[Any, Any]] = []
        self._made: list[Any] = []

    def rebuild(self, make: Any, kind: Any, arguments: Any, state: Any) -> Any:
        """Return a given DTensor, or make the saved tensor: a call of a pickle of tensors."""
        match state:
            # Attributes, and slots.
            case _, {"_local_tensor": local, "_spec": saved}:
                if (given := self._by_local.get(id(local))) is not None:
                    self._replaced.append((saved, given._spec))
                    return given
                made = rebuild_wrapped(make, kind, arguments, state)
                self._made.append(made)
                return made
        return rebuild_wrapped(make, kind, arguments, state)

    def finish(self) -> None:
        """Move the DTensors that were made onto the meshes of the given ones."""
        if not (self._made and self._replaced):
            return
        parts = LocalParts()
        placed: dict[tuple[Any, ...], Any] = {}
        for saved, now in self._replaced:
            known = placed.setdefault(_placed(saved), now)
            if known is not None and _placed(known) != _placed(now):
                placed[_placed(saved)] = None
        for made in self._made:
            saved, shape = made._spec, tuple(made.shape)
            now = placed.get(_placed(saved))
            if now is None or has_other_order(made):
                continue
            part = parts.of(saved, shape)
            if part is not None and part == parts.of(now, shape):
                made._spec = type(saved)(now.mesh, now.placements, tensor_meta=saved.tensor_meta)


def _placed(spec: Any) -> tuple[Any, ...]:
    return spec.mesh, spec.placements, tuple(map(type, spec.placements))
