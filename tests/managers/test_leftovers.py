"""Nothing stays behind, and nothing grows: after ``close``, a kill and a start, or many saves."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

import localckpt
from localckpt.errors import AbortedError
from tests.managers.jobs import (
    NodesOf,
    assert_same,
    files,
    in_job,
    our_children,
    our_threads,
)
from tests.ranks import node_store, on_ranks, run_ranks


@on_ranks(2, nodes=2)
def test_aborted_objects_are_closed_or_joined_again(rank: int, tmp_path: Path) -> None:
    manager = localckpt.LocalCheckpointManager(node_store(), "run", timeout=20.0)
    storage = localckpt.GlobalCheckpointManager(tmp_path, "run", local=manager, timeout=20.0)
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


_NUMEL = 500_000


def _held() -> dict[str, int]:
    on_node = 0
    for path in node_store().rglob("*"):
        # A save that is under way may rename it meanwhile.
        with suppress(FileNotFoundError):
            on_node += path.stat().st_size if path.is_file() else 0
    return {
        "resident": psutil.Process().memory_full_info().uss,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "on node": on_node,
        "keys": _get_default_store().num_keys(),
    }


def _state(rank: int, iteration: int) -> dict[str, object]:
    # Sizes change now and then, so buffers and files are replaced on the way.
    numel = _NUMEL - 9000 * (iteration % 8 == 3)
    return {"w": torch.full((numel,), float(iteration + rank)), "iteration": iteration}


def _save_on_and_on(
    rank: int, world_size: int, kind: str, saves: int, polls_every: int
) -> list[dict[str, int]]:
    held = []
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
                # Else the threads of those under way count, more of them on a busy machine.
                queue.wait_until_finished()
                dist.barrier()
                held.append(_held())
                dist.barrier()
        queue.wait_until_finished()
        assert manager.find_latest() == saves - 1
        assert_same(manager.load()[0], _state(rank, saves - 1))
    # Two shards of one checkpoint are left.
    assert [Path(name).suffix for name in files(node_store())] == [".safetensors"] * 2
    assert not list(node_store().rglob(".owner"))
    assert our_threads() == our_children() == []
    return held


@pytest.mark.fault("many-saves")
@pytest.mark.parametrize(("kind", "polls_every"), [("disk", 1), ("memory", 7)])
@pytest.mark.parametrize("saves", [48, pytest.param(2000, marks=pytest.mark.long)])
@pytest.mark.timeout(2400)
def test_saves_at_every_step_hold_no_more_at_the_end_than_at_the_beginning_and_leave_nothing(
    saves: int, kind: str, polls_every: int, nodes_of: NodesOf
) -> None:
    nodes = nodes_of(kind, 2)

    told = run_ranks(
        *(_save_on_and_on, 2, kind, saves, polls_every),
        store_per_node=nodes,
        timeout_s=60.0 + saves,
    )

    image = 4 * _NUMEL
    for held in told:
        first, last = held[0], held[-1]
        print(*held, sep="\n")
        # Of memory less than ten of the saves' images and replicas.
        slacks = {"resident": 20 * image - 1, "descriptors": 4, "threads": 3, "keys": 20}
        assert all(last[what] <= first[what] + slack for what, slack in slacks.items())
        # Own shard and replica: one checkpoint that is kept, two in flight, one ahead of time.
        assert max(each["on node"] for each in held) <= 2 * 4.5 * image
