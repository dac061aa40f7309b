"""Other ranks, or other shardings, load what the nodes hold, bit for bit as from shared storage."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import localckpt
from localckpt import MismatchError
from tests.managers.jobs import Dirs, damage, error_of, on_node
from tests.ranks import run_ranks

# Ranks import FSDP at once, which takes long where the processor is busy.
_LONG_S = 120.0
# Over gloo torch 2.8 adds up the gradients of ranks, so each number of ranks trains otherwise.
_AVERAGES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


class _Net(torch.nn.Module):
    """Uneven shards on 3 ranks, empty ones on 4, and a scalar-like bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(12, 20)
        self.second = torch.nn.Linear(20, 8)
        self.few = torch.nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.few(self.second(torch.relu(self.first(x))))
        return result


def _sharded(mesh_shape: Sequence[int], kind: str) -> torch.nn.Module:
    torch.manual_seed(7)
    net = _Net()
    if kind == "fsdp":
        fully_shard(net.first, mesh=init_device_mesh("cpu", tuple(mesh_shape)))
        fully_shard(net, mesh=init_device_mesh("cpu", tuple(mesh_shape)))
    elif kind == "hsdp":
        names = ("replicas", "shards")
        fully_shard(net, mesh=init_device_mesh("cpu", tuple(mesh_shape), mesh_dim_names=names))
    elif kind == "tp":
        mesh = init_device_mesh("cpu", tuple(mesh_shape), mesh_dim_names=("data", "tensor"))
        plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
        net = parallelize_module(net, mesh["tensor"], plan)
        fully_shard(net, mesh=mesh["data"])
    return net


def _train(
    net: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, stop: int
) -> list[float]:
    """Make steps on batches that are the same on all ranks; the loss of each."""
    losses = []
    for step in range(first, stop):
        torch.manual_seed(100 + step)
        loss = net(torch.randn(6, 12)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _tensors(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict()}


def _manager(world_size: int, redundancy: str, **options: Any) -> Any:
    strategy: Any = None
    if redundancy == "parity" and world_size > 2:
        strategy = localckpt.ParityReplicationStrategy(1, world_size, timeout_s=_LONG_S)
    elif world_size > 1:
        strategy = localckpt.CliqueReplicationStrategy.from_replication_params(
            replication_factor=2, timeout_s=_LONG_S
        )
    return on_node("run", strategy, **options)


def _save(
    rank: int, world_size: int, mesh: Sequence[int], kind: str, shared: Path, redundancy: str
) -> None:
    net = _sharded(mesh, kind)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    _train(net, optimizer, 0, 3)
    with _manager(world_size, redundancy) as manager:
        manager.save({"model": net, "optimizer": optimizer, "step": 3, "seen": [1, (2, "b")]}, 3)
    dcp.save(_tensors(net, optimizer), checkpoint_id=shared)


def _load(
    rank: int, world_size: int, mesh: Sequence[int], kind: str, shared: Path, redundancy: str
) -> None:
    net = _sharded(mesh, kind)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.5)
    state = {"model": net, "optimizer": optimizer, "step": 0, "seen": []}
    with _manager(world_size, redundancy, elastic=True) as manager:
        assert manager.find_latest() == 3
        loaded, ckpt_id = manager.load(into=state)
        assert ckpt_id == (3, rank, "run")
        assert loaded["step"] == 3
        assert loaded["seen"] == [1, (2, "b")]
        assert optimizer.param_groups[0]["lr"] == 0.01
        _assert_as_shared(net, optimizer, mesh, kind, shared)
        losses = _train(net, optimizer, 3, 6)
        if _AVERAGES:
            assert losses == pytest.approx(_undisturbed_losses()[3:], rel=1e-4)
        manager.save({"model": net, "optimizer": optimizer, "step": 6, "seen": []}, 6)
        assert manager.find_latest() == 6


def _undisturbed_losses() -> list[float]:
    net = _sharded([1], "plain")
    return _train(net, torch.optim.AdamW(net.parameters(), lr=0.01), 0, 6)


