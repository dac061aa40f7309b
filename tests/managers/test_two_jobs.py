"""Two jobs on one directory: the second is refused, and the first one's checkpoints stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from localckpt import StorageError
from tests.managers.jobs import KINDS, cliques, error_of, make_manager, resume, state_of
from tests.ranks import announce, await_announced, node_store, run_ranks, start_ranks

Dirs = Callable[[int], list[Path]]


def _live_on(rank: int, world_size: int, kind: str) -> None:
    repl = cliques(1, 2)
    with make_manager(kind, node_store(), "job", repl) as manager:
        for iteration in (1, 2):
            manager.save(state_of(rank, iteration), iteration)
        announce(f"saved {rank}")
        await_announced("go on")
        resume(manager, rank, 2)
        manager.save(state_of(rank, 3), 3)
    repl.close()


def _come_second(rank: int, world_size: int, kind: str) -> str:
    repl = cliques(1, 2)
    told = error_of(
        lambda: make_manager(kind, node_store(), "job", repl, timeout=4.0), StorageError
    )
    repl.close()
    return told


@pytest.mark.fault("two-jobs")
@pytest.mark.parametrize("kind", KINDS)
def test_a_job_whose_ranks_land_on_other_nodes_than_those_of_a_live_one_is_refused(
    kind: str, node_dirs: Dirs, shm_roots: Dirs
) -> None:
    nodes = (node_dirs if kind == "disk" else shm_roots)(2)
    with start_ranks(_live_on, 2, kind, store_per_node=nodes) as live:
        for rank in range(2):
            live.await_announced(f"saved {rank}")

        told = run_ranks(_come_second, 2, kind, store_per_node=nodes[::-1])

        assert len(set(told)) == 1
        assert any(f"in use by process {pid}" in told[0] for pid in live.pids)
        live.announce("go on")
        live.join()


def _resume_and_save(rank: int, world_size: int, kind: str) -> None:
    repl = cliques(1, 2)
    with make_manager(kind, node_store(), "job", repl) as manager:
        resume(manager, rank, 2)
        manager.save(state_of(rank, 3), 3)
    repl.close()


def _save_two(rank: int, world_size: int, kind: str) -> None:
    repl = cliques(1, 2)
    with make_manager(kind, node_store(), "job", repl) as manager:
        for iteration in (1, 2):
            manager.save(state_of(rank, iteration), iteration)
    repl.close()


@pytest.mark.fault("moved-ranks")
@pytest.mark.parametrize("kind", KINDS)
def test_a_job_whose_ranks_land_on_other_nodes_than_those_of_a_dead_one_goes_on(
    kind: str, node_dirs: Dirs, shm_roots: Dirs
) -> None:
    nodes = (node_dirs if kind == "disk" else shm_roots)(2)
    run_ranks(_save_two, 2, kind, store_per_node=nodes)

    run_ranks(_resume_and_save, 2, kind, store_per_node=nodes[::-1])
