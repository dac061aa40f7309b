"""DTensors of a running job that take the places of saved ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from localckpt.state_dict.global_view import LocalParts, has_other_order

__all__ = ["GivenDTensors", "rebuild_wrapped"]

rebuild_wrapped: Callable[..., Any] = torch._tensor._rebuild_from_type_v2
"""Function that torch's pickles of DTensors, and of tensors with attributes, call."""


class GivenDTensors:
    """DTensors that take the places of saved ones while a pickle is loaded.

    A job may have the same parts of its tensors on another mesh, as with FSDP before and HSDP now.
    What was saved on a mesh and is not given, such as the states of a new optimizer, gets the mesh
    and the placements that the given DTensors have in place of the saved ones.

    Args:
        by_local: ``id(tensor)`` to the given DTensor with this local tensor.
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