def _assert_as_shared(
    net: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    mesh: Sequence[int],
    kind: str,
    shared: Path,
) -> None:
    other = _sharded(mesh, kind)
    reference = torch.optim.AdamW(other.parameters(), lr=0.01)
    _train(other, reference, 0, 1)
    wanted = _tensors(other, reference)
    dcp.load(wanted, checkpoint_id=shared)
    found = dict(_flat(_tensors(net, optimizer)))
    for key, tensor in _flat(wanted):
        assert torch.equal(_local(found[key]), _local(tensor)), key


def _flat(state: Any, above: str = "") -> list[tuple[str, torch.Tensor]]:
    if isinstance(state, torch.Tensor):
        return [(above, state)]
    items = state.items() if isinstance(state, dict) else ()
    return [pair for key, value in items for pair in _flat(value, f"{above}.{key}")]


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


@pytest.mark.rows(2)
@pytest.mark.parametrize(
    ("before", "after", "kinds", "redundancy"),
    [
        ([3], [4], ("fsdp", "fsdp"), "copies"),
        ([2, 2], [3], ("tp", "fsdp"), "copies"),
        ([2, 2], [2, 1], ("hsdp", "hsdp"), "copies"),
        ([1], [3], ("plain", "fsdp"), "copies"),
        # Parity is of three ranks or more. A smaller job that goes on has copies, or nothing.
        ([8], [5], ("fsdp", "fsdp"), "parity"),
        ([4], [1], ("fsdp", "plain"), "parity"),
    ],
)
def test_another_number_of_ranks_gets_what_shared_storage_gives_and_trains_on(
    before: Sequence[int],
    after: Sequence[int],
    kinds: tuple[str, str],
    redundancy: str,
    node_dirs: Dirs,
    tmp_path: Path,
) -> None:
    """Save, delete the first node's store, and load on as many nodes as there are ranks."""
    saved_by, world_size = math.prod(before), math.prod(after)
    shared = tmp_path / "shared"
    nodes = node_dirs(max(saved_by, world_size))
    args = (before, kinds[0], shared, redundancy)
    run_ranks(_save, saved_by, *args, store_per_node=nodes[:saved_by], timeout_s=_LONG_S)
    if saved_by > 1:
        shutil.rmtree(nodes[0])
        nodes[0].mkdir()

    where = nodes[:1] if world_size == 1 else nodes[-world_size:]
    if world_size == 1 or redundancy == "parity":
        # One rank alone must see all nodes' files. Of a group with one parity only one node may be
        # gone, so the first of the nodes that go on has the files of those that do not.
        for node in nodes[1:]:
            if node not in where:
                shutil.copytree(node, where[0], dirs_exist_ok=True)
    args = (after, kinds[1], shared, redundancy)
    run_ranks(_load, world_size, *args, store_per_node=where, timeout_s=_LONG_S)


# As many ranks, whose tensors are sharded otherwise.


_WHOLE = torch.arange(24.0).reshape(6, 4)
# Order of the ranks in the mesh, and the placement of the tensor. Rank 0 has the same rows in the
# second as in the first.
_SHARDINGS: dict[str, tuple[list[int], Any]] = {
    "rows": ([0, 1, 2], Shard(0)),
    "rows in another order": ([0, 2, 1], Shard(0)),
    "columns": ([0, 1, 2], Shard(1)),
    "whole": ([0, 1, 2], Replicate()),
}


def _given(sharding: str, fill: float | None = None) -> dict[str, Any]:
    if sharding == "plain":
        return {"w": _WHOLE.clone() if fill is None else torch.full_like(_WHOLE, fill), "seed": -1}
    ranks, placement = _SHARDINGS[sharding]
    given = _WHOLE if fill is None else torch.full_like(_WHOLE, fill)
    mesh = DeviceMesh("cpu", ranks)
    return {"w": distribute_tensor(given, mesh, [placement], src_data_rank=None), "seed": -1}


def _in_copies(**options: Any) -> Any:
    return on_node("run", localckpt.CliqueReplicationStrategy.from_replication_params(), **options)


def _save_as(rank: int, world_size: int, sharding: str) -> None:
    with _in_copies() as manager:
        manager.save(_given(sharding) | {"seed": rank}, 3)


