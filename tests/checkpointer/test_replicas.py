"""Parts of a training state may be marked as equal on several ranks, and are compared if asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import localckpt
from localckpt import DivergenceError
from tests.checkpointer.loops import stores
from tests.managers.jobs import MAX_S
from tests.ranks import node_store, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def _train(
    rank: int,
    world_size: int,
    steps: int,
    spoiled: tuple[int, int] | None,
    options: dict[str, Any],
    marked: bool = True,
) -> tuple[int, int | None, Any, str]:
    """A start of a job under DDP: its first step, the newest save, the error, and its weights."""
    torch.manual_seed(7)
    inner = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.LayerNorm(6))
    model = torch.nn.parallel.DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    mark = localckpt.replicated if marked else lambda part: part
    seen = [0]
    state = {
        "model": mark(model),
        "optimizer": mark(optimizer),
        "loss": mark((lambda: torch.ones(2), lambda value: None)),
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3),
        "seen": (lambda: torch.tensor(seen), lambda value: seen.__setitem__(0, int(value))),
    }
    settings: dict[str, Any] = {"every": localckpt.Every(steps=1), "timeout_s": MAX_S, **options}
    error: Any = None
    with localckpt.Checkpointer(state, local=node_store(), **settings) as checkpointer:
        first = checkpointer.resume()
        for step in range(first, first + steps):
            torch.manual_seed(100 * step + rank)
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen[0] += 4 + rank
            if spoiled == (rank, step):
                # An exponent's bit of a moment, as a GPU might get it wrong.
                moment = next(iter(optimizer.state.values()))["exp_avg_sq"]
                moment.view(torch.int32)[2, 3] ^= 1 << 24
            try:
                checkpointer.step(step)
                checkpointer.wait_until_finished()
            except DivergenceError as raised:
                error = raised.iteration, raised.keys, raised.ranks, raised.is_minority
                break
        newest = checkpointer.newest
    weights = str([parameter.tolist() for parameter in model.parameters()])
    return first, newest, error, weights


@pytest.mark.fault("divergent-replica")
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_replica_that_differs_under_ddp_ends_the_loop_and_an_older_state_is_resumed(
    world_size: int, tmp_path: Path
) -> None:
    nodes = stores(tmp_path, world_size)
    options = {"check_replicas": 1}

    told = run_ranks(_train, world_size, 6, (1, 3), options, store_per_node=nodes)
    undisturbed = run_ranks(
        _train, world_size, 6, None, {}, store_per_node=stores(tmp_path / "u", 2)
    )
    again = run_ranks(_train, world_size, 3, None, options, store_per_node=nodes)

    key = "optimizer.state.0.exp_avg_sq"
    ranks = (1,) if world_size == 3 else (0, 1)
    assert [t[:3] for t in told] == [(0, 2, (3, (key,), ranks, world_size == 3))] * world_size
    # From the step before on, as if nothing had happened.
    assert [t[:3] for t in again] == [(3, 5, None)] * world_size
    assert again[0][3] == undisturbed[0][3] == undisturbed[1][3]


def test_with_a_warning_training_goes_on_and_a_restart_takes_what_is_sound(tmp_path: Path) -> None:
    nodes = stores(tmp_path, 3)
    options = {"check_replicas": 1, "on_divergence": "warn"}

    told = run_ranks(_train, 3, 5, (2, 3), options, store_per_node=nodes)
    again = run_ranks(_train, 3, 0, None, {}, store_per_node=nodes)

    assert [t[:3] for t in told] == [(0, 4, None)] * 3
    assert [t[0] for t in again] == [3] * 3
