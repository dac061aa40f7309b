"""Optimizers on both tiers: the states that are there are saved, and those come back."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from localckpt import Checkpointer, MismatchError
from tests.checkpointer.loops import resume_once, save_once
from tests.managers.jobs import assert_same

_Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def _optimizers() -> dict[str, _Make]:
    """Every optimizer of torch that takes dense gradients, and those with options of weight."""
    kinds = {
        name: kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    del kinds["Optimizer"], kinds["SparseAdam"]
    made: dict[str, _Make] = {
        name: lambda p, kind=kind: kind(p, lr=0.01) for name, kind in kinds.items()
    }
    made["SGD-momentum"] = lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9)
    made["AdamW-amsgrad"] = lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True)
    made["Adam-tensor-lr"] = lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False)
    made["LBFGS-of-4"] = lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2, history_size=4)
    return made


_OPTIMIZERS = _optimizers()


class _Net(torch.nn.Module):
    """Two layers, of which the second one is not used at first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        # Muon takes matrices only.
        self.used = torch.nn.Linear(4, 4, bias=False)
        self.late = torch.nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.late(self.used(x)) if both else self.used(x)


def _step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int, both: bool
) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
        loss: torch.Tensor = model(x, both).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.zero_grad()


def _on_both(path: Path, state: dict[str, Any]) -> Checkpointer:
    return Checkpointer(state, local=path / "local", shared=path / "shared", events=())


@pytest.mark.rows(4)
@pytest.mark.fault("changed-program")
@pytest.mark.parametrize("name", sorted(_OPTIMIZERS))
@pytest.mark.parametrize(("steps", "has_gradients"), [(0, False), (2, True)])
def test_states_of_each_optimizer_come_back_as_they_were(
    name: str, steps: int, has_gradients: bool, tmp_path: Path
) -> None:
    _require_same(_OPTIMIZERS[name], steps, has_gradients, "local", tmp_path)


def _require_same(make: _Make, steps: int, has_gradients: bool, lost: str, tmp_path: Path) -> None:
    model = _Net()
    optimizer = make(list(model.parameters()))
    with _on_both(tmp_path, {"model": model, "optimizer": optimizer}) as checkpointer:
        checkpointer.resume()
        for number in range(steps):
            _step(model, optimizer, number, both=False)
        before = copy.deepcopy(optimizer.state_dict())
        checkpointer.step(0)
        checkpointer.save(0, shared=True)
        checkpointer.wait_until_finished()
    assert_same(optimizer.state_dict(), before)
    expected = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())

    again = _Net()
    loaded = make(list(again.parameters()))
    if has_gradients:
        again(torch.ones(2, 4), True).sum().backward()
    shutil.rmtree(tmp_path / lost)
    with _on_both(tmp_path, {"model": again, "optimizer": loaded}) as checkpointer:
        assert checkpointer.resume() == 1
        assert_same(loaded.state_dict(), expected[1])
        for number in range(2, 5):
            _step(model, optimizer, number, both=True)
            _step(again, loaded, number, both=True)

    assert_same(again.state_dict(), model.state_dict())
    assert_same(loaded.state_dict(), optimizer.state_dict())


def _tagged(*groups: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with a key of the user's in each group."""
    return torch.optim.AdamW([{"params": [*group], "tag": 1} for group in groups])


@pytest.mark.fault("changed-program")
@pytest.mark.parametrize("lost", ["local", "shared"])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            _OPTIMIZERS["SGD-momentum"],
            r"AdamW, given as optimizer .*SGD \(.*saved, not given: .*betas.*momentum",
        ),
        (torch.optim.AdamW, r"saved, not given: .*\btag"),
        (
            lambda p: _tagged(p[:1]),
            r"parameters are others \(saved, not given: model.late.weight\)",
        ),
        (
            lambda p: _tagged(*([one] for one in p)),
            r"divide the parameters otherwise .*param_groups\[1\] of 1 parameters",
        ),
        (
            lambda p: _tagged(p[::-1]),
            r"in another order \(number 0 was model.used.weight, and is model.late.w",
        ),
    ],
    ids=["class", "key", "fewer", "groups", "order"],
)
def test_an_optimizer_that_was_changed_is_an_error_before_anything_is_changed(
    change: _Make, told: str, lost: str, tmp_path: Path
) -> None:
    model = _Net()
    save_once(
        {"model": model, "optimizer": _tagged(model.parameters())},
        local=tmp_path / "local",
        shared=tmp_path / "shared",
    )
    shutil.rmtree(tmp_path / lost)
    model = _Net()
    before = copy.deepcopy(model.state_dict())
    optimizer = change(list(model.parameters()))

    places = {tier: tmp_path / tier for tier in ("local", "shared")}
    with pytest.raises(MismatchError, match=told):
        resume_once({"model": model, "optimizer": optimizer}, **places, events=())

    assert_same(model.state_dict(), before)
    assert not optimizer.state


class _Custom(torch.optim.SGD):
    """An optimizer whose state has more than tensors of parameters."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        self.state.clear()
        self.state["run"] = {"steps": 1, "name": "text"}
        for group in self.param_groups:
            group["found"] = 1.5
            for p in group["params"]:
                half = torch.full((3,), 1 / 3, dtype=torch.float64)
                self.state[p] |= {"empty": {}, "text": "text", "nested": {"a": [half, (half, 2)]}}
                self.state[p]["blocks"] = {0: torch.ones(1)}
        self.state[self.param_groups[0]["params"][1]] = torch.full((2,), 1 / 3).double()
        return loss


def _custom(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    empty: list[dict[str, Any]] = [{"params": [], "lr": 1.0}, {"params": [], "lr": 2.0}]
    return _Custom([{"params": parameters}, *empty], lr=0.1)


@pytest.mark.fault("changed-program")
@pytest.mark.parametrize("lost", ["local", "shared"])
def test_all_that_an_optimizer_of_the_users_has_comes_back(lost: str, tmp_path: Path) -> None:
    _require_same(_custom, 1, False, lost, tmp_path)