def _load_as(rank: int, world_size: int, shardings: list[str]) -> None:
    for sharding in shardings:
        with _in_copies(elastic=True, private={"seed": "keep"}) as manager:
            given = _given(sharding, fill=-1.0)
            loaded, ckpt_id = manager.load(into=given)
            assert ckpt_id == (3, rank, "run")
            assert loaded["w"] is given["w"]
            wanted = _given(sharding)["w"]
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
    run_ranks(_save_as, 3, saved, store_per_node=nodes)
    shutil.rmtree(nodes[1])
    nodes[1].mkdir()

    run_ranks(_load_as, 3, loaded, store_per_node=nodes)


def _load_what_does_not_fit(rank: int, world_size: int) -> None:
    with _in_copies(elastic=True, private={"seed": "keep"}) as manager:
        state = _given("rows in another order", fill=-1.0)
        more = error_of(lambda: manager.load(into=state | {"v": torch.ones(2)}), MismatchError)
        assert "v: given, not saved" in more
        some = None if rank == 0 else state
        not_all = error_of(lambda: manager.load(into=some), MismatchError)
        assert "some of this job load into tensors that are sharded otherwise" in not_all
        assert bool((state["w"].to_local() == -1.0).all())
    with _in_copies(elastic=True) as manager:
        no_rule = error_of(lambda: manager.load(into=state), MismatchError)
        assert "'seed'" in no_rule
        assert "shards its tensors otherwise" in no_rule
        assert bool((state["w"].to_local() == -1.0).all())
    with _in_copies() as manager:
        not_asked = error_of(lambda: manager.load(into=state), MismatchError)
        assert "make the manager with elastic=True" in not_asked


def test_a_state_that_does_not_fit_is_refused_on_all_ranks_and_left_as_it_is_on_each(
    tmp_path: Path,
) -> None:
    nodes = [tmp_path / name for name in "abc"]
    run_ranks(_save_as, 3, "rows", store_per_node=nodes)

    run_ranks(_load_what_does_not_fit, 3, store_per_node=nodes)


# Tensors of one key that ranks shard over meshes of their own, loaded by other ranks.


_VALUES = torch.arange(4000.0).reshape(40, 100)


def _save_pairs(rank: int, world_size: int) -> None:
    """Rows over two ranks: each pair has a mesh of its own, as the ranks of tensor parallelism."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "rows"))["rows"]
    strategy = localckpt.CliqueReplicationStrategy.from_replication_params(2, 2)
    for odd in (0, 1):
        values = _VALUES + odd * (rank // 2)
        rows = distribute_tensor(values, mesh, [Shard(0)], src_data_rank=None)
        with on_node(f"odd{odd}", strategy) as manager:
            manager.save({"w": rows, "b": torch.ones(3)}, 1)


def _load_pairs(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    expected = distribute_tensor(_VALUES, mesh, [Shard(0)], src_data_rank=None)
    empty = torch.full_like(_VALUES, -1.0)
    rows = distribute_tensor(empty, mesh, [Shard(0)], src_data_rank=None)
    state = {"w": rows, "b": torch.zeros(3)}
    with on_node("odd1", elastic=True) as manager:
        text = error_of(lambda: manager.load(into=state), MismatchError)
        assert "w: differs between the shards of ranks 0 and 2" in text
        assert bool((rows.to_local() == -1.0).all())
        assert not state["b"].any()
    with on_node("odd0", elastic=True) as manager:
        manager.load(into=state)
    assert torch.equal(rows.to_local(), expected.to_local())
    assert torch.equal(state["b"], torch.ones(3))


def test_tensors_of_one_key_are_loaded_where_equal_also_with_one_damaged_and_never_mixed(
    tmp_path: Path,
) -> None:
    nodes = [tmp_path / "a", tmp_path / "b"]
    run_ranks(_save_pairs, 4, store_per_node=nodes)
    (copy,) = (nodes[0] / "session-odd0").rglob("000000000001.2.*")
    damage(copy)

    run_ranks(_load_pairs, 3, store_per_node=nodes)

    assert not copy.exists()
