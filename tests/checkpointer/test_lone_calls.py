"""Calls that one rank makes alone fail once, on all ranks, and the ranks save together again."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from localckpt import (
    AsyncCallsQueue,
    Checkpointer,
    CheckpointingException,
    Every,
    GlobalCheckpointManager,
    LocalCheckpointManager,
    SaveFailedError,
)
from tests.checkpointer.loops import stores
from tests.managers.jobs import error_of
from tests.ranks import node_store, run_ranks


def _train(
    rank: int, world_size: int, lone: str, at: int, steps: int, options: dict[str, Any]
) -> tuple[int | None, int]:
    """Train, with one call on one rank alone; returns the newest step, and the failed saves."""
    state = {"value": torch.nn.Linear(2, 2)}
    with Checkpointer(state, local=node_store(), timeout_s=20.0, **options) as checkpointer:
        for step in range(checkpointer.resume(), steps):
            dist.barrier()
            time.sleep(0.005)
            if step == at and lone == f"save on rank {rank}":
                checkpointer.save(step)
            if step != at or lone != f"no step on rank {rank}":
                checkpointer.step(step)
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
        *(("save on rank 0", 7, 5, 1), ("save on rank 1", 7, 5, 1), ("save on rank 0", 5, 5, 1)),
        *(("save on rank 1", 8, 2, 1), ("no step on rank 1", 9, 5, 1), ("save on rank 1", 9, 5, 0)),
        ("no step on rank 0", 12, 5, 0),
    ],
)
def test_one_save_fails_on_all_ranks_and_the_next_ones_do_not(
    lone: str, at: int, steps: int, failed: int, tmp_path: Path
) -> None:
    options = {"every": Every(steps=steps)}

    ended = run_ranks(_train, 2, lone, at, 40, options, store_per_node=stores(tmp_path, 1))

    assert ended == [(39, failed)] * 2


def _save_to_shared_storage(
    rank: int, world_size: int, lone: int, shared: Path
) -> tuple[list[str], int]:
    """Train, with one save to shared storage on one rank alone; returns its errors, and a step."""
    state, failed = {"value": torch.nn.Linear(2, 2)}, []
    for parameter in state["value"].parameters():
        torch.nn.init.ones_(parameter)
    options: dict[str, Any] = {"local": node_store(), "shared": shared, "timeout_s": 2.0}
    with Checkpointer(
        state, every=Every(steps=5), shared_every=Every(steps=10), **options
    ) as checkpointer:
        for step in range(checkpointer.resume(), 20):
            if step == 7 and rank == lone:
                save = partial(checkpointer.save, step, shared=True)
                failed.append(error_of(save, CheckpointingException))
            dist.barrier()
            checkpointer.step(step)
    with GlobalCheckpointManager(shared) as manager:
        return failed, manager.find_latest()


@pytest.mark.parametrize("lone", [0, 1])
def test_a_lone_save_to_shared_storage_fails_alone(lone: int, tmp_path: Path) -> None:
    ended = run_ranks(
        *(_save_to_shared_storage, 2, lone, tmp_path / "shared"),
        store_per_node=stores(tmp_path, 1),
    )

    assert ended[1 - lone] == ([], 19)
    assert (len(ended[lone][0]), ended[lone][1]) == (1, 19)


def test_ranks_that_keep_copies_for_each_other_save_together_again(tmp_path: Path) -> None:
    options = {"every": Every(steps=5), "replication_factor": 2}

    ended = run_ranks(
        *(_train, 2, "save on rank 0", 7, 40, options), store_per_node=stores(tmp_path, 2)
    )

    assert ended == [(39, 1)] * 2


def test_ranks_whose_cadence_is_measured_plan_together_again(tmp_path: Path) -> None:
    options = {"every": Every(overhead=0.2), "save_last": False}

    ended = run_ranks(
        *(_train, 2, "save on rank 1", 250, 700, options), store_per_node=stores(tmp_path, 1)
    )

    (newest, failed), other = ended
    assert (newest, failed) == other
    assert newest is not None
    assert newest > 400
    assert failed <= 1


def _save(rank: int, world_size: int) -> list[Any]:
    """Save by hand, one iteration on rank 0 alone; returns what was finalized, and the errors."""
    ended: list[Any] = []
    with LocalCheckpointManager(node_store(), timeout=20.0) as manager, AsyncCallsQueue() as queue:
        for step in range(40):
            dist.barrier()
            time.sleep(0.01)
            if step % 5 == 4 or (step == 6 and rank == 0):
                state = {"value": torch.ones(4)}
                queue.schedule_async_request(manager.save(state, step, is_async=True))
            try:
                queue.maybe_finalize_async_calls()
            except SaveFailedError as error:
                ended.append("was save(6) called on every rank?" in str(error))
        dist.barrier()
        queue.maybe_finalize_async_calls(blocking=True)
        return [*ended, manager.find_latest()]


def test_ranks_that_poll_by_themselves_save_together_again(tmp_path: Path) -> None:
    ended = run_ranks(_save, 2, store_per_node=stores(tmp_path, 1))

    assert ended == [[True, 39]] * 2
