"""DTensors of which torch.distributed.checkpoint describes another part than a rank has.

It computes the part from the placements alone, so such a tensor would be written to, or filled
from, other elements of the whole.
"""

from __future__ import annotations

from torch.distributed.tensor import DTensor

from localckpt.state_dict.global_view import has_other_order, shard_runs

__all__ = ["why_misdescribed"]


def why_misdescribed(value: DTensor) -> str | None:
    """Say why the part that a rank has of a DTensor is not the one that would be described.

    Returns:
        The reason, a clause about the tensor; ``None`` if there is none.
    """
    if any(placement.is_partial() for placement in value.placements):
        return "it has a Partial placement: each rank has terms of a sum"
    if has_other_order(value):
        return "its shard_order is not the order of the dimensions of its mesh"
    mesh, shape = value.device_mesh, tuple(value.shape)
    if (coordinate := mesh.get_coordinate()) is None:
        return None
    runs = shard_runs(shape, mesh.shape, coordinate, value.placements)
    if runs is None:
        return f"its placements {value.placements} are not known"
    if any(len(along) > 1 for along in runs):
        return "this rank has several runs of its rows or columns, and one would be described"
    sizes = [sum(count for _, count in along) for along in runs]
    local = list(value._local_tensor.shape)
    if local != sizes:
        return f"its placements give a local tensor of shape {sizes}, and it has one of {local}"
    return None
