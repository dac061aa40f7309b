"""Nothing stays behind after ``close``, or after a kill and a start; live jobs are left alone."""

from __future__ import annotations

import os
import signal
import threading

import pytest

import localckpt
from localckpt import StorageError
from tests.managers.jobs import (
    KINDS,
    MAX_S,
    Dirs,
    cliques,
    error_of,
    files,
    in_job,
    make_manager,
    our_children,
    our_threads,
    resume,
    save,
    state_of,
)
from tests.ranks import DeadRank, announce, await_announced, node_store, run_ranks, start_ranks


def _live_and_close(rank: int, world_size: int, kind: str) -> None:
    threads_before = set(threading.enumerate())
    descriptors_before = len(os.listdir("/proc/self/fd"))
    for life in range(2):
        with in_job(kind=kind, keep_last=2) as (manager, queue):
            if life:
                assert resume(manager, rank, 4) == "own node"
            for iteration in range(5 * life, 5 * life + 5):
                # Sizes change, so buffers and files are replaced on the way.
                state = state_of(rank, iteration)
                request = manager.save(state, iteration, is_async=True)
                queue.schedule_async_request(request)
                if iteration % 2:
                    queue.maybe_finalize_async_calls(blocking=True)
            queue.maybe_finalize_async_calls(blocking=True)
        assert our_threads() == []
        assert our_children() == []
        assert all(name.endswith(".safetensors") for name in files(node_store()))
        # Two checkpoints of two shards.
        assert len(files(node_store())) == 4
        assert not list(node_store().rglob(".owner"))
    left = {t.name for t in set(threading.enumerate()) - threads_before}
    assert not [name for name in left if "localckpt" in name]
    # gloo keeps a few of its own, whoever made the group.
    assert len(os.listdir("/proc/self/fd")) < descriptors_before + 20


@pytest.mark.parametrize("kind", KINDS)
def test_after_close_there_are_shards_and_nothing_else(
    kind: str, node_dirs: Dirs, shm_roots: Dirs
) -> None:
    nodes = (node_dirs if kind == "disk" else shm_roots)(2)

    run_ranks(_live_and_close, 2, kind, store_per_node=nodes)


def _die_while_saving(rank: int, world_size: int, kind: str) -> None:
    manager = make_manager(kind, node_store(), "job", cliques(1, 2), keep_last=1)
    queue = localckpt.AsyncCallsQueue(timeout_s=MAX_S)
    for iteration in range(3):
        save(manager, state_of(rank, iteration), iteration, queue)
    # Two under way: the buffers are full, and the files that they take are claimed.
    requests = [manager.save(state_of(rank, i), i, is_async=True) for i in (3, 4)]
    assert all(requests)
    assert manager.store.writes([s for s in manager.store.slots if s.identity.rank == rank])
    os.kill(os.getpid(), signal.SIGKILL)


def _start_again(rank: int, world_size: int, kind: str) -> None:
    with in_job(kind=kind, keep_last=1) as (manager, _):
        left = [n for n in files(node_store()) if not n.endswith((".safetensors", ".recycled"))]
        assert left == []
        resume(manager, rank, 2)
        announce(f"started {rank}")
        await_announced("go on")
        manager.save(state_of(rank, 7), 7)
        assert resume(manager, rank, 7) == "own node"


@pytest.mark.fault("trainer-dies")
@pytest.mark.parametrize(("kind", "swapped"), [("disk", True), ("memory", False)])
def test_what_killed_ranks_left_is_removed_at_the_next_start(
    kind: str, swapped: bool, node_dirs: Dirs, shm_roots: Dirs
) -> None:
    nodes = (node_dirs if kind == "disk" else shm_roots)(2)
    with start_ranks(_die_while_saving, 2, kind, store_per_node=nodes) as group:
        died = group.join(expect_dead=[0, 1])
        left = {name.rpartition(".")[2] for name in files(*nodes)}

        again = nodes[::-1] if swapped else nodes
        with start_ranks(_start_again, 2, kind, store_per_node=again) as second:
            for rank in range(2):
                second.await_announced(f"started {rank}")
            late = [name for name in files(*nodes) if "000003." in name or "000004." in name]
            second.announce("go on")
            second.join()

    assert died == [DeadRank(rank, -signal.SIGKILL) for rank in range(2)]
    assert "dirty" in left
    assert [name for name in late if name.endswith((".safetensors", ".dirty"))] == []
    assert {name.rpartition(".")[2] for name in files(*nodes)} == {"safetensors"}


def _live_on(rank: int, world_size: int) -> None:
    with in_job() as (manager, _):
        for iteration in (1, 2):
            manager.save(state_of(rank, iteration), iteration)
        announce(f"saved {rank}")
        await_announced("go on")
        resume(manager, rank, 2)
        manager.save(state_of(rank, 3), 3)


def _come_second(rank: int, world_size: int) -> str:
    with cliques(1, 2) as repl:
        begin = lambda: make_manager("disk", node_store(), "job", repl, timeout=4.0)  # noqa: E731
        return error_of(begin, StorageError)


@pytest.mark.fault("two-jobs")
def test_a_job_whose_ranks_land_on_other_nodes_than_those_of_a_live_one_is_refused(
    node_dirs: Dirs,
) -> None:
    nodes = node_dirs(2)
    with start_ranks(_live_on, 2, store_per_node=nodes) as live:
        for rank in range(2):
            live.await_announced(f"saved {rank}")

        told = run_ranks(_come_second, 2, store_per_node=nodes[::-1])

        assert len(set(told)) == 1
        assert any(f"in use by process {pid}" in told[0] for pid in live.pids)
        live.announce("go on")
        live.join()
