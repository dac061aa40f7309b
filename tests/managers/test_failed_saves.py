"""A save that fails on one rank is an exception on all, and changes nothing but that."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import localckpt
from localckpt import CheckpointingException, PeerLostError, SaveFailedError, StorageError
from tests.managers.jobs import (
    KINDS,
    MAX_S,
    assert_same,
    await_true,
    cliques,
    error_of,
    files,
    iterations_on,
    make_manager,
    our_threads,
    resume,
    save,
    state_of,
)
from tests.ranks import DeadRank, announce, await_announced, node_store, run_ranks, start_ranks

Dirs = Callable[[int], list[Path]]


class _Trouble:
    """Makes a manager's ``_save`` fail when it is asked to."""

    trouble: str | None = None

    def _save(self, state_dict: Any, ckpt_id: localckpt.CkptID) -> None:
        if self.trouble == "refuses":
            raise StorageError(f"this disk is bad, said for {ckpt_id.iteration}")
        if self.trouble == "raises":
            raise ZeroDivisionError("a mistake of the user's")
        if self.trouble == "does nothing":
            return
        if self.trouble == "forgets the replica" and ckpt_id.rank != self.rank:  # type: ignore[attr-defined]
            return
        super()._save(state_dict, ckpt_id)  # type: ignore[misc]


class TroubledDiskManager(_Trouble, localckpt.LocalCheckpointManager):
    pass


class TroubledMemoryManager(_Trouble, localckpt.InMemoryCheckpointManager):
    pass


def _troubled_manager(kind: str, repl: Any, **options: Any) -> Any:
    options = {"keep_last": 2, "timeout": MAX_S} | options
    if kind == "disk":
        return TroubledDiskManager(node_store(), "job", repl, **options)
    return TroubledMemoryManager("job", repl, root=node_store(), **options)


_SAID = {
    "refuses": "this disk is bad",
    "raises": "a mistake of the user's",
    "does nothing": "does not have it",
    "forgets the replica": "does not have it",
    "cannot be pickled": "cannot be pickled",
}


def _fail_in_every_way(
    rank: int, world_size: int, kind: str, is_async: bool, replicated: bool
) -> dict[tuple[str, int], str]:
    told = {}
    repl = cliques(1, 2) if replicated else None
    with (
        localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queues,
        _troubled_manager(kind, repl) as manager,
    ):
        queue = queues if is_async else None
        save(manager, state_of(rank, 0), 0, queue)
        good, iteration = 0, 1
        for how in _SAID:
            if how == "forgets the replica" and not replicated:
                continue
            for bad_rank in range(world_size):
                before = files(node_store())
                state = state_of(rank, iteration)
                if rank == bad_rank:
                    manager.trouble = how
                    if how == "cannot be pickled":
                        state["model"]["hook"] = lambda: None

                told[how, bad_rank] = error_of(
                    lambda i=iteration, s=state: save(manager, s, i, queue)
                )

                manager.trouble = None
                assert iterations_on(node_store()) == {good} | {max(good - 2, 0)}
                kept = [name for name in files(node_store()) if not name.endswith(".spare")]
                assert kept == [name for name in before if not name.endswith(".spare")]
                assert resume(manager, rank, good) == "own node"
                # Both the failed iteration and a later one can be saved now.
                iteration = good = good + 2
                if how == "raises":
                    save(manager, state_of(rank, iteration - 1), iteration - 1, queue)
                save(manager, state_of(rank, iteration), iteration, queue)
                if how == "raises":
                    assert iterations_on(node_store()) == {iteration - 1, iteration}
                    iteration = good = good + 2
                    save(manager, state_of(rank, iteration), iteration, queue)
                assert resume(manager, rank, good) == "own node"
                iteration += 1
    if repl:
        repl.close()
    # Nothing that failed counts for those who come after.
    with make_manager(kind, node_store(), "job") as manager:
        assert resume(manager, rank, good) == "own node"
    assert our_threads() == []
    return told


@pytest.mark.parametrize("replicated", [False, True], ids=["alone", "replicated"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_save_that_fails_on_one_rank_is_an_error_on_all_and_the_next_one_is_good(
    kind: str, is_async: bool, replicated: bool, node_dirs: Dirs, shm_roots: Dirs
) -> None:
    nodes = (node_dirs if kind == "disk" else shm_roots)(2)

    told = run_ranks(_fail_in_every_way, 2, kind, is_async, replicated, store_per_node=nodes)

    for (how, bad_rank), text in told[0].items():
        assert f"rank {bad_rank}" in text
        assert _SAID[how] in text
        assert told[1][how, bad_rank] == text
        kind_of_error = text.partition(":")[0]
        assert kind_of_error == {
            "refuses": "StorageError",
            "raises": "CheckpointingException",
        }.get(how, "SaveFailedError")
