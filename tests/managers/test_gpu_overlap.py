"""Saving from a GPU: what is saved is the value at the call, and guarded copies run on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import localckpt
from tests.managers.jobs import KINDS, MAX_S, assert_same, make_manager

pytestmark = [
    pytest.mark.fault("changed-state"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("guarded", [False, True], ids=["alone", "guarded"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_call_however_soon_training_changes_them(
    kind: str,
    guarded: bool,
    node_dirs: Callable[[int], list[Path]],
    shm_roots: Callable[[int], list[Path]],
) -> None:
    root = (node_dirs if kind == "disk" else shm_roots)(1)[0]
    model = torch.nn.Linear(4096, 4096, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    average = torch.zeros(4096, 4096, device="cuda")
    with (
        make_manager(kind, root, guard=optimizer if guarded else ()) as manager,
        localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue,
    ):
        for iteration in range(4):
            model(torch.randn(64, 4096, device="cuda")).square().mean().backward()
            optimizer.step()
            average.fill_(iteration)
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "average": average,
            }
            moments = [
                {name: value.clone() for name, value in moment.items()}
                for moment in optimizer.state.values()
            ]
            weight = model.weight.detach().clone()
            request = manager.save(state, iteration, is_async=True)
            # Nobody guards this one; the optimizer's are changed by its next step.
            average.fill_(-1)
            optimizer.step()
            queue.schedule_async_request(request)
            queue.maybe_finalize_async_calls(blocking=True)
            assert manager.find_latest() == iteration
            found, _ = manager.load()
            assert_same(found["average"], torch.full_like(average, iteration))
            assert_same(found["model"]["weight"], weight)
            for number, moment in enumerate(moments):
                assert_same(found["optimizer"]["state"][number], moment)


@pytest.mark.parametrize("into", [False, True], ids=["new tensors", "in place"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_on_a_gpu_comes_back_there(
    kind: str,
    into: bool,
    node_dirs: Callable[[int], list[Path]],
    shm_roots: Callable[[int], list[Path]],
) -> None:
    root = (node_dirs if kind == "disk" else shm_roots)(1)[0]
    state = {
        # Several pieces, tensors that lie in one piece with others, views, and host memory between.
        "large": torch.rand(3_000_000, device="cuda"),
        "small": [torch.rand(1000, device="cuda") for _ in range(50)],
        "host": torch.rand(100_000),
        "turned": torch.rand(300, 200, device="cuda").t(),
        "bytes": torch.randint(0, 256, (1_000_003,), dtype=torch.uint8, device="cuda"),
    }
    expected = {name: copy.deepcopy(value) for name, value in state.items()}
    with make_manager(kind, root) as manager:
        manager.save(state, 1)
    for tensor in (state["large"], state["turned"], state["bytes"], *state["small"]):
        tensor.zero_()

    with make_manager(kind, root) as manager:
        assert manager.find_latest() == 1
        found, _ = manager.load(into=state if into else None)

    assert_same(found, expected)
    assert (found["large"] is state["large"]) == into
