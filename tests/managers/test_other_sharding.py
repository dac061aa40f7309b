"""As many ranks load what the nodes hold into tensors that are sharded otherwise."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from localckpt import CliqueReplicationStrategy, MismatchError
from tests.managers.jobs import error_of, make_manager
from tests.ranks import node_store, run_ranks

_S = 60.0
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


def _manager(**options: Any) -> Any:
    strategy = CliqueReplicationStrategy.from_replication_params(replication_factor=2, timeout_s=_S)
    return make_manager("disk", node_store(), "run", strategy, timeout=_S, **options)


def _save(rank: int, world_size: int, sharding: str) -> None:
    with _manager() as manager:
        manager.save(_state(sharding) | {"seed": rank}, 3)


def _load(rank: int, world_size: int, shardings: list[str]) -> None:
    for sharding in shardings:
        with _manager(elastic=True, private={"seed": "keep"}) as manager:
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
    run_ranks(_save, 3, saved, store_per_node=nodes, timeout_s=_S)
    shutil.rmtree(nodes[1])
    nodes[1].mkdir()

    run_ranks(_load, 3, loaded, store_per_node=nodes, timeout_s=_S)


def _load_what_does_not_fit(rank: int, world_size: int) -> None:
    with _manager(elastic=True, private={"seed": "keep"}) as manager:
        state = _state("rows in another order", fill=-1.0)
        more = error_of(lambda: manager.load(into=state | {"v": torch.ones(2)}), MismatchError)
        assert "v: given, not saved" in more
        some = None if rank == 0 else state
        not_all = error_of(lambda: manager.load(into=some), MismatchError)
        assert "some of this job load into tensors that are sharded otherwise" in not_all
        assert bool((state["w"].to_local() == -1.0).all())
    with _manager(elastic=True) as manager:
        no_rule = error_of(lambda: manager.load(into=state), MismatchError)
        assert "'seed'" in no_rule
        assert "shards its tensors otherwise" in no_rule
        assert bool((state["w"].to_local() == -1.0).all())
    with _manager() as manager:
        not_asked = error_of(lambda: manager.load(into=state), MismatchError)
        assert "make the manager with elastic=True" in not_asked


def test_a_state_that_does_not_fit_is_refused_on_all_ranks_and_left_as_it_is_on_each(
    tmp_path: Path,
) -> None:
    nodes = [tmp_path / name for name in "abc"]
    run_ranks(_save, 3, "rows", store_per_node=nodes, timeout_s=_S)

    run_ranks(_load_what_does_not_fit, 3, store_per_node=nodes, timeout_s=_S)
