"""What is saved is what the state was when ``save`` was called, whatever training does next."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import localckpt
from tests.managers.jobs import KINDS, assert_same, make_manager

pytestmark = pytest.mark.fault("changed-state")


@pytest.fixture
def training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    # An optimizer's first step makes torch's compiler cache, among the temporary files if not here.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiler"))
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(), torch.nn.Linear(64, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().sum().backward()
        optimizer.step()

    step()
    return model, optimizer, step


def _spoil(value: Any) -> None:
    """Change every tensor and every container in place."""
    if isinstance(value, torch.Tensor):
        with torch.no_grad():
            value.add_(1).mul_(3) if value.dtype.is_floating_point else value.add_(1)
    elif isinstance(value, dict):
        for inner in list(value.values()):
            _spoil(inner)
        value.clear()
    elif isinstance(value, list):
        for inner in value:
            _spoil(inner)
        value.clear()


@pytest.mark.parametrize("kind", KINDS)
def test_training_on_while_a_save_is_written_does_not_change_what_is_saved(
    kind: str,
    node_dirs: Callable[[int], list[Path]],
    shm_roots: Callable[[int], list[Path]],
    training: tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], None]],
) -> None:
    model, optimizer, step = training
    root = (node_dirs if kind == "disk" else shm_roots)(1)[0]
    expected: dict[int, Any] = {}
    with (
        localckpt.AsyncCallsQueue(timeout_s=20.0) as queue,
        make_manager(kind, root, keep_last=9) as manager,
    ):
        # The second and later saves go into buffers and files that are used again.
        for iteration in range(4):
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "random": torch.get_rng_state(),
                "scalars": [torch.tensor(iteration), torch.tensor(0.5, dtype=torch.float64)],
                "view": model[0].weight.detach()[1::2, ::3],
                "history": [iteration, {"loss": 0.1}],
            }
            steps = [value["step"] for value in state["optimizer"]["state"].values()]
            assert len(steps) == 4
            assert all(one == iteration + 1 for one in steps)
            expected[iteration] = copy.deepcopy(state)

            request = manager.save(state, iteration, is_async=True)

            # Before anything of the request has been carried out.
            step()
            _spoil([state["random"], state["scalars"], state["history"]])
            queue.schedule_async_request(request)
            step()
            state["optimizer"]["param_groups"][0]["lr"] = 7.0
            queue.maybe_finalize_async_calls(blocking=True)
            optimizer.param_groups[0]["lr"] = 0.1
            for one in steps:
                one.fill_(iteration + 2)
            manager.find_latest()
            found, _ = manager.load()

            assert_same(found["optimizer"]["state"], expected[iteration]["optimizer"]["state"])
            assert_same(found["model"], expected[iteration]["model"])
            for key in ("random", "scalars", "history", "view"):
                assert_same(found[key], expected[iteration][key])
            assert (
                found["optimizer"]["param_groups"]
                == (expected[iteration]["optimizer"]["param_groups"])
            )


@pytest.mark.parametrize("kind", KINDS)
def test_destroying_a_state_right_after_the_call_does_not_change_what_is_saved(
    kind: str, node_dirs: Callable[[int], list[Path]], shm_roots: Callable[[int], list[Path]]
) -> None:
    root = (node_dirs if kind == "disk" else shm_roots)(1)[0]
    with (
        localckpt.AsyncCallsQueue(timeout_s=20.0) as queue,
        make_manager(kind, root, keep_last=1) as manager,
    ):
        for iteration in range(4):
            state = {"a": [torch.full((300_000,), float(iteration)), {"b": torch.arange(7)}]}
            queue.schedule_async_request(manager.save(state, iteration, is_async=True))
            _spoil(state)
            assert state == {}
        queue.maybe_finalize_async_calls(blocking=True)
        manager.find_latest()
        found, _ = manager.load()

    assert_same(found, {"a": [torch.full((300_000,), 3.0), {"b": torch.arange(7)}]})


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_state_can_be_changed_without_changing_the_checkpoint(
    kind: str, node_dirs: Callable[[int], list[Path]], shm_roots: Callable[[int], list[Path]]
) -> None:
    root = (node_dirs if kind == "disk" else shm_roots)(1)[0]
    with make_manager(kind, root) as manager:
        manager.save({"a": torch.arange(1000)}, 0)
        manager.find_latest()
        first, _ = manager.load()
        first["a"].zero_()
        second, _ = manager.load()

    assert_same(second, {"a": torch.arange(1000)})
