"""What fails, stalls or dies in a global save is told to all ranks, and costs no older save."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import localckpt
from localckpt import PeerLostError, StorageError
from localckpt.global_tier import places
from localckpt.storage.write import sync_folder
from tests.global_tier.models import (
    Unpicklable,
    assert_loads,
    at_each_open,
    checkpoints_in,
    leftovers_in,
    manager_on,
    state_of,
)
from tests.managers.jobs import error_of, no_file_larger_than
from tests.ranks import run_ranks

# Far more than it takes to be told, far less than the timeout.
_AT_ONCE_S, _TIMEOUT_S = 20.0, 60.0
# What a rank that never comes is waited for, where nothing else has to be done in that time.
_SHORT_S = 1.5


def _told_at_once(call: Callable[[], Any]) -> str:
    began = time.monotonic()
    told = error_of(call, StorageError)
    assert time.monotonic() - began < _AT_ONCE_S
    return told


def _fail_on_one(rank: int, world_size: int, root: Path) -> list[str]:
    told = []
    with manager_on(root, timeout=_TIMEOUT_S) as manager:
        manager.save(state_of(1, rank), 1, is_async=True)
        manager.wait_until_finished()

        large = state_of(2, rank) | {f"large {rank}": torch.ones(100_000)}
        with no_file_larger_than(100_000 if rank == 1 else resource.RLIM_INFINITY):
            manager.save(large, 2, is_async=True)
            told.append(_told_at_once(manager.wait_until_finished))
        assert_loads(manager, rank, 1)
        manager.save(state_of(3, rank), 3, is_async=True)
        assert_loads(manager, rank, 3)

        manager.save(state_of(4, rank), 4)
        if rank == 0:
            # A stranger's directory stands where the next checkpoint is to be.
            (root / checkpoints_in(root)[-1].replace("4.", "5.") / "file").mkdir(parents=True)
        manager.save(state_of(5, rank), 5, is_async=True)
        told.append(_told_at_once(manager.wait_until_finished))
        assert_loads(manager, rank, 4)
        manager.save(state_of(6, rank), 6, is_async=True)
        assert_loads(manager, rank, 6)
    return told


@pytest.mark.fault("refused-io")
def test_what_fails_on_one_rank_is_raised_on_all_at_once_and_the_next_save_works(
    tmp_path: Path,
) -> None:
    told = run_ranks(_fail_on_one, 3, tmp_path)

    assert told[0] == told[1] == told[2]
    writing, committing = told[0]
    assert writing.startswith("StorageError: could not save iteration 2: rank 1: ")
    assert "__1_" in writing
    assert "File too large" in writing
    assert "could not save iteration 5: rank 0: could not commit" in committing
    assert leftovers_in(tmp_path) == []


# Who dies, when it is about to open what; the first rank commits, and without a file dies then.
_DEATHS: dict[str, tuple[int, str]] = {
    "as the first rank writes": (0, ".distcp"),
    "as another rank writes": (1, ".distcp"),
    "after the commit": (0, ""),
}


def _die(rank: int, world_size: int, root: Path, where: str) -> str:
    victim, opens = _DEATHS[where]
    doomed = threading.Event()

    def die() -> None:
        if rank == victim and doomed.is_set():
            os.kill(os.getpid(), signal.SIGKILL)

    if opens:
        at_each_open(opens, die)
    with manager_on(root) as manager:
        manager.save(state_of(1, rank), 1, is_async=True)
    dist.barrier()
    doomed.set()
    manager = manager_on(root, timeout=_SHORT_S)
    manager.save(state_of(2, rank), 2, on_commit=None if opens else die, is_async=True)
    told = error_of(manager.wait_until_finished, PeerLostError)
    manager.close()
    return told


# What such a death leaves is in tests/faults/test_killed.py.
@pytest.mark.fault("kill-save")
@pytest.mark.parametrize("where", _DEATHS)
def test_a_rank_that_dies_in_a_save_is_named(where: str, tmp_path: Path) -> None:
    victim, opens = _DEATHS[where]

    told = run_ranks(_die, 2, tmp_path, where, expect_dead={victim})

    lost = "rank 0 has not said after 1.5 s what came of it"
    if opens:
        lost = f" to save iteration 2, and rank {victim} (last seen: save iteration 2) did n"
    assert lost in told[1 - victim]


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_save_that_could_not_begin_leaves_nothing_behind_the_next_one(
    is_slow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()

    def sync(folder: Path) -> None:
        if not is_slow:
            raise OSError(5, "it refuses")
        time.sleep(2.0)
        sync_folder(folder)
        begun.set()

    with manager_on(tmp_path, timeout=0.5) as manager:
        with monkeypatch.context() as changed:
            changed.setattr(places, "sync_folder", sync)
            with pytest.raises(StorageError):
                manager.save(state_of(1, 0), 1)
            assert not is_slow or begun.wait(10.0)

        manager.save(state_of(2, 0), 2)

        assert leftovers_in(tmp_path) == []
        assert checkpoints_in(tmp_path) == ["iteration_00000002.0001"]


def test_an_error_in_the_block_is_not_replaced_by_that_of_the_save(tmp_path: Path) -> None:
    def fail_in_the_block() -> None:
        with manager_on(tmp_path) as manager:
            manager.save({"bad": Unpicklable()}, 1, is_async=True)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_in_the_block()

    assert checkpoints_in(tmp_path) == []


def _interrupt_before_it_is_staged(rank: int, world_size: int, root: Path) -> str:
    told, save = "", localckpt.global_tier.manager.SharedSave

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with manager_on(root, timeout=2 * _SHORT_S) as manager:
        manager.save(state_of(1, rank), 1)

        def interrupted_again() -> None:
            del manager._close_alone
            raise KeyboardInterrupt

        if rank == 0:
            # A second one comes while the manager closes itself, which its user does then.
            manager._close_alone = interrupted_again
            localckpt.global_tier.manager.SharedSave = interrupted  # type: ignore[assignment, misc]
            with pytest.raises(KeyboardInterrupt):
                manager.save(state_of(2, rank), 2)
            localckpt.global_tier.manager.SharedSave = save  # type: ignore[misc]
        else:
            told = error_of(lambda: manager.save(state_of(2, rank), 2), PeerLostError)
    dist.barrier()
    with manager_on(root, timeout=2 * _SHORT_S) as manager:
        assert_loads(manager, rank, 1)
        for iteration in (3, 4):
            manager.save(state_of(iteration, rank), iteration)
            assert_loads(manager, rank, iteration)
    return told


@pytest.mark.fault("interrupted")
def test_a_rank_that_an_interrupt_keeps_from_a_save_is_named_and_new_managers_work(
    tmp_path: Path,
) -> None:
    _, told = run_ranks(_interrupt_before_it_is_staged, 2, tmp_path)

    lost = "rank 0 (last seen: save iteration 1) did not come"
    assert f" to save iteration 2, and {lost}" in told
    assert leftovers_in(tmp_path) == []
