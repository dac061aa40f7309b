"""Ranks load what the nodes hold into tensors that are sharded otherwise."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from localckpt import CliqueReplicationStrategy, MismatchError
from tests.managers.jobs import damage, error_of, on_node
from tests.ranks import run_ranks

_WHOLE = torch.arange(24.0).reshape(6, 4)
# Order of the ranks in the mesh, and the placement of the tensor. Rank 0 has the same rows in the
# second as in the first.
_SHARDINGS: dict[str, tuple[list[int], Any]] = {
    "rows": ([0, 1, 2], Shard(0)),
    "rows in another order": ([0, 2, 1], Shard(0)),
    "columns": ([0, 1, 2], Shard(1)),
    "whole": ([0, 1, 2], Replicate()),
}


def _state(sharding: str, fill: float | None = None) -> dict[str, Any]:
    if sharding == "plain":
        return {"w": _WHOLE.clone() if fill is None else torch.full_like(_WHOLE, fill), "seed": -1}
    ranks, placement = _SHARDINGS[sharding]
    given = _WHOLE if fill is None else torch.full_like(_WHOLE, fill)
    mesh = DeviceMesh("cpu", ranks)
    return {"w": distribute_tensor(given, mesh, [placement], src_data_rank=None), "seed": -1}


def _on_node(**options: Any) -> Any:
    return on_node("run", CliqueReplicationStrategy.from_replication_params(), **options)


def _save(rank: int, world_size: int, sharding: str) -> None:
    with _on_node() as manager:
        manager.save(_state(sharding) | {"seed": rank}, 3)


def _load(rank: int, world_size: int, shardings: list[str]) -> None:
    for sharding in shardings:
        with _on_node(elastic=True, private={"seed": "keep"}) as manager:
            given = _state(sharding, fill=-1.0)
            loaded, ckpt_id = manager.load(into=given)
            assert ckpt_id == (3, rank, "run")
            assert loaded["w"] is given["w"]
            wanted = _state(sharding)["w"]
            found, wanted = (
                tensor.to_local() if isinstance(tensor, DTensor) else tensor
                for tensor in (loaded["w"], wanted)
            )
            assert torch.equal(found, wanted), sharding
            assert loaded["seed"] == rank


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("rows", ["rows in another order", "columns", "whole", "plain"]),
        ("plain", ["rows", "rows in another order", "whole", "plain"]),
        ("whole", ["plain", "columns", "whole"]),
    ],
)
def test_as_many_ranks_load_into_another_sharding_also_after_a_node_was_lost(
    saved: str, loaded: list[str], tmp_path: Path
) -> None:
    nodes = [tmp_path / name for name in "abc"]
    run_ranks(_save, 3, saved, store_per_node=nodes)
    shutil.rmtree(nodes[1])
    nodes[1].mkdir()

    run_ranks(_load, 3, loaded, store_per_node=nodes)


def _load_what_does_not_fit(rank: int, world_size: int) -> None:
    with _on_node(elastic=True, private={"seed": "keep"}) as manager:
        state = _state("rows in another order", fill=-1.0)
        more = error_of(lambda: manager.load(into=state | {"v": torch.ones(2)}), MismatchError)
        assert "v: given, not saved" in more
        some = None if rank == 0 else state
        not_all = error_of(lambda: manager.load(into=some), MismatchError)
        assert "some of this job load into tensors that are sharded otherwise" in not_all
        assert bool((state["w"].to_local() == -1.0).all())
    with _on_node(elastic=True) as manager:
        no_rule = error_of(lambda: manager.load(into=state), MismatchError)
        assert "'seed'" in no_rule
        assert "shards its tensors otherwise" in no_rule
        assert bool((state["w"].to_local() == -1.0).all())
    with _on_node() as manager:
        not_asked = error_of(lambda: manager.load(into=state), MismatchError)
        assert "make the manager with elastic=True" in not_asked


def test_a_state_that_does_not_fit_is_refused_on_all_ranks_and_left_as_it_is_on_each(
    tmp_path: Path,
) -> None:
    nodes = [tmp_path / name for name in "abc"]
    run_ranks(_save, 3, "rows", store_per_node=nodes)

    run_ranks(_load_what_does_not_fit, 3, store_per_node=nodes)


# Tensors of one key that ranks shard over meshes of their own, loaded by other ranks.


_VALUES = torch.arange(4000.0).reshape(40, 100)


def _on_own_mesh(rank: int, *, is_equal: bool) -> DTensor:
    """Rows over two ranks: each pair has a mesh of its own, as the ranks of tensor parallelism."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "rows"))["rows"]
    values = _VALUES if is_equal or rank < 2 else _VALUES + 1
    return distribute_tensor(values.clone(), mesh, [Shard(0)], src_data_rank=None)


def _save_pairs(rank: int, world_size: int, is_equal: bool) -> None:
    with on_node("", CliqueReplicationStrategy.from_replication_params(2, 2)) as manager:
        manager.save({"w": _on_own_mesh(rank, is_equal=is_equal), "b": torch.ones(3)}, 1)


def _into(mesh: DeviceMesh) -> dict[str, Any]:
    empty = torch.full_like(_VALUES, -1.0)
    return {
        "w": distribute_tensor(empty, mesh, [Shard(0)], src_data_rank=None),
        "b": torch.zeros(3),
    }


def _load_pairs(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    with on_node(elastic=True) as manager:
        loaded, _ = manager.load(into=_into(mesh))
    expected = distribute_tensor(_VALUES, mesh, [Shard(0)], src_data_rank=None)
    assert torch.equal(loaded["w"].to_local(), expected.to_local())
    assert torch.equal(loaded["b"], torch.ones(3))


def _load_pairs_that_differ(rank: int, world_size: int) -> None:
    state = _into(init_device_mesh("cpu", (world_size,)))
    with on_node(elastic=True) as manager:
        text = error_of(lambda: manager.load(into=state), MismatchError)
    assert "w: differs between the shards of ranks 0 and 2" in text
    assert bool((state["w"].to_local() == -1.0).all())
    assert not state["b"].any()


def test_tensors_of_one_key_that_differ_are_never_mixed(tmp_path: Path) -> None:
    nodes = [tmp_path / "a", tmp_path / "b"]
    run_ranks(_save_pairs, 4, False, store_per_node=nodes)

    run_ranks(_load_pairs_that_differ, 2, store_per_node=nodes)


def test_tensors_of_one_key_that_are_equal_are_loaded_also_with_one_damaged(
    tmp_path: Path,
) -> None:
    nodes = [tmp_path / "a", tmp_path / "b"]
    run_ranks(_save_pairs, 4, True, store_per_node=nodes)
    (copy,) = nodes[0].rglob("000000000001.2.*")
    damage(copy)

    run_ranks(_load_pairs, 3, store_per_node=nodes)

    assert not copy.exists()
