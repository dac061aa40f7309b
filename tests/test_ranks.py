"""The starter of ranks keeps its own promises, since every other test leans on it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.ranks import (
    DeadRank,
    RanksFailedError,
    announce,
    await_announced,
    node_store,
    run_ranks,
    start_ranks,
)


def _sum_of_ranks(rank: int, world_size: int, offset: int) -> tuple[int, torch.Tensor]:
    value = torch.tensor([rank + offset])
    dist.all_reduce(value)
    return rank, value


def _fails_on_rank_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("the reason")
    dist.barrier()


def _rank_one_kills_itself(rank: int, world_size: int) -> int:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def _sleeps(rank: int, world_size: int) -> None:
    announce(f"pid of {rank}", os.getpid())
    time.sleep(60.0)


def _leaves_a_thread(rank: int, world_size: int) -> None:
    threading.Thread(target=time.sleep, args=(60.0,)).start()


def _where_am_i(rank: int, world_size: int) -> tuple[str, str, bool]:
    return node_store().name, os.environ["LOCAL_RANK"], dist.is_initialized()


def _echo(rank: int, world_size: int) -> int:
    announce("ready")
    return int(await_announced("number")) + rank


def test_results_come_back_in_rank_order() -> None:
    results = run_ranks(_sum_of_ranks, 3, 10)

    assert [rank for rank, _ in results] == [0, 1, 2]
    assert all(value.item() == 33 for _, value in results)


def test_a_rank_that_raises_is_named_with_its_traceback() -> None:
    started = time.monotonic()

    with pytest.raises(RanksFailedError, match="the reason") as caught:
        run_ranks(_fails_on_rank_one, 2)

    assert "_fails_on_rank_one" in caught.value.failures[1]
    assert time.monotonic() - started < 20.0


def test_a_rank_that_was_expected_to_die_is_identified_by_its_signal() -> None:
    alive, dead = run_ranks(_rank_one_kills_itself, 2, init_group=False, expect_dead={1})

    assert alive == 0
    assert isinstance(dead, DeadRank)
    assert dead.signal is signal.SIGKILL


def test_an_unexpected_death_and_an_unexpected_return_are_failures() -> None:
    with pytest.raises(RanksFailedError, match="SIGKILL"):
        run_ranks(_rank_one_kills_itself, 2, init_group=False)
    with pytest.raises(RanksFailedError, match="expected to die"):
        run_ranks(_rank_one_kills_itself, 1, init_group=False, expect_dead={0})


def test_the_deadline_kills_and_reaps_every_rank() -> None:
    with start_ranks(_sleeps, 2, init_group=False) as group:
        pids = group.pids
        assert [group.await_announced(f"pid of {rank}") for rank in range(2)] == pids

        with pytest.raises(RanksFailedError, match=r"did not end within 0\.2 s"):
            group.join(0.2)

    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_thread_that_keeps_a_rank_alive_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.ranks._LEAVING_S", 0.3)

    with pytest.raises(RanksFailedError, match="its process did not end"):
        run_ranks(_leaves_a_thread, 1, init_group=False)


def test_ranks_are_dealt_to_nodes_in_blocks(node_dirs: Callable[[int], list[Path]]) -> None:
    a, b = node_dirs(2)

    places = run_ranks(_where_am_i, 3, init_group=False, store_per_node=[b, a])

    assert places == [(b.name, "0", False), (b.name, "1", False), (a.name, "0", False)]


def test_a_test_and_its_ranks_can_talk() -> None:
    with start_ranks(_echo, 2, init_group=False) as group:
        group.await_announced("ready")
        group.announce("number", 5)

        assert group.join() == [5, 6]
