"""States on shared storage: each rank gets what it saved, or an error says why not."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_module

from localckpt import Checkpointer, CheckpointingException, MismatchError, replicated
from tests.checkpointer.loops import save_once, stores
from tests.ranks import node_store, run_ranks


def _places(path: Path) -> dict[str, Any]:
    return {"local": path / "local", "shared": path / "shared", "events": ()}


def _resume(path: Path, state: dict[str, Any], **arguments: Any) -> int:
    """Resume from shared storage alone."""
    shutil.rmtree(path / "local")
    with Checkpointer(state, **_places(path)) as checkpointer:
        return checkpointer.resume(**arguments)


def _values(state: dict[str, Any]) -> list[Any]:
    return [value.tolist() for module in state.values() for value in module.state_dict().values()]


# What several ranks have under one name.


def _digests(model: torch.nn.Module) -> list[str]:
    values = model.state_dict().values()
    return [hashlib.sha256(value.numpy().tobytes()).hexdigest() for value in values]


_DIFFERING = ("stages", "experts", "one element", "rates", "large buffer", "statistics")


def _try_each(rank: int, world_size: int, shared: Path) -> dict[str, list[Any]]:
    return {kind: _try(rank, shared / kind, node_store() / kind, kind) for kind in _DIFFERING}


def _try(rank: int, shared: Path, node: Path, kind: str) -> list[Any]:
    """Save and load what differs between ranks; return what was saved, and what was loaded."""
    torch.manual_seed(rank)
    state: dict[str, Any] = {}
    if kind == "experts":
        state["model"] = torch.nn.ModuleDict({"shared": torch.nn.Linear(2, 2)})
        state["model"]["shared"].requires_grad_(False).weight.fill_(1).add_(0)
        state["model"]["shared"].bias.fill_(0)
        state["model"]["expert"] = torch.nn.Linear(2, 2)
    elif kind == "one element":
        weight = torch.zeros(5_000_000)
        weight[4_321_000] = rank
        state["model"] = torch.nn.Module()
        state["model"].register_parameter("w", torch.nn.Parameter(weight))
    elif kind == "rates":
        torch.manual_seed(0)
        state["model"] = torch.nn.Linear(2, 2)
        state["opt"] = torch.optim.SGD(state["model"].parameters(), lr=1.0 + rank)
    elif kind == "statistics":
        state["model"] = torch.nn.BatchNorm1d(3)
        state["model"](torch.randn(4, 3))
    elif kind == "large buffer":
        state["model"] = torch.nn.Module()
        state["model"].register_buffer("cache", torch.full((70_000,), float(rank)))
    else:
        state["model"] = torch.nn.Linear(2, 2)
    groups = state["opt"].param_groups if kind == "rates" else [{"lr": 0}]
    saved = [*_digests(state["model"]), groups[0]["lr"]]
    options: dict[str, Any] = {"shared": shared, "timeout_s": 20, "events": ()}
    save_once(state, local=node / "a", **options)
    for tensor in state["model"].state_dict().values():
        tensor.zero_()
    groups[0]["lr"] = 0
    with Checkpointer(state, local=node / "b", **options) as checkpointer:
        assert checkpointer.resume() == 1
    dist.barrier()
    groups = state["opt"].param_groups if kind == "rates" else groups
    return [saved, [*_digests(state["model"]), groups[0]["lr"]]]


@pytest.mark.fault("changed-program")
def test_each_rank_gets_its_own_of_values_that_have_one_name(tmp_path: Path) -> None:
    told = run_ranks(_try_each, 2, tmp_path / "shared", store_per_node=[tmp_path / "node"])

    for kind in _DIFFERING:
        assert told[0][kind][0] != told[1][kind][0], kind
        for of_rank in told:
            saved, loaded = of_rank[kind]
            assert saved == loaded, kind


def _save_by_halves(
    rank: int, world_size: int, shared: Path, kind: str, is_equal: bool
) -> str | None:
    """Save modules of one name that each half of the ranks shards for itself; return the error."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    half = rank * 2 // world_size
    halves = [[*range(world_size // 2)], [*range(world_size // 2, world_size)]]
    meshes = [DeviceMesh("cpu", ranks) for ranks in halves]
    torch.manual_seed(0 if is_equal else half)
    model: torch.nn.Module = torch.nn.Linear(8, 8)
    if kind == "fsdp1":
        group = meshes[half].get_group()
        model = FullyShardedDataParallel(model, process_group=group, device_id=torch.device("cpu"))
    else:
        fully_shard(model, mesh=meshes[half])
    try:
        save_once({"model": model}, local=node_store(), shared=shared, timeout_s=20, events=())
    except CheckpointingException as error:
        return str(error)
    return None


@pytest.mark.fault("changed-program")
@pytest.mark.parametrize(
    ("kind", "world_size", "is_equal"),
    [("fsdp2", 2, False), ("fsdp2", 2, True), ("fsdp1", 4, False)],
)
def test_sharded_stages_of_one_name_are_refused_unless_they_are_equal(
    kind: str, world_size: int, is_equal: bool, tmp_path: Path
) -> None:
    errors = run_ranks(
        *(_save_by_halves, world_size, tmp_path / "shared", kind, is_equal),
        store_per_node=[tmp_path / "node"],
    )

    for error in errors:
        if is_equal:
            assert error is None
        else:
            assert "model.weight" in error
            assert "two global tensors have one name" in error
    assert len([*(tmp_path / "shared").rglob(".metadata")]) == is_equal


# What the program has changed since.


def _tied(is_tied: bool, seed: int = 1) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = torch.nn.ModuleDict({"emb": torch.nn.Embedding(4, 3), "head": torch.nn.Linear(3, 4)})
    if is_tied:
        model["head"].weight = model["emb"].weight
    return model


@pytest.mark.fault("changed-program")
@pytest.mark.parametrize("was_tied", [False, True])
def test_weights_that_are_tied_or_apart_since_are_refused(was_tied: bool, tmp_path: Path) -> None:
    save_once({"model": _tied(was_tied)}, **_places(tmp_path))
    model = _tied(not was_tied, seed=2)
    before = _values({"model": model})

    with pytest.raises(MismatchError, match=r"sharing memory with model.head.weight"):
        _resume(tmp_path, {"model": model})

    assert _values({"model": model}) == before


@pytest.mark.fault("changed-program")
def test_an_optimizer_of_weights_that_were_tied_is_refused_before_anything_is_changed(
    tmp_path: Path,
) -> None:
    tied, apart = _tied(True), _tied(False, seed=2)
    save_once({"model": tied, "opt": torch.optim.AdamW(tied.parameters())}, **_places(tmp_path))
    before = _values({"model": apart})

    with pytest.raises(MismatchError, match=r"given, not saved: model.head.weight"):
        _resume(tmp_path, {"model": apart, "opt": torch.optim.AdamW(apart.parameters())})

    assert _values({"model": apart}) == before


@pytest.mark.fault("changed-program")
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda width: torch.nn.Linear(width, 2), "weight"),
        (lambda width: torch.nn.BatchNorm1d(width), "running_mean"),
    ],
)
def test_another_dtype_is_an_error_unless_it_is_asked_for(
    make: Callable[[int], torch.nn.Module], name: str, tmp_path: Path
) -> None:
    model: torch.nn.Module = make(3)
    save_once({"model": model}, **_places(tmp_path))
    half = make(3).bfloat16()
    before = _values({"model": half})

    with pytest.raises(MismatchError, match=rf"model.{name}.*allow_dtype_change=True"):
        _resume(tmp_path, {"model": half})
    assert _values({"model": half}) == before
    assert _resume(tmp_path, {"model": half}, allow_dtype_change=True) == 1
    assert _values({"model": half}) == _values({"model": model.bfloat16()})


