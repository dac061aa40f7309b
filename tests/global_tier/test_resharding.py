"""What any number of ranks saved in any sharding is loaded bit for bit in any other."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from localckpt import MismatchError
from localckpt.global_tier.storage_reader import CachedMetadataFileSystemReader
from tests.global_tier.models import (
    MISDESCRIBED,
    checkpoints_in,
    manager_on,
    misdescribed,
    run_sharded,
)
from tests.managers.jobs import assert_same, error_of

PLACEMENTS = (Replicate(), Shard(0), Shard(1))
# Whole, uneven, and with fewer rows or columns than there are ranks.
SHAPES = ((8, 4), (5, 3), (1, 6))


def values_of(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Values that belong to a name, the same on all ranks."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(name.encode())))


def _load_every_placement_into_every_other(rank: int, world_size: int, root: Path) -> int:
    saved: dict[str, DTensor] = {}
    wanted: dict[str, DTensor] = {}
    meshes = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    kinds = [
        (f"{mesh.shape} {placed}", mesh, placed)
        for mesh in meshes
        for placed in product(PLACEMENTS, repeat=mesh.ndim)
    ]
    for (a, a_mesh, a_placed), (b, b_mesh, b_placed) in product(kinds, kinds):
        for shape in SHAPES:
            name = f"{a} -> {b}: {shape}"
            full = values_of(name, shape)
            saved[name] = distribute_tensor(full, a_mesh, a_placed, src_data_rank=None)
            wanted[name] = distribute_tensor(torch.zeros(shape), b_mesh, b_placed)
    with manager_on(root) as manager:
        manager.save(dict(saved), 1, is_async=True)
        manager.load(into=wanted)
    for name, tensor in wanted.items():
        assert_same(tensor.full_tensor(), values_of(name, tuple(tensor.shape)))
    return len(wanted)


def test_every_placement_on_1d_and_2d_meshes_is_loaded_into_every_other(tmp_path: Path) -> None:
    told = run_sharded(_load_every_placement_into_every_other, 4, tmp_path)

    assert told == [12 * 12 * len(SHAPES)] * 4


def test_tensors_on_the_meta_device_are_made_without_torch_distributed(tmp_path: Path) -> None:
    full = values_of("full", (5, 3))
    wanted: dict[str, Any] = {"nested": {"weight": torch.empty(5, 3, device="meta")}}

    with manager_on(tmp_path) as manager:
        manager.save({"nested": {"weight": full}}, 1, is_async=True)
        manager.load(into=wanted)

    assert_same(wanted["nested"]["weight"], full)


def _neither_saved_nor_filled(rank: int, world_size: int, root: Path, kind: str) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    whole = torch.arange(40.0).reshape(8, 5)
    good = distribute_tensor(whole, mesh, [Shard(0), Shard(0)], src_data_rank=None)
    with manager_on(root) as manager:
        manager.save({"w": good}, 1)
        bad = misdescribed(kind, mesh)
        texts = [error_of(lambda: manager.save({"w": bad}, 2), MismatchError)]
        before = bad.to_local().clone()
        texts.append(error_of(lambda: manager.load(into={"w": bad}), MismatchError))
        assert torch.equal(bad.to_local(), before)
        assert manager.all_iterations() == [1]
    if kind == "rows":
        # The planner of torch does not look at the tensor.
        (folder,) = checkpoints_in(root)
        with pytest.raises(CheckpointException, match="Other tensors may be filled already"):
            dcp.load(
                {"w": bad},
                storage_reader=CachedMetadataFileSystemReader(root / folder),
                planner=DefaultLoadPlanner(),
            )
    return texts


@pytest.mark.parametrize("kind", sorted(MISDESCRIBED))
def test_a_dtensor_that_torch_would_describe_as_another_part_is_neither_saved_nor_filled(
    kind: str, tmp_path: Path
) -> None:
    for saved, filled in run_sharded(_neither_saved_nor_filled, 4, tmp_path, kind):
        assert "w is a DTensor of which torch.distributed.checkpoint would describe" in saved
        assert "Nothing was saved, and older checkpoints stand" in saved
        assert "w is a DTensor that cannot be filled: " in filled
        assert MISDESCRIBED[kind] in saved
        assert MISDESCRIBED[kind] in filled
