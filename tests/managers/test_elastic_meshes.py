"""Tensors of one key that ranks shard over meshes of their own, loaded by other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import localckpt
from localckpt import MismatchError
from tests.managers.jobs import damage, error_of, make_manager
from tests.ranks import node_store, run_ranks

_S = 60.0
_VALUES = torch.arange(4000.0).reshape(40, 100)


def _on_own_mesh(rank: int, *, is_equal: bool) -> DTensor:
    """Rows over two ranks: each pair has a mesh of its own, as the ranks of tensor parallelism."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "rows"))["rows"]
    values = _VALUES if is_equal or rank < 2 else _VALUES + 1
    return distribute_tensor(values.clone(), mesh, [Shard(0)], src_data_rank=None)


def _save(rank: int, world_size: int, is_equal: bool) -> None:
    with (
        localckpt.CliqueReplicationStrategy.from_replication_params(2, 2, timeout_s=_S) as copies,
        make_manager("disk", node_store(), "", copies, timeout=_S) as manager,
    ):
        manager.save({"w": _on_own_mesh(rank, is_equal=is_equal), "b": torch.ones(3)}, 1)


def _into(mesh: DeviceMesh) -> dict[str, Any]:
    empty = torch.full_like(_VALUES, -1.0)
    return {
        "w": distribute_tensor(empty, mesh, [Shard(0)], src_data_rank=None),
        "b": torch.zeros(3),
    }


def _load(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    with make_manager("disk", node_store(), timeout=_S, elastic=True) as manager:
        loaded, _ = manager.load(into=_into(mesh))
    expected = distribute_tensor(_VALUES, mesh, [Shard(0)], src_data_rank=None)
    assert torch.equal(loaded["w"].to_local(), expected.to_local())
    assert torch.equal(loaded["b"], torch.ones(3))


def _load_what_differs(rank: int, world_size: int) -> None:
    state = _into(init_device_mesh("cpu", (world_size,)))
    with make_manager("disk", node_store(), timeout=_S, elastic=True) as manager:
        text = error_of(lambda: manager.load(into=state), MismatchError)
    assert "w: differs between the shards of ranks 0 and 2" in text
    assert bool((state["w"].to_local() == -1.0).all())
    assert not state["b"].any()


@pytest.mark.parametrize("after", [2, 3])
def test_tensors_of_one_key_that_are_equal_are_loaded(after: int, tmp_path: Path) -> None:
    nodes = [tmp_path / "a", tmp_path / "b"]
    run_ranks(_save, 4, True, store_per_node=nodes, timeout_s=_S)

    run_ranks(_load, after, store_per_node=nodes, timeout_s=_S)


def test_tensors_of_one_key_that_differ_are_never_mixed(tmp_path: Path) -> None:
    nodes = [tmp_path / "a", tmp_path / "b"]
    run_ranks(_save, 4, False, store_per_node=nodes, timeout_s=_S)

    run_ranks(_load_what_differs, 2, store_per_node=nodes, timeout_s=_S)


def test_a_copy_that_is_damaged_where_it_is_compared_makes_way_for_another(
    tmp_path: Path,
) -> None:
    nodes = [tmp_path / "a", tmp_path / "b"]
    run_ranks(_save, 4, True, store_per_node=nodes, timeout_s=_S)
    (copy,) = nodes[0].rglob("000000000001.2.*")
    damage(copy)

    run_ranks(_load, 3, store_per_node=nodes, timeout_s=_S)

    assert not copy.exists()
