"""The starter of ranks keeps its own promises, since every other test leans on it."""

from __future__ import annotations

import os
import signal
import threading
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.ranks import RanksFailedError, announce, run_ranks, start_ranks


def _fails_on_rank_one(rank: int, world_size: int) -> None:
    value = torch.tensor([rank + 10])
    dist.all_reduce(value)
    assert value.item() == 21
    if rank == 1:
        raise ValueError("the reason")
    dist.barrier()


def _last_rank_kills_itself(rank: int, world_size: int) -> int:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def _sleeps(rank: int, world_size: int) -> None:
    announce(f"pid of {rank}", os.getpid())
    time.sleep(60.0)


def _leaves_a_thread(rank: int, world_size: int) -> None:
    threading.Thread(target=time.sleep, args=(60.0,)).start()


def test_each_way_in_which_ranks_fail_is_told_and_a_death_that_was_expected_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.ranks._LEAVING_S", 0.3)

    with pytest.raises(RanksFailedError, match="the reason") as caught:
        run_ranks(_fails_on_rank_one, 2)
    assert "_fails_on_rank_one" in caught.value.failures[1]
    with pytest.raises(RanksFailedError, match="SIGKILL"):
        run_ranks(_last_rank_kills_itself, 2, init_group=False)
    with pytest.raises(RanksFailedError, match="expected to die"):
        run_ranks(_last_rank_kills_itself, 1, init_group=False, expect_dead={0})
    with pytest.raises(RanksFailedError, match="its process did not end"):
        run_ranks(_leaves_a_thread, 1, init_group=False)
    alive, dead = run_ranks(_last_rank_kills_itself, 2, init_group=False, expect_dead={1})
    assert (alive, dead.signal) == (0, signal.SIGKILL)


def test_the_deadline_kills_and_reaps_every_rank() -> None:
    with start_ranks(_sleeps, 2, init_group=False) as group:
        pids = group.pids
        assert [group.await_announced(f"pid of {rank}") for rank in range(2)] == pids

        with pytest.raises(RanksFailedError, match=r"did not end within 0\.2 s"):
            group.join(0.2)

    assert not any(psutil.pid_exists(pid) for pid in pids)
