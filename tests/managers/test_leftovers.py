"""Nothing stays behind, and nothing grows: after ``close``, a kill and a start, or many saves."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

import localckpt
from localckpt.errors import AbortedError
from tests.managers.jobs import (
    KINDS,
    MAX_S,
    Dirs,
    assert_same,
    cliques,
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


def _close_aborted(rank: int, world_size: int, shared: Path) -> None:
    manager = localckpt.LocalCheckpointManager(node_store(), "run", timeout=20.0)
    storage = localckpt.GlobalCheckpointManager(shared, "run", local=manager, timeout=20.0)
    queue = localckpt.AsyncCallsQueue(timeout_s=20.0)
    state = {f"value{rank}": torch.arange(9.0) + rank}
    storage.save(state, 1)
    queue.schedule_async_request(manager.save(state, 1, is_async=True))
    storage.save(state, 2, is_async=True)
    for aborted in (queue, storage, manager):
        aborted.abort()
    for call in (storage.find_latest, manager.find_latest, lambda: storage.save(state, 3)):
        with pytest.raises(AbortedError):
            call()
    queue.close()
    manager.rejoin()
    storage.rejoin()
    newest = storage.find_latest()
    assert newest in (1, 2)
    loaded = {f"value{rank}": torch.zeros(9)}
    storage.load(into=loaded)
    assert_same(loaded, state)
    storage.save(state, 3)
    storage.abort()
    storage.close()
    manager.abort()
    manager.close()
    manager.close()


def test_aborted_objects_are_closed_or_joined_again(tmp_path: Path, node_dirs: Dirs) -> None:
    run_ranks(_close_aborted, 2, tmp_path / "shared", store_per_node=node_dirs(2))


# What saves and loads take.


_NUMEL = 500_000


@dataclass(frozen=True)
class _Held:
    resident: int
    descriptors: int
    threads: int
    on_node: int
    keys: int

    @classmethod
    def now(cls) -> _Held:
        on_node = 0
        for path in node_store().rglob("*"):
            # A save that is under way may rename it meanwhile.
            with suppress(FileNotFoundError):
                on_node += path.stat().st_size if path.is_file() else 0
        return cls(
            psutil.Process().memory_full_info().uss,
            len(os.listdir("/proc/self/fd")),
            threading.active_count(),
            on_node,
            _get_default_store().num_keys(),
        )


def _state(rank: int, iteration: int) -> dict[str, object]:
    return {"w": torch.full((_NUMEL,), float(iteration + rank)), "iteration": iteration}


def _save_on_and_on(
    rank: int, world_size: int, kind: str, saves: int, polls_every: int
) -> list[_Held]:
    held: list[_Held] = []
    with in_job(kind=kind, keep_last=1) as (manager, queue):
        for iteration in range(saves):
            queue.schedule_async_request(
                manager.save(_state(rank, iteration), iteration, is_async=True)
            )
            if iteration % polls_every == 0:
                queue.maybe_finalize_async_calls()
            # Training keeps the ranks together.
            dist.all_reduce(torch.ones(1))
            if (iteration + 1) % (saves // 4) == 0:
                dist.barrier()
                held.append(_Held.now())
                dist.barrier()
        queue.wait_until_finished()
        assert manager.find_latest() == saves - 1
        assert_same(manager.load()[0], _state(rank, saves - 1))
    return held


@pytest.mark.fault("many-saves")
@pytest.mark.parametrize(("kind", "polls_every"), [("disk", 1), ("memory", 7)])
@pytest.mark.parametrize("saves", [48, pytest.param(2000, marks=pytest.mark.long)])
@pytest.mark.timeout(2400)
def test_saves_at_every_step_hold_no_more_at_the_end_than_at_the_beginning(
    saves: int, kind: str, polls_every: int, node_dirs: Dirs, shm_roots: Dirs
) -> None:
    nodes = (node_dirs if kind == "disk" else shm_roots)(2)

    told = run_ranks(
        *(_save_on_and_on, 2, kind, saves, polls_every),
        store_per_node=nodes,
        timeout_s=60.0 + saves,
    )

    image = 4 * _NUMEL
    for held in told:
        first, last = held[0], held[-1]
        print(*(astuple(h) for h in held), sep="\n")
        # Less than ten of the saves' images and replicas.
        assert last.resident - first.resident < 20 * image
        assert last.descriptors <= first.descriptors + 4
        assert last.threads <= first.threads + 3
        # Own shard and replica: one checkpoint that is kept, two in flight, one ahead of time.
        assert max(h.on_node for h in held) <= 2 * 4.5 * image
        assert last.keys <= first.keys + 20
