"""Pickling of DTensors in torch's own form, with equal tuples written once.

torch describes each DTensor by about a dozen tuples, most of which are equal in all DTensors of a
model. A pickle refers back to an object that it already holds, so equal tuples are replaced by the
first of them. The result is read like any DTensor that torch has pickled.
"""

from __future__ import annotations

import pickle
import sys
from typing import Any

from localckpt.errors import CheckpointingException

__all__ = ["EqualParts"]

_PROTOCOL = 5


class EqualParts:
    """Equal tuples of the DTensors of one pickle.

    Only tuples are shared, since their values cannot change. A mesh or a spec can change, so each
    stays the object that it is in the state.

    Attributes:
        dtensor: Class of DTensors; ``None`` if its module is not imported.
        mesh: Class of device meshes; ``None`` if its module is not imported.
        spec: Class of the objects that describe DTensors; ``None`` if its module is not imported.
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
        """Reduce a DTensor, as ``__reduce__`` does, with shared shapes, strides and dtypes.

        Raises:
            CheckpointingException: torch would pickle it in a form that cannot be loaded.
        """
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
