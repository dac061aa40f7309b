"""Calls that one rank makes alone fail once, on all ranks, and the ranks save together again."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from localckpt import (
    Checkpointer,
    Every,
    GlobalCheckpointManager,
)
from tests.checkpointer.loops import stores
from tests.ranks import node_store, run_ranks


def _train(
    rank: int,
    world_size: int,
    lone: str,
    at: int,
    steps: int,
    options: dict[str, Any],
    is_over_once_saved: bool = False,
) -> tuple[int | None, int]:
    """Train, with one call on one rank alone; returns the newest step, and the failed saves.

    It may be over as soon as a save of a later step is complete.
    """
    state = {"value": torch.nn.Linear(2, 2)}
    with Checkpointer(state, local=node_store(), timeout_s=20.0, **options) as checkpointer:
        for step in range(checkpointer.resume(), steps):
            dist.barrier()
            time.sleep(0.005)
            if step == at and lone == f"save on rank {rank}":
                checkpointer.save(step)
            if step != at or lone != f"no step on rank {rank}":
                checkpointer.step(step)
            if is_over_once_saved and (checkpointer.newest or 0) > at:
                break
        dist.barrier()
        checkpointer.wait_until_finished()
        newest, failed = checkpointer.newest, checkpointer.failed_saves
    again = Checkpointer(state, local=node_store(), **options)
    assert again.resume() == (newest or 0) + 1
    again.close()
    return newest, failed


@pytest.mark.parametrize(
    ("lone", "at", "steps", "failed"),
    [
        *(("save on rank 0", 7, 5, 1), ("save on rank 1", 8, 2, 1)),
        *(("no step on rank 1", 9, 5, 1), ("save on rank 1", 9, 5, 0)),
    ],
)
def test_one_save_fails_on_all_ranks_and_the_next_ones_do_not(
    lone: str, at: int, steps: int, failed: int, tmp_path: Path
) -> None:
    options = {"every": Every(steps=steps)}

    ended = run_ranks(_train, 2, lone, at, 40, options, store_per_node=stores(tmp_path, 1))

    assert ended == [(39, failed)] * 2


def _save_to_shared_storage(rank: int, world_size: int, lone: int, shared: Path) -> tuple[int, int]:
    """Train, with one save to shared storage on one rank alone; returns failures, and a step."""
    state = {"value": torch.nn.Linear(2, 2)}
    for parameter in state["value"].parameters():
        torch.nn.init.ones_(parameter)
    options: dict[str, Any] = {"local": node_store(), "shared": shared, "timeout_s": 2.0}
    with Checkpointer(
        state, every=Every(steps=5), shared_every=Every(steps=10), **options
    ) as checkpointer:
        for step in range(checkpointer.resume(), 20):
            if step == 7 and rank == lone:
                checkpointer.save(step, shared=True)
            dist.barrier()
            checkpointer.step(step)
    with GlobalCheckpointManager(shared) as manager:
        return checkpointer.failed_saves, manager.find_latest()


@pytest.mark.parametrize("lone", [0, 1])
def test_a_lone_save_to_shared_storage_costs_no_later_one(lone: int, tmp_path: Path) -> None:
    ended = run_ranks(
        *(_save_to_shared_storage, 2, lone, tmp_path / "shared"),
        store_per_node=stores(tmp_path, 1),
    )

    assert ended == [(1, 19)] * 2
