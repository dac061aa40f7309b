"""What staging memory there is, when it is made, and what a save does when all of it is busy."""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import localckpt
from localckpt.ids import Piece
from tests.managers.jobs import (
    KINDS,
    MAX_S,
    assert_same,
    cliques,
    error_of,
    files,
    is_ahead,
    iterations_on,
    make_manager,
    reads_fail,
    resume,
    save,
    state_of,
)
from tests.ranks import node_store, run_ranks
from tests.staging import staging_nbytes

MIB = 1 << 20

Dirs = Callable[[int], list[Path]]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def root(kind: str, node_dirs: Dirs, shm_roots: Dirs) -> Path:
    return (node_dirs if kind == "disk" else shm_roots)(1)[0]


def _save_more_than_there_is_room_for(
    rank: int, world_size: int, kind: str, policy: str, replicated: bool = False
) -> list[Any]:
    """Two buffers, and saves that nobody carries out on rank 1 until all have been tried."""
    told: list[Any] = []
    options = {"on_busy": policy, "keep_last": 9}
    with (
        cliques(1, 2) if replicated else nullcontext() as repl,
        make_manager(kind, node_store(), "job", repl, **options) as manager,
        localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue,
    ):
        requests = []
        for iteration in (1, 2):
            requests.append(manager.save(state_of(rank, iteration), iteration, is_async=True))
            if rank != 1:
                queue.schedule_async_request(requests[-1])
        for iteration in (3, 4):
            if policy == "skip":
                request = manager.save(state_of(rank, iteration), iteration, is_async=True)
                told.append((manager.last_save.skipped, manager.last_save.iteration))
                requests.append(request)
                if rank != 1:
                    queue.schedule_async_request(request)
            else:
                told.append(
                    error_of(lambda i=iteration: manager.save(state_of(rank, i), i, is_async=True))
                )
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
    kind: str, replicated: bool, node_dirs: Dirs, shm_roots: Dirs
) -> None:
    nodes = (node_dirs if kind == "disk" else shm_roots)(2)

    told = run_ranks(
        _save_more_than_there_is_room_for, 2, kind, "skip", replicated, store_per_node=nodes
    )

    assert told == [[(True, 3), (True, 4), 2]] * 2


def test_a_save_waits_for_an_older_one_and_then_gives_up_with_a_reason(
    kind: str, root: Path
) -> None:
    written = threading.Event()
    with (
        make_manager(kind, root, num_buffers=1) as manager,
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
    kind: str, root: Path, policy: str
) -> None:
    with make_manager(kind, root, on_busy=policy, keep_last=2) as manager:
        manager.save(state_of(0, 1), 1, is_async=True)

        told = error_of(lambda: manager.save(state_of(0, 2), 2, is_async=True))

        assert "the request that save() returned for iteration 1 was never scheduled" in told
        assert "queue.schedule_async_request()" in told
        assert not manager.status()
        manager.save(state_of(0, 1), 1)
        manager.save(state_of(0, 2), 2)
        assert resume(manager, 0, 2) == "own node"
    assert iterations_on(root) == {1, 2}


def test_requests_that_are_kept_but_not_scheduled_are_an_error_when_they_have_all_buffers(
    kind: str, root: Path
) -> None:
    with make_manager(kind, root) as manager:
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


