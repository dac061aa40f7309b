"""What staging memory there is, when it is made, and what a save does when all of it is busy."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import localckpt
from localckpt.ids import Piece
from tests.managers.jobs import (
    MAX_S,
    Dirs,
    assert_same,
    cliques,
    error_of,
    in_job,
    is_ahead,
    iterations_on,
    make_manager,
    resume,
    save,
    state_of,
)
from tests.ranks import node_store, run_ranks
from tests.staging import staging_nbytes


def _save_more_than_there_is_room_for(rank: int, world_size: int, replicated: bool) -> list[Any]:
    """Two buffers, and saves that nobody carries out on rank 1 until all have been tried."""
    repl = cliques(1, 2) if replicated else nullcontext()
    told: list[Any] = []
    with in_job(repl, on_busy="skip", keep_last=9) as (manager, queue):
        requests = []
        for iteration in (1, 2, 3, 4):
            requests.append(manager.save(state_of(rank, iteration), iteration, is_async=True))
            if rank != 1:
                queue.schedule_async_request(requests[-1])
            told.append((manager.last_save.skipped, manager.last_save.iteration))
        told.append(manager.skipped_saves)
        if rank == 1:
            for request in requests:
                queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)
        # Nothing of the saves that found no room was counted as saved.
        save(manager, state_of(rank, 3), 3, queue)
        assert resume(manager, rank, 3) == "own node"
        assert iterations_on(node_store()) == {1, 2, 3}
        assert (manager.degraded, manager.degraded_saves) == (0, 0)
    return told


@pytest.mark.parametrize("replicated", [False, True])
def test_saves_that_find_all_buffers_busy_on_one_rank_are_skipped_on_all_and_say_so(
    replicated: bool, node_dirs: Dirs
) -> None:
    told = run_ranks(_save_more_than_there_is_room_for, 2, replicated, store_per_node=node_dirs(2))

    assert told == [[(False, 1), (False, 2), (True, 3), (True, 4), 2]] * 2


def test_a_save_waits_for_an_older_one_and_then_gives_up_with_a_reason(tmp_path: Path) -> None:
    written = threading.Event()
    with (
        make_manager("disk", tmp_path, num_buffers=1) as manager,
        localckpt.AsyncCallsQueue(timeout_s=0.5) as queue,
    ):
        manager.store.commit = lambda *_: written.wait(MAX_S)
        queue.schedule_async_request(manager.save(state_of(0, 1), 1, is_async=True))

        told = error_of(lambda: manager.save(state_of(0, 2), 2, is_async=True))

        written.set()
    assert "call 0" in told
    assert "was not over after a wait of 0.35 s" in told


@pytest.mark.parametrize("policy", ["wait", "skip"])
def test_a_request_that_was_dropped_is_an_error_at_the_next_save_which_then_works(
    tmp_path: Path, policy: str
) -> None:
    with make_manager("disk", tmp_path, on_busy=policy, keep_last=2) as manager:
        manager.save(state_of(0, 1), 1, is_async=True)

        told = error_of(lambda: manager.save(state_of(0, 2), 2, is_async=True))

        assert "the request that save() returned for iteration 1 was never scheduled" in told
        assert "queue.schedule_async_request()" in told
        assert not manager.status()
        manager.save(state_of(0, 1), 1)
        manager.save(state_of(0, 2), 2)
        assert resume(manager, 0, 2) == "own node"
    assert iterations_on(tmp_path) == {1, 2}


def test_requests_that_are_kept_but_not_scheduled_are_an_error_when_they_have_all_buffers(
    tmp_path: Path,
) -> None:
    with make_manager("disk", tmp_path) as manager:
        kept = [manager.save(state_of(0, i), i, is_async=True) for i in (1, 2)]
        began = time.monotonic()

        told = error_of(lambda: manager.save(state_of(0, 3), 3, is_async=True))

        assert time.monotonic() - began < MAX_S / 4
        assert "save() returned for iterations 1, 2 were never scheduled" in told
        assert "nothing was begun of iteration 3" in told
        for request in kept:
            request.execute_sync()
        manager.save(state_of(0, 3), 3)
        assert resume(manager, 0, 3) == "own node"


def test_the_memory_of_the_first_saves_is_made_ahead_of_them(
    tmp_path: Path, layouts: list[Any]
) -> None:
    with make_manager("disk", tmp_path) as manager:
        state = state_of(0, 1, 40_000_000)
        manager.warm_up(state)
        image_nbytes = manager.store.image_nbytes[Piece(0)]
        assert staging_nbytes(manager.store) >= 2 * image_nbytes
        assert len(layouts) == 1
        before = staging_nbytes(manager.store)

        manager.save(state, 1)

        assert len(layouts) == 1
        assert before <= staging_nbytes(manager.store) <= 1.1 * 2 * image_nbytes
        assert manager.find_latest() == 1
        assert_same(manager.load()[0], state)
    assert not any(map(is_ahead, tmp_path.rglob("*")))


def test_a_save_whose_queue_was_left_with_an_error_keeps_no_later_one_from_its_buffer(
    tmp_path: Path,
) -> None:
    with make_manager("disk", tmp_path, num_buffers=1, keep_last=1) as manager:
        with pytest.raises(ValueError), localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue:  # noqa: PT011, PT012
            queue.schedule_async_request(manager.save(state_of(0, 1), 1, is_async=True))
            raise ValueError
        assert iterations_on(tmp_path) == {1}

        with localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue:
            for iteration in (2, 3):
                save(manager, state_of(0, iteration), iteration, queue)
        assert resume(manager, 0, 3) == "own node"
    assert iterations_on(tmp_path) == {3}


def test_an_optimizer_of_host_memory_is_guarded_by_the_copy_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiler"))
    model = torch.nn.Linear(32, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with (
        make_manager("disk", tmp_path, guard=optimizer) as manager,
        localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue,
    ):
        for iteration in range(3):
            model(torch.randn(4, 32)).sum().backward()
            optimizer.step()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            weight = model.weight.detach().clone()
            queue.schedule_async_request(manager.save(state, iteration, is_async=True))
            optimizer.step()
            manager.wait_staged()
            queue.maybe_finalize_async_calls(blocking=True)
            assert manager.find_latest() == iteration
            found, _ = manager.load()
            assert_same(found["model"]["weight"], weight)
            assert_same(found["optimizer"]["state"][0]["step"], torch.tensor(2.0 * iteration + 1))
    assert not optimizer._optimizer_step_pre_hooks
