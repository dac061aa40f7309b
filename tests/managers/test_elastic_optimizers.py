"""States of optimizers on another number of ranks: exactly those that were saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim.lr_scheduler import StepLR

from tests.managers.jobs import make_manager
from tests.ranks import node_store, run_ranks

_S = 60.0
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


def _train(state: dict[str, Any], layers: tuple[str, ...]) -> None:
    for name in _OPTIMIZERS:
        model, optimizer = state[f"model of {name}"], state[name]

        def loss(model: Any = model, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            value = sum(model[layer](torch.eye(3)).square().sum() for layer in layers)
            value.backward()
            return value

        for _ in range(2):
            optimizer.step(loss)


def _save(rank: int, world_size: int) -> None:
    state = _job(1)
    _train(state, ("used",))
    with make_manager("disk", node_store(), timeout=_S) as manager:
        manager.save(state, 1)


def _load(rank: int, world_size: int, seed: int, layers: tuple[str, ...]) -> None:
    saved, state = _job(1), _job(2)
    _train(saved, ("used",))
    if layers:
        _train(state, layers)
    gradients = [p.grad for name in _OPTIMIZERS for p in state[f"model of {name}"].parameters()]
    with make_manager("disk", node_store(), timeout=_S, elastic=True) as manager:
        manager.load(into=state)

    for name in _OPTIMIZERS:
        torch.testing.assert_close(
            state[name].state_dict(), saved[name].state_dict(), rtol=0, atol=0, msg=name
        )
    now = [p.grad for name in _OPTIMIZERS for p in state[f"model of {name}"].parameters()]
    assert all(a is b for a, b in zip(gradients, now, strict=True))
    _train(state, ("used", "late"))
    _train(saved, ("used", "late"))
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
    run_ranks(_save, 2, store_per_node=[tmp_path], timeout_s=_S)

    run_ranks(_load, 1, 2, trained, store_per_node=[tmp_path], timeout_s=_S)


_WHOLE = torch.arange(35.0).reshape(7, 5)


def _sharded(world_size: int, fill: float | None = None) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world_size,))
    values = _WHOLE if fill is None else torch.full_like(_WHOLE, fill)
    parameters = [
        torch.nn.Parameter(distribute_tensor(values, mesh, [Shard(0)], src_data_rank=None))
        for _ in range(2)
    ]
    return {
        "w": {str(n): p.detach() for n, p in enumerate(parameters)},
        "o": torch.optim.AdamW(parameters, lr=0.1),
    }


def _parameters(state: dict[str, Any]) -> list[Any]:
    return list(state["o"].param_groups[0]["params"])


def _step_first(state: dict[str, Any]) -> None:
    first = _parameters(state)[0]
    first.grad = first.detach().clone()
    state["o"].step()


def _save_sharded(rank: int, world_size: int) -> None:
    state = _sharded(world_size)
    _step_first(state)
    with make_manager("disk", node_store(), timeout=_S) as manager:
        manager.save(state, 1)


def _load_sharded(rank: int, world_size: int) -> None:
    saved, state = _sharded(world_size), _sharded(world_size, fill=-1.0)
    _step_first(saved)
    with make_manager("disk", node_store(), timeout=_S, elastic=True) as manager:
        manager.load(into=state)

    first, late = _parameters(state)
    moments = state["o"].state[first]
    assert late not in state["o"].state
    for name, wanted in saved["o"].state[_parameters(saved)[0]].items():
        assert type(moments[name]) is type(wanted)
        found, wanted = (
            t.full_tensor() if isinstance(t, DTensor) else t for t in (moments[name], wanted)
        )
        assert torch.equal(found, wanted), name
    assert moments["exp_avg"].placements == first.placements


@pytest.mark.fault("world-size")
def test_states_of_sharded_parameters_are_sharded_as_these(tmp_path: Path) -> None:
    run_ranks(_save_sharded, 2, store_per_node=[tmp_path], timeout_s=_S)

    run_ranks(_load_sharded, 3, store_per_node=[tmp_path], timeout_s=_S)
