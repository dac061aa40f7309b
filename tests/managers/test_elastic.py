"""Another number of ranks loads what the nodes hold, bit for bit as from shared storage."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim.lr_scheduler import StepLR

import localckpt
from tests.managers.jobs import Dirs, on_node
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
        ([4], [3], ("fsdp", "fsdp"), "copies"),
        ([3], [4], ("fsdp", "fsdp"), "copies"),
        ([2, 2], [3], ("tp", "fsdp"), "copies"),
        ([2, 2], [2, 1], ("hsdp", "hsdp"), "copies"),
        ([4], [1], ("fsdp", "plain"), "copies"),
        ([1], [3], ("plain", "fsdp"), "copies"),
        # Parity is of three ranks or more. A smaller job that goes on has copies, or nothing.
        ([4], [3], ("fsdp", "fsdp"), "parity"),
        ([3], [4], ("fsdp", "fsdp"), "parity"),
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


_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
    "Adagrad": torch.optim.Adagrad,
    "Adam": lambda of: torch.optim.Adam(of, amsgrad=True, lr=torch.tensor(0.1), foreach=False),
    "Adamax": torch.optim.Adamax,
    "AdamW": torch.optim.AdamW,
    "ASGD": torch.optim.ASGD,
    "LBFGS": torch.optim.LBFGS,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda of: torch.optim.RMSprop(of, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
    "SGD": lambda of: torch.optim.SGD(of, lr=0.1, momentum=0.9),
}


def _job(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    state: dict[str, Any] = {}
    for name, make in _OPTIMIZERS.items():
        model = torch.nn.ModuleDict({n: torch.nn.Linear(3, 3) for n in ("used", "late")})
        optimizer = make(model.parameters())
        # The schedule, which has the optimizer as an attribute, comes before it.
        state |= {
            f"model of {name}": model,
            f"schedule of {name}": StepLR(optimizer, 2),
            name: optimizer,
        }
    return state


def _train_all(state: dict[str, Any], layers: tuple[str, ...]) -> None:
    for name in _OPTIMIZERS:
        model, optimizer = state[f"model of {name}"], state[name]

        def loss(model: Any = model, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            value = sum(model[layer](torch.eye(3)).square().sum() for layer in layers)
            value.backward()
            return value

        for _ in range(2):
            optimizer.step(loss)


def _save_all(rank: int, world_size: int) -> None:
    state = _job(1)
    _train_all(state, ("used",))
    with on_node() as manager:
        manager.save(state, 1)


def _load_all(rank: int, world_size: int, seed: int, layers: tuple[str, ...]) -> None:
    saved, state = _job(1), _job(2)
    _train_all(saved, ("used",))
    if layers:
        _train_all(state, layers)
    gradients = [p.grad for name in _OPTIMIZERS for p in state[f"model of {name}"].parameters()]
    with on_node(elastic=True) as manager:
        manager.load(into=state)

    for name in _OPTIMIZERS:
        torch.testing.assert_close(
            state[name].state_dict(), saved[name].state_dict(), rtol=0, atol=0, msg=name
        )
    now = [p.grad for name in _OPTIMIZERS for p in state[f"model of {name}"].parameters()]
    assert all(a is b for a, b in zip(gradients, now, strict=True))
    _train_all(state, ("used", "late"))
    _train_all(saved, ("used", "late"))
    for name in _OPTIMIZERS:
        for one, other in zip(
            *(s[f"model of {name}"].parameters() for s in (state, saved)), strict=True
        ):
            assert torch.equal(one, other), name


@pytest.mark.fault("world-size")
@pytest.mark.parametrize("trained", [(), ("used",), ("used", "late")])
def test_another_number_of_ranks_has_the_states_that_were_saved_and_no_others(
    trained: tuple[str, ...], tmp_path: Path
) -> None:
    run_ranks(_save_all, 2, store_per_node=[tmp_path])

    run_ranks(_load_all, 1, 2, trained, store_per_node=[tmp_path])
