"""Process groups that are made anew, or whose members are changed, and objects of one rank alone.

Whatever a process has made before, new objects work, and old ones say what has changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import localckpt
from localckpt.errors import PeerLostError
from localckpt.ranks.job_store import default_store
from tests.checkpointer.loops import Part
from tests.managers.jobs import error_of
from tests.ranks import node_store, on_ranks

_TIMEOUT_S = 20.0
_NOT_HERE = pytest.mark.skipif(
    not hasattr(dist, "_reconfigure"), reason="torch changes no group in place before 2.14"
)


def _objects(local: Path, shared: Path) -> Iterator[tuple[str, Any, list[Callable[[], Any]]]]:
    """One object of each kind, used once by all ranks, and calls that use it again."""
    rank, state = dist.get_rank(), {"value": torch.ones(4)}
    nodes = localckpt.LocalCheckpointManager(local / "a", "run", timeout=_TIMEOUT_S)
    nodes.save(state, 1)
    yield "nodes", nodes, [lambda: nodes.save(state, 2), nodes.find_latest, nodes.load]
    replicas = localckpt.CliqueReplicationStrategy.from_replication_params(1, 2)
    copied = localckpt.LocalCheckpointManager(local / "b", "run", replicas, timeout=_TIMEOUT_S)
    copied.save(state, 1)
    yield "copies", copied, [lambda: copied.save(state, 2, is_async=True), copied.explain]
    storage = localckpt.GlobalCheckpointManager(shared / "c", "run", timeout=_TIMEOUT_S)
    storage.save({f"value{rank}": torch.ones(4)}, 1)
    yield "shared", storage, [lambda: storage.save(state, 2), storage.find_latest]
    queue = localckpt.AsyncCallsQueue(timeout_s=_TIMEOUT_S)
    request = localckpt.AsyncRequest(time.sleep, (0.001,), [])
    queue.schedule_async_request(request)
    queue.wait_until_finished()
    yield "queue", queue, [lambda: queue.schedule_async_request(request)]
    loop = localckpt.Checkpointer(
        {"part": Part(rank)}, local=local / "d", shared=shared / "d", replication_factor=1
    )
    loop.step(loop.resume())
    loop.save(0)
    loop.wait_until_finished()
    yield "loop", loop, [lambda: loop.step(1), lambda: loop.save(1), loop.resume]


def _refusals(objects: list[tuple[str, Any, list[Callable[[], Any]]]]) -> set[str]:
    """What all calls say, each at once; the objects are closed."""
    began, told = time.monotonic(), set()
    for _, made, calls in objects:
        told |= {error_of(call, localckpt.MismatchError) for call in calls}
        made.close()
    assert time.monotonic() - began < _TIMEOUT_S / 2
    return told


def _work_with_new_ones(folder: Path) -> None:
    """Save and load with new objects on the ranks that there are now."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    local, shared = folder / f"of {rank}", folder / "shared"
    made = list(_objects(local, shared))
    assert made[0][1].world_size == world_size
    for _, one, _ in made:
        one.close()
    with localckpt.LocalCheckpointManager(local / "a", "run", timeout=_TIMEOUT_S) as manager:
        assert manager.load()[1] == (1, rank, "run")


def _replace(members: list[int]) -> None:
    """Change the members of the job's group as torch 2.14 does: the store stays."""
    world, store = distributed_c10d._world, default_store()
    smaller = dist.new_group(members)
    if dist.get_rank() in members:
        world.pg_map[smaller] = (world.pg_map[smaller][0], store)
        dist.group.WORLD = smaller


@on_ranks(3, nodes=3)
def test_objects_of_a_group_that_lost_a_member_say_so_and_new_ones_work(
    rank: int, tmp_path: Path
) -> None:
    objects = list(_objects(node_store(), tmp_path / "shared"))
    before = sorted(path.name for path in node_store().rglob("*.safetensors"))
    _replace([1, 2])
    if rank == 0:
        return

    told = _refusals(objects)

    assert sorted(path.name for path in node_store().rglob("*.safetensors")) == before
    _work_with_new_ones(tmp_path / "after")
    # One for each name of an object.
    assert len(told) > 1
    for text in told:
        assert f"made by rank {rank} of 3, and this process is rank {rank - 1} of 2 now" in text
        assert "members of the process group were changed" in text


def _meet(store: dist.Store, tag: str, home: int, homes: list[int]) -> None:
    store.set(f"{tag}.{home}", dist._get_reconfigure_handle())  # type: ignore[attr-defined]
    handles = [store.get(f"{tag}.{other}").decode() for other in homes]
    uuid = sum(map(ord, tag))
    dist._reconfigure(uuid, handles, timeout=timedelta(seconds=30)).wait()  # type: ignore[attr-defined]


@_NOT_HERE
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([0, 1, 2], [2, 0, 1]),
        ([0, 1, 2], [0, 2, 1]),
        ([0, 1], [0, 1, 2]),
        ([0, 1], [2, 3, 0, 1]),
        ([0, 1, 2], [1, 2]),
        ([0, 1, 2], [0, 2]),
        ([0, 1, 2], [0, 1]),
        ([0, 1, 2, 3], [3, 0]),
        ([0, 1], [2, 1]),
        ([0, 1, 2], [0, 1, 3]),
    ],
)
@on_ranks(4, nodes=4, init_group=False)
def test_a_group_changed_in_place_is_seen_by_all_and_new_objects_work(
    home: int, world_size: int, before: list[int], after: list[int], tmp_path: Path
) -> None:
    store = dist.FileStore(str(tmp_path / "store"), world_size)
    first = len(before) if home in before else world_size
    dist.init_process_group(
        "gloo", store=store, rank=home, world_size=first, enable_reconfigure=True
    )
    objects = []
    if home in before:
        _meet(store, "first", home, before)
        objects = list(_objects(node_store(), tmp_path / "shared"))
    if home not in after:
        return
    _meet(store, "second", home, after)
    told = _refusals(objects)
    _work_with_new_ones(tmp_path / "after")
    dist.destroy_process_group()
    if home in before:
        old = f"rank {before.index(home)} of {len(before)}"
        new = f"rank {after.index(home)} of {len(after)}"
        assert told
        for text in told:
            assert f"it was made by {old}, and this process is {new} now" in text


@on_ranks(2, nodes=1)
def test_objects_that_one_rank_made_alone_are_in_nobodys_way(rank: int) -> None:
    folder = node_store()
    if rank == 0:
        queue = localckpt.AsyncCallsQueue(timeout_s=_TIMEOUT_S)
        queue.schedule_async_request(localckpt.AsyncRequest(time.sleep, (0.001,), []))
        assert queue.maybe_finalize_async_calls(blocking=True, no_dist=True) == [0]
        left = [
            localckpt.LocalCheckpointManager(folder / "alone", timeout=_TIMEOUT_S),
            localckpt.GlobalCheckpointManager(folder / "alone", timeout=_TIMEOUT_S),
        ]
        left[1].close()
        with pytest.raises(PeerLostError, match="rank 1"):
            localckpt.Checkpointer({"part": Part(0)}, local=folder / "x", timeout_s=1.0)
    dist.barrier()
    began = time.monotonic()

    _work_with_new_ones(folder)

    assert time.monotonic() - began < _TIMEOUT_S / 2
