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
