"""What several ranks want of shared storage is read once, and passed on; every byte arrives."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from localckpt import CorruptShardError, GlobalCheckpointManager
from localckpt.global_tier import shared_reads
from tests.managers.jobs import assert_same, damage
from tests.ranks import run_ranks

_TENSORS, _NUMEL = 20, 1 << 19
_RATE = 50e6


def _replicas(fill: float = 0.0) -> dict[str, Any]:
    return {f"w{n}": torch.arange(_NUMEL, dtype=torch.float32) * fill for n in range(_TENSORS)}


def _load_slowly(rank: int, world_size: int, root: Path) -> float:
    """Bytes of data files that this rank has read, by the size of the state."""
    saved, into = _replicas(1.0), _replicas()
    nbytes = sum(tensor.nbytes for tensor in saved.values())
    shared_reads._LEAST_NBYTES, shared_reads._TRIED_NBYTES = nbytes, 4 << 20
    read, preadv, one_at_a_time = 0, os.preadv, threading.Lock()

    def slow(fd: int, parts: Any, *where: Any) -> int:
        nonlocal read
        count = preadv(fd, parts, *where)
        with one_at_a_time:
            read += count
            time.sleep(count / _RATE)
        return count

    with GlobalCheckpointManager(root) as manager:
        manager.save(saved, 1, is_async=False)
        os.preadv = slow
        manager.load(into=into)
    assert_same(into, saved)
    return read / nbytes


def test_ranks_that_want_the_same_read_it_once_in_all_from_slow_storage(tmp_path: Path) -> None:
    read = run_ranks(_load_slowly, 4, tmp_path)

    # And some blocks in which one's share ends and another's begins.
    assert sum(read) < 1.5
    assert max(read) < 0.5


def _sharded(rank: int, fill: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2))
    values = fill * torch.arange(40_000.0).reshape(200, 200)
    placed = {
        "rows": [Replicate(), Shard(0)],
        "columns": [Shard(1), Replicate()],
        "whole": [Replicate(), Replicate()],
        "apart": [Shard(0), Shard(1)],
    }
    state = {key: distribute_tensor(values, mesh, places) for key, places in placed.items()}
    return {**state, f"of rank {rank}": torch.full((20_000,), fill + rank)}


def _load_in_teams(rank: int, world_size: int, root: Path) -> None:
    shared_reads._LEAST_NBYTES = shared_reads._LEAST_ITEM_NBYTES = 0
    shared_reads._TRIED_NBYTES = 10_000
    for is_faster in (True, False):
        shared_reads._expected_s = lambda _, verdict=is_faster: 1.0 if verdict else None
        with GlobalCheckpointManager(root / str(is_faster)) as manager:
            manager.save(_sharded(rank, 1.0), 1, is_async=False)
            into = _sharded(rank, 0.0)
            manager.load(into=into)
            for key, value in _sharded(rank, 1.0).items():
                local = (v.to_local() if hasattr(v, "to_local") else v for v in (into[key], value))
                assert torch.equal(*local), key
            dist.barrier()
            if rank == 0:
                damage(next((root / str(is_faster)).rglob("__0_*.distcp")))
            dist.barrier()
            with pytest.raises(CorruptShardError, match=r"__0_\d+\.distcp"):
                manager.load(into=_sharded(rank, 0.0), iteration=1)


@pytest.mark.fault("flipped-bit")
def test_sharded_replicas_come_from_their_teams_and_damage_is_the_same_error_on_all_ranks(
    tmp_path: Path,
) -> None:
    run_ranks(_load_in_teams, 4, tmp_path)
