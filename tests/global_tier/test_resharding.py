"""What any number of ranks saved in any sharding is loaded bit for bit in any other."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from localckpt import MismatchError
from localckpt.global_tier.storage_reader import CachedMetadataFileSystemReader
from tests.global_tier.models import (
    MISDESCRIBED,
    checkpoints_in,
    gathered,
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


def spread(full: torch.Tensor, mesh: DeviceMesh, *placements: Placement) -> DTensor:
    """A DTensor of values that all ranks have."""
    return distribute_tensor(full, mesh, placements, src_data_rank=None)


# Placements.


def _all_placements() -> list[tuple[str, DeviceMesh, tuple[Placement, ...]]]:
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    found: list[tuple[str, DeviceMesh, tuple[Placement, ...]]] = [
        (f"4 {one}", line, (one,)) for one in PLACEMENTS
    ]
    found += [(f"2x2 {both}", square, both) for both in product(PLACEMENTS, PLACEMENTS)]
    return found


def _load_every_placement_into_every_other(rank: int, world_size: int, root: Path) -> int:
    saved: dict[str, DTensor] = {}
    wanted: dict[str, DTensor] = {}
    kinds = _all_placements()
    for (a, a_mesh, a_placed), (b, b_mesh, b_placed) in product(kinds, kinds):
        for shape in SHAPES:
            name = f"{a} -> {b}: {shape}"
            full = values_of(name, shape)
            saved[name] = spread(full, a_mesh, *a_placed)
            wanted[name] = spread(torch.zeros(shape), b_mesh, *b_placed)
    with manager_on(root) as manager:
        manager.save(dict(saved), 1, is_async=True)
        manager.load(into=wanted)
    for name, tensor in wanted.items():
        assert_same(tensor.full_tensor(), values_of(name, tuple(tensor.shape)))
    return len(wanted)


def test_every_placement_on_1d_and_2d_meshes_is_loaded_into_every_other(tmp_path: Path) -> None:
    told = run_sharded(_load_every_placement_into_every_other, 4, tmp_path)

    assert told == [12 * 12 * len(SHAPES)] * 4


# Other kinds of tensors.


def _sharded_tensor(full: torch.Tensor, rank: int, rows: list[int]) -> ShardedTensor:
    """Rows dealt to the ranks; a rank with none has no shard."""
    start = sum(rows[:rank])
    part = full[start : start + rows[rank]].clone()
    shards = [LocalShard.from_tensor_and_offsets(part, [start, 0], rank)] if rows[rank] else []
    return init_from_local_shards(shards, *full.shape)


def _go_between_kinds_of_tensors(rank: int, world_size: int, root: Path) -> None:
    full = values_of("full", (10, 3))
    mesh = init_device_mesh("cpu", (world_size,))

    def make(kind: str, values: torch.Tensor) -> Any:
        if kind == "plain":
            return values.clone()
        if kind == "dtensor":
            return spread(values, mesh, Shard(0))
        return _sharded_tensor(values, rank, [5, 1, 4] if kind == "sharded" else [0, 3, 7])

    kinds = ("plain", "dtensor", "sharded", "sharded otherwise")
    pairs = list(product(kinds, kinds))
    with manager_on(root) as manager:
        manager.save({f"{a} -> {b}": make(a, full) for a, b in pairs}, 1, is_async=True)
        wanted = {f"{a} -> {b}": make(b, torch.zeros(10, 3)) for a, b in pairs}
        manager.load(into=wanted)
    for (_, kind), found in zip(pairs, wanted.values(), strict=True):
        if isinstance(found, ShardedTensor):
            shards = [shard.tensor for shard in found.local_shards()]
            expected = [shard.tensor for shard in make(kind, full).local_shards()]
            assert_same(shards, expected)
        else:
            assert_same(gathered(found), full)


def test_plain_tensors_dtensors_and_sharded_tensors_are_loaded_into_each_other(
    tmp_path: Path,
) -> None:
    run_sharded(_go_between_kinds_of_tensors, 3, tmp_path)


def _load_into_meta(rank: int, world_size: int, root: Path) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    full = values_of("full", (5, 3))
    state: dict[str, Any] = {
        "plain": full,
        "nested": {"uneven": spread(full, mesh, Shard(0))},
        "columns": spread(full, mesh, Shard(1)),
    }
    wanted: dict[str, Any] = {
        "plain": torch.empty(5, 3, device="meta"),
        "nested": {"uneven": spread(torch.empty(5, 3, device="meta"), mesh, Shard(1))},
        "columns": spread(torch.empty(5, 3, device="meta"), mesh, Replicate()),
    }
    with manager_on(root) as manager:
        manager.save(state, 1, is_async=True)
        manager.load(into=wanted)
    assert_same(wanted["plain"], full)
    assert wanted["nested"]["uneven"].placements == (Shard(1),)
    assert wanted["columns"].placements == (Replicate(),)
    for tensor in (wanted["nested"]["uneven"], wanted["columns"]):
        assert_same(tensor.full_tensor(), full)


def test_tensors_on_the_meta_device_are_made(tmp_path: Path) -> None:
    run_sharded(_load_into_meta, 2, tmp_path)


def test_tensors_on_the_meta_device_are_made_without_torch_distributed(tmp_path: Path) -> None:
    full = values_of("full", (5, 3))
    wanted: dict[str, Any] = {"nested": {"weight": torch.empty(5, 3, device="meta")}}

    with manager_on(tmp_path) as manager:
        manager.save({"nested": {"weight": full}}, 1, is_async=True)
        manager.load(into=wanted)

    assert_same(wanted["nested"]["weight"], full)


def _load_into_tied_dtensors(rank: int, world_size: int, root: Path) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    one, other = values_of("one", (5, 3)), values_of("other", (5, 3))
    with manager_on(root) as manager:
        manager.save({"a": spread(one, mesh, Shard(0)), "b": spread(one, mesh, Replicate())}, 1)
        manager.save({"a": spread(one, mesh, Shard(0)), "b": spread(other, mesh, Shard(0))}, 2)
        tied = torch.nn.Parameter(spread(torch.zeros(5, 3), mesh, Shard(0)))
        text = error_of(lambda: manager.load(into={"a": tied, "b": tied}), MismatchError)
        assert "a and b share memory now" in text
        assert not tied.full_tensor().any()
        manager.load(into={"a": tied, "b": tied}, iteration=1)
    assert_same(tied.detach().full_tensor(), one)


def test_tied_dtensors_are_loaded_if_one_value_was_saved_of_them(tmp_path: Path) -> None:
    run_sharded(_load_into_tied_dtensors, 2, tmp_path)


# With torch's own reader and writer.


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