# Another number of ranks.


def _resume_drifted(
    rank: int, world_size: int, shared: Path, kind: str, is_first: bool
) -> tuple[int, str]:
    model = torch.nn.Sequential(torch.nn.Linear(400, 400), torch.nn.BatchNorm1d(400))
    if kind == "Replicate":
        mesh = init_device_mesh("cpu", (world_size,))
        distribute_module(model, mesh)
    with torch.no_grad():
        for number, tensor in enumerate(model.state_dict().values()):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            local.fill_(number + rank if is_first else -1)
    state = {"model": replicated(model) if kind == "replicated()" else model}
    with Checkpointer(state, local=node_store(), shared=shared, save_last=False) as checkpointer:
        first = checkpointer.resume()
        if is_first:
            checkpointer.step(0)
            checkpointer.save(0, shared=True)
            checkpointer.wait_until_finished()
        values = model.state_dict().values()
        return first, str([(v.to_local() if isinstance(v, DTensor) else v).sum() for v in values])


@pytest.mark.fault("divergent-replica")
@pytest.mark.parametrize("kind", ["replicated()", "Replicate"])
def test_what_is_said_to_be_equal_and_has_drifted_apart_comes_back_as_each_rank_had_it(
    kind: str, tmp_path: Path
) -> None:
    nodes, shared = stores(tmp_path, 2), tmp_path / "shared"
    saved = run_ranks(*(_resume_drifted, 2, shared, kind, True), store_per_node=nodes)
    for node in nodes:
        shutil.rmtree(node)

    found = run_ranks(*(_resume_drifted, 2, shared, kind, False), store_per_node=nodes)

    assert saved[0] != saved[1]
    assert found == [(1, values) for _, values in saved]
