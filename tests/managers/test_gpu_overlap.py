"""Saving from a GPU: what is saved is the value at the call, and guarded copies run on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import localckpt
from tests.managers.jobs import KINDS, MAX_S, assert_same, make_manager

pytestmark = pytest.mark.fault("changed-state")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


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
