"""Nothing stays behind: not after ``close``, and not after a kill once the job starts again."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import localckpt
from tests.managers.jobs import (
    KINDS,
    MAX_S,
    cliques,
    files,
    make_manager,
    our_children,
    our_threads,
    resume,
    save,
    state_of,
)
from tests.ranks import DeadRank, announce, await_announced, node_store, run_ranks, start_ranks

Dirs = Callable[[int], list[Path]]


def _live_and_close(rank: int, world_size: int, kind: str) -> None:
    threads_before = set(threading.enumerate())
    descriptors_before = len(os.listdir("/proc/self/fd"))
    for life in range(2):
        repl = cliques(1, 2)
        options = {"keep_last": 2}
        with (
            localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue,
            make_manager(kind, node_store(), "job", repl, **options) as manager,
        ):
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
        repl.close()
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
    repl = cliques(1, 2)
    options = {"keep_last": 1}
    manager = make_manager(kind, node_store(), "job", repl, **options)
    queue = localckpt.AsyncCallsQueue(timeout_s=MAX_S)
    for iteration in range(3):
        save(manager, state_of(rank, iteration), iteration, queue)
    # Two under way: the buffers are full, and the files that they take are claimed.
    requests = [manager.save(state_of(rank, i), i, is_async=True) for i in (3, 4)]
    assert all(requests)
    assert manager.store.writes([s for s in manager.store.slots if s.identity.rank == rank])
    os.kill(os.getpid(), signal.SIGKILL)


def _start_again(rank: int, world_size: int, kind: str) -> None:
    repl = cliques(1, 2)
    options = {"keep_last": 1}
    with make_manager(kind, node_store(), "job", repl, **options) as manager:
        left = [n for n in files(node_store()) if not n.endswith((".safetensors", ".recycled"))]
        assert left == []
        resume(manager, rank, 2)
        announce(f"started {rank}")
        await_announced("go on")
        manager.save(state_of(rank, 7), 7)
        assert resume(manager, rank, 7) == "own node"
    repl.close()


@pytest.mark.fault("trainer-dies")
@pytest.mark.parametrize("swapped", [False, True], ids=["same nodes", "nodes swapped"])
@pytest.mark.parametrize("kind", KINDS)
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


def _live_beside_another_session(rank: int, world_size: int, kind: str, session: str) -> Any:
    with make_manager(kind, node_store(), session, keep_last=1) as manager:
        request = manager.save(state_of(rank, 1), 1, is_async=True)
        announce(f"{session} is saving")
        await_announced("the other was there")
        request.execute_sync()
        assert resume(manager, rank, 1) == "own node"


@pytest.mark.fault("two-jobs")
@pytest.mark.parametrize("kind", KINDS)
def test_what_belongs_to_a_live_process_is_left_alone(
    kind: str, node_dirs: Dirs, shm_roots: Dirs
) -> None:
    root = (node_dirs if kind == "disk" else shm_roots)(1)
    with start_ranks(_live_beside_another_session, 1, kind, "a", store_per_node=root) as group:
        group.await_announced("a is saving")
        before = files(*root)
        for session in ("b", "c"):
            with make_manager(kind, root[0], session) as manager:
                manager.save(state_of(0, 3), 3)
        after = [name for name in files(*root) if "session-a/" in name]
        group.announce("the other was there")
        group.join()

    assert before == after
    dirty = [name for name in after if name.endswith(".dirty")]
    assert len(dirty) == (kind == "memory")