def test_close_says_which_request_was_never_scheduled(
    kind: str, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make_manager(kind, root) as manager:
        manager.save(state_of(0, 1), 1)
        request = manager.save(state_of(0, 2), 2, is_async=True)

    assert request.finalize_fns
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "iteration 2 was never scheduled, so nobody writes it" in errors[0]
    assert "The manager is closed" in errors[0]


def test_a_save_whose_queue_was_left_with_an_error_keeps_no_later_one_from_its_buffer(
    kind: str, root: Path
) -> None:
    with make_manager(kind, root, num_buffers=1, keep_last=1) as manager:
        with pytest.raises(ValueError), localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue:  # noqa: PT011, PT012
            queue.schedule_async_request(manager.save(state_of(0, 1), 1, is_async=True))
            raise ValueError
        assert iterations_on(root) == {1}

        with localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue:
            for iteration in (2, 3):
                save(manager, state_of(0, iteration), iteration, queue)
        assert resume(manager, 0, 3) == "own node"
    assert iterations_on(root) == {3}


def _save_without_a_poll(rank: int, world_size: int, kind: str, policy: str) -> Any:
    """Save after save, with a poll at the end only; the most files of this rank meanwhile."""
    most, options = 0, {"on_busy": policy, "keep_last": 1}
    with (
        make_manager(kind, node_store(), "job", **options) as manager,
        localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue,
    ):
        for iteration in range(12):
            queue.schedule_async_request(
                manager.save(state_of(rank, iteration), iteration, is_async=True)
            )
            most = max(most, len([n for n in files(node_store()) if n.endswith("safetensors")]))
            assert len(manager.status()) <= 3
            time.sleep(0.02)
        queue.maybe_finalize_async_calls(blocking=True)
        newest = manager.find_latest()
        resume(manager, rank, newest)
    return most, newest, manager.skipped_saves


@pytest.mark.parametrize("policy", ["wait", "skip"])
def test_no_more_saves_than_buffers_are_in_flight_though_nobody_polls(
    kind: str, node_dirs: Dirs, shm_roots: Dirs, policy: str
) -> None:
    nodes = (node_dirs if kind == "disk" else shm_roots)(2)

    told = run_ranks(_save_without_a_poll, 2, kind, policy, store_per_node=nodes)

    for most, newest, skipped in told:
        # One that is kept, and as many as there are buffers.
        assert most <= 3
        assert newest == 11 if policy == "wait" else newest > 3
        assert skipped == 0 if policy == "wait" else skipped < 8


def test_a_synchronous_save_waits_whatever_the_policy_of_the_others(kind: str, root: Path) -> None:
    with (
        make_manager(kind, root, on_busy="skip", num_buffers=1) as manager,
        localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue,
    ):
        queue.schedule_async_request(manager.save(state_of(0, 1), 1, is_async=True))
        manager.save(state_of(0, 2), 2)
        queue.maybe_finalize_async_calls(blocking=True)
        assert resume(manager, 0, 2) == "own node"


@pytest.mark.parametrize(
    "option", [{"on_busy": "drop"}, {"num_buffers": 0}, {"staging_threads": 0}], ids=str
)
def test_options_that_make_no_sense_are_named(
    kind: str, root: Path, option: dict[str, Any]
) -> None:
    ((name, value),) = option.items()

    assert f"{name} is {value!r}" in error_of(lambda: make_manager(kind, root, **option))
    assert files(root) == []


def test_the_memory_of_the_first_saves_is_made_ahead_of_them(
    kind: str, root: Path, layouts: list[Any]
) -> None:
    with make_manager(kind, root) as manager:
        state = state_of(0, 1, 40_000_000)
        manager.warm_up(state)
        image_nbytes = manager.store.image_nbytes[Piece(0)]
        wanted = 2 if kind == "disk" else 1
        assert staging_nbytes(manager.store) >= wanted * image_nbytes
        assert len(layouts) == 1
        before = staging_nbytes(manager.store)

        manager.save(state, 1)

        assert len(layouts) == 1
        assert before <= staging_nbytes(manager.store) <= 1.1 * 2 * image_nbytes
        assert manager.find_latest() == 1
        assert_same(manager.load()[0], state)
    assert not any(map(is_ahead, root.rglob("*")))


def test_a_skipped_save_is_logged(kind: str, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "localckpt")
    with make_manager(kind, root, on_busy="skip", num_buffers=1) as manager:
        first = manager.save(state_of(0, 1), 1, is_async=True)
        request = manager.save(state_of(0, 2), 2, is_async=True)
        request.execute_sync()
        first.execute_sync()

    assert [r.getMessage() for r in caplog.records] == [
        "iteration 2 is not saved: the 1 staging buffers of rank 0 are busy with older saves"
    ]


def test_an_optimizer_of_host_memory_is_guarded_by_the_copy_itself(
    kind: str, root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiler"))
    model = torch.nn.Linear(32, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with (
        make_manager(kind, root, guard=optimizer) as manager,
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


def test_an_optimizer_whose_state_is_made_of_other_tensors_can_be_guarded(
    kind: str, root: Path
) -> None:
    parameter = torch.nn.Parameter(torch.ones(5))
    optimizer = torch.optim.SGD([parameter])
    optimizer.state[parameter]["quantized"] = TwoTensor(torch.ones(5), torch.zeros(5))
    with make_manager(kind, root, guard=optimizer) as manager:
        manager.save({"weight": parameter.detach()}, 1)
        assert manager.find_latest() == 1


def test_a_manager_that_is_closed_late_leaves_the_saves_of_a_newer_one_alone(
    kind: str, root: Path
) -> None:
    older = make_manager(kind, root)
    older.save(state_of(0, 5), 5)
    older.save(state_of(0, 6), 6, is_async=True)
    with make_manager(kind, root) as newer:
        request = newer.save(state_of(0, 3), 3, is_async=True)
        older.close()
        request.execute_sync()
        assert resume(newer, 0, 3) == "own node"


def test_the_report_of_the_newest_save_stays_when_an_older_one_is_finalized(
    kind: str, root: Path
) -> None:
    with make_manager(kind, root, on_busy="skip", num_buffers=1) as manager:
        request = manager.save(state_of(0, 1), 1, is_async=True)
        manager.save(state_of(0, 2), 2, is_async=True)
        request.execute_sync()

        assert manager.last_save.iteration == 2
        assert manager.last_save.skipped


def _fail_to_load_and_save(rank: int, world_size: int) -> int:
    with cliques(1, 2) as replicas:
        options = {"on_busy": "skip", "num_buffers": 1}
        with make_manager("disk", node_store(), "job", replicas, **options) as manager:
            manager.save(state_of(rank, 1), 1)
            own = [p for p in node_store().rglob("*.safetensors") if ".1." in p.name[:16]]
            if rank == 1:
                for path in own:
                    path.unlink()
            assert manager.find_latest() == 1
            with reads_fail(own[0]) if rank == 0 else nullcontext():
                error_of(manager.load, localckpt.NoReplicasAvailableError)
            with localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue:
                save(manager, state_of(rank, 2), 2, queue)
            assert resume(manager, rank, 2) == "own node"
            return manager.skipped_saves


@pytest.mark.usefixtures("can_attach")
def test_a_load_that_fails_keeps_no_buffer_from_the_saves_after_it(node_dirs: Dirs) -> None:
    assert run_ranks(_fail_to_load_and_save, 2, store_per_node=node_dirs(2)) == [0, 0]


@pytest.mark.fault("refused-io")
@pytest.mark.parametrize("queued", [False, True], ids=["at once", "behind training"])
def test_saves_to_a_file_system_that_is_read_only_give_their_buffers_back(
    queued: bool, small_disk: Callable[[str], Path]
) -> None:
    disk = small_disk("size=64m")
    with (
        make_manager("disk", disk, timeout=5.0) as manager,
        localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue,
    ):
        manager.save(state_of(0, 0), 0)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], timeout=30, check=True)
        try:
            # More often than there are buffers.
            told = [
                error_of(
                    lambda i=i: save(manager, state_of(0, i), i, queue if queued else None),
                    localckpt.StorageError,
                )
                for i in range(1, 6)
            ]
        finally:
            subprocess.run(["mount", "-o", "remount,rw", str(disk)], timeout=30, check=True)

        assert all("mounted read-only" in text for text in told)
        save(manager, state_of(0, 6), 6, queue if queued else None)
        assert resume(manager, 0, 6) == "own node"
