"""Attempts of a job are told apart: what one abandoned neither overrules nor completes another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import localckpt
from localckpt import NoReplicasAvailableError
from tests.managers.jobs import (
    KINDS,
    MAX_S,
    assert_same,
    cliques,
    error_of,
    files,
    iterations_on,
    make_manager,
    resume,
    save,
    state_of,
)
from tests.ranks import node_store, run_ranks

Dirs = Callable[[int], list[Path]]


def _go_back(rank: int, world_size: int, kind: str) -> None:
    repl = cliques(1, 2)

    def begin(keep_last: int = 9) -> Any:
        return make_manager(kind, node_store(), "job", repl, keep_last=keep_last)

    with begin() as manager, localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue:
        for iteration in (80, 90, 100):
            save(manager, state_of(rank, iteration), iteration, queue)

    # The first attempt is given up at 100; the second starts from somewhere else, saves 95 and dies.
    with begin() as manager, localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue:
        save(manager, state_of(rank, 95), 95, queue)
        assert resume(manager, rank, 95) == "own node"
    assert iterations_on(node_store()) == {80, 90, 95, 100}

    # The third goes on from 95, and reaches 100 in its own way.
    with begin() as manager, localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue:
        assert resume(manager, rank, 95) == "own node"
        save(manager, {"another way": rank}, 100, queue)
        assert manager.find_latest() == 100
        assert_same(manager.load()[0], {"another way": rank})
    with begin() as manager:
        assert manager.find_latest() == 100
        state, ckpt_id = manager.load()
        assert_same(state, {"another way": rank})
        assert ckpt_id == (100, rank, "job")

    # What is kept are the newest, not the highest.
    with begin(keep_last=2) as manager:
        assert manager.find_latest() == 100
        manager.save(state_of(rank, 96), 96)
        assert manager.find_latest() == 96
        manager.save(state_of(rank, 97), 97)
        assert resume(manager, rank, 97) == "own node"
        assert iterations_on(node_store()) == {96, 97}
        repl.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_that_went_back_is_not_overruled_by_what_it_abandoned(
    kind: str, node_dirs: Dirs, shm_roots: Dirs
) -> None:
    nodes = (node_dirs if kind == "disk" else shm_roots)(2)

    run_ranks(_go_back, 2, kind, store_per_node=nodes)


def _shards(root: Path, owner: int, iteration: int, epoch: int) -> list[Path]:
    """Files of a shard of one attempt, whoever keeps them."""
    return [
        path
        for path in root.rglob("*.safetensors")
        if path.name.split(".")[:3] == [f"{iteration:012d}", str(owner), str(epoch)]
    ]


def _save_twice(rank: int, world_size: int, kind: str) -> None:
    repl = cliques(1, 2)
    with make_manager(kind, node_store(), "job", repl, keep_last=9) as manager:
        manager.save(state_of(rank, 90), 90)
        manager.save(state_of(rank, 100), 100)
    with make_manager(kind, node_store(), "job", repl, keep_last=9) as manager:
        # The same iteration anew, with other values.
        manager.save({"second": rank}, 100)
    repl.close()


def _find_and_load(rank: int, world_size: int, kind: str, expected: int) -> str:
    with make_manager(kind, node_store(), "job", keep_last=9) as manager:
        found = manager.find_latest()
        assert found == expected
        if found == -1:
            return error_of(manager.load, NoReplicasAvailableError)
        state, _ = manager.load()
        return "second" if "second" in state else f"first {state['iteration']}"


@pytest.mark.parametrize("kind", KINDS)
def test_halves_of_two_attempts_never_make_a_checkpoint(
    kind: str, node_dirs: Dirs, shm_roots: Dirs
) -> None:
    nodes = (node_dirs if kind == "disk" else shm_roots)(2)
    run_ranks(_save_twice, 2, kind, store_per_node=nodes)

    def remove(owner: int, iteration: int, epoch: int) -> None:
        gone = [path for node in nodes for path in _shards(node, owner, iteration, epoch)]
        assert len(gone) == 2
        for path in gone:
            path.unlink()

    def find_and_load(expected: int) -> list[str]:
        return run_ranks(_find_and_load, 2, kind, expected, store_per_node=nodes)

    assert find_and_load(100) == ["second"] * 2
    # Rank 0 only has its shard of the second attempt, rank 1 only that of the first.
    remove(owner=1, iteration=100, epoch=2)
    remove(owner=0, iteration=100, epoch=1)
    assert find_and_load(90) == ["first 90"] * 2
    remove(owner=1, iteration=90, epoch=1)
    for text in find_and_load(-1):
        assert "iteration 100 (generation 2.1, 2 ranks) lacks the shards of ranks 1" in text
        assert "iteration 100 (generation 1.2, 2 ranks) lacks the shards of ranks 0" in text
        assert "iteration 90 (generation 1.1, 2 ranks) lacks the shards of ranks 1" in text


def _one_rank_did_not_finish(rank: int, world_size: int) -> None:
    """Rank 1 has no file of 100: as if it had died before its write, after all others' were done."""
    with make_manager("disk", node_store(), "job", keep_last=9) as manager:
        manager.save(state_of(rank, 90), 90)
        manager.save(state_of(rank, 100), 100)
    if rank == 1:
        for path in _shards(node_store(), 1, 100, 1):
            path.unlink()
    dist.barrier()
    with make_manager("disk", node_store(), "job", keep_last=2) as manager:
        assert resume(manager, rank, 90) == "own node"
        # The attempt goes another way, and comes to the same iteration.
        manager.save({"second": rank}, 100)
        assert manager.find_latest() == 100
        assert_same(manager.load()[0], {"second": rank})
        manager.save({"second": rank}, 101)
    # What never was complete is not kept for ever.
    assert [name.split(".")[2] for name in files(node_store())] == ["2", "2"]


def test_what_is_left_of_an_unfinished_save_is_neither_found_nor_kept(node_dirs: Dirs) -> None:
    run_ranks(_one_rank_did_not_finish, 2, store_per_node=node_dirs(2))


def _join_with_what_only_one_rank_knows(rank: int, world_size: int) -> list[str]:
    with make_manager("disk", node_store(), "job", keep_last=9) as manager:
        manager.save(state_of(rank, 5), 5)
    return files(node_store())


def test_the_attempt_is_numbered_after_the_highest_that_any_node_holds(node_dirs: Dirs) -> None:
    nodes = node_dirs(2)
    alone = {"store_per_node": nodes[1:]}
    run_ranks(_join_with_what_only_one_rank_knows, 1, **alone)
    run_ranks(_join_with_what_only_one_rank_knows, 1, **alone)

    names = run_ranks(_join_with_what_only_one_rank_knows, 2, store_per_node=nodes)

    assert ["000000000005.0.3.1." in name for name in names[0]] == [True]
    assert [name for name in names[1] if "000000000005.1.3.1." in name]
