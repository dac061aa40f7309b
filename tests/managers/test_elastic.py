"""Other ranks, or other shardings, load what the nodes hold, bit for bit as from shared storage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from localckpt import MismatchError
from tests.managers.jobs import error_of
from tests.scenarios import Begin

# Ranks import FSDP at once, which takes long where the processor is busy.
_LONG_S = 120.0

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def _sharded(mesh_shape: Sequence[int], kind: str) -> torch.nn.Module:
    torch.manual_seed(7)
    # Uneven shards on 3 ranks, empty ones on 4, and a scalar-like bias.
    layers = [torch.nn.Linear(*of) for of in ((12, 20), (20, 8), (8, 2))]
    net: torch.nn.Module = torch.nn.Sequential(*layers)
    if kind == "fsdp":
        fully_shard(layers[0], mesh=init_device_mesh("cpu", tuple(mesh_shape)))
        fully_shard(net, mesh=init_device_mesh("cpu", tuple(mesh_shape)))
    elif kind == "hsdp":
        names = ("replicas", "shards")
        fully_shard(net, mesh=init_device_mesh("cpu", tuple(mesh_shape), mesh_dim_names=names))
    elif kind == "tp":
        mesh = init_device_mesh("cpu", tuple(mesh_shape), mesh_dim_names=("data", "tensor"))
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        net = parallelize_module(net, mesh["tensor"], plan)
        fully_shard(net, mesh=mesh["data"])
    return net


def _train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(100 + step)
        net(torch.randn(6, 12)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _tensors(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict()}


def _save(manager: Any, mesh: Sequence[int], kind: str, shared: Path) -> None:
    net = _sharded(mesh, kind)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    _train(net, optimizer, 3)
    manager.save({"model": net, "optimizer": optimizer, "step": 3, "seen": [1, (2, "b")]}, 3)
    dcp.save(_tensors(net, optimizer), checkpoint_id=shared)


def _load(manager: Any, mesh: Sequence[int], kind: str, shared: Path) -> None:
    net = _sharded(mesh, kind)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.5)
    state = {"model": net, "optimizer": optimizer, "step": 0, "seen": []}
    assert manager.find_latest() == 3
    loaded, ckpt_id = manager.load(into=state)
    assert ckpt_id == (3, manager.rank, "job")
    assert loaded["step"] == 3
    assert loaded["seen"] == [1, (2, "b")]
    assert optimizer.param_groups[0]["lr"] == 0.01
    other = _sharded(mesh, kind)
    reference = torch.optim.AdamW(other.parameters(), lr=0.01)
    _train(other, reference, 1)
    wanted = _tensors(other, reference)
    dcp.load(wanted, checkpoint_id=shared)
    found = dict(_flat(_tensors(net, optimizer)))
    for key, tensor in _flat(wanted):
        assert torch.equal(_local(found[key]), _local(tensor)), key
    # It trains and saves on.
    _train(net, optimizer, 1)
    manager.save({"model": net, "optimizer": optimizer, "step": 6, "seen": []}, 6)
    assert manager.find_latest() == 6


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
        ([3], [4], ("fsdp", "fsdp"), "parity"),
    ],
)
def test_another_number_of_ranks_gets_what_shared_storage_gives_and_trains_on(
    before: Sequence[int],
    after: Sequence[int],
    kinds: tuple[str, str],
    redundancy: str,
    job: Begin,
    tmp_path: Path,
) -> None:
    def of(ranks: int) -> Any:
        protected = f"parity 1 of {ranks}" if redundancy == "parity" else (None, 2)
        return {"ranks": ranks, "redundancy": protected if ranks > 1 else None}

    saved_by, loaded_by = math.prod(before), math.prod(after)
    nodes = range(max(saved_by, loaded_by))
    shared = tmp_path / "shared"
    running = job(len(nodes), timeout=_LONG_S).restart(on=nodes[:saved_by], **of(saved_by))
    running.call(_save, before, kinds[0], shared)
    if saved_by > 1:
        running.lose(0)

    running.restart(on=nodes[-loaded_by:], elastic=True, **of(loaded_by))
    running.call(_load, after, kinds[1], shared).run()


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


def _save_as(manager: Any, sharding: str) -> None:
    manager.save(_given(sharding) | {"seed": manager.rank}, 3)


def _load_as(manager: Any, sharding: str) -> None:
    given, wanted = _given(sharding, fill=-1.0), _given(sharding)["w"]
    loaded, ckpt_id = manager.load(into=given)
    assert ckpt_id == (3, manager.rank, "job")
    assert loaded["w"] is given["w"]
    assert torch.equal(_local(loaded["w"]), _local(wanted)), sharding
    assert loaded["seed"] == manager.rank


def _refuse(manager: Any, told: str, more: Any = (), not_on: int | None = None) -> None:
    """A load into rows in another order, and ``more``, is an error that changes nothing."""
    state = _given("rows in another order", fill=-1.0)
    into = None if manager.rank == not_on else state | dict(more)
    assert told in error_of(lambda: manager.load(into=into), MismatchError)
    assert bool((state["w"].to_local() == -1.0).all())


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("rows", ["rows in another order", "columns", "whole", "plain"]),
        ("plain", ["rows", "rows in another order", "whole", "plain"]),
        ("whole", ["plain", "columns", "whole"]),
    ],
)
def test_as_many_ranks_load_into_another_sharding_after_a_node_was_lost_or_are_refused(
    saved: str, loaded: list[str], job: Begin
) -> None:
    running = job(3, redundancy=(None, 2)).call(_save_as, saved)
    if saved == "rows":
        running.restart().call(_refuse, "make the manager with elastic=True")
        running.restart(elastic=True).call(_refuse, "shards its tensors otherwise")
        running.call(_refuse, "'seed'")
    running.restart(elastic=True, private={"seed": "keep"})
    if saved == "rows":
        running.call(_refuse, "v: given, not saved", {"v": torch.ones(2)})
        running.call(_refuse, "of this job load into tensors that are sharded otherwise", not_on=0)
    running.lose(1)

    for sharding in loaded:
        running.call(_load_as, sharding)
    running.run()
