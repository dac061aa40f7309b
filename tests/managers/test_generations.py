"""Attempts of a job are told apart: what one abandoned neither overrules nor completes another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import localckpt
from localckpt import NoReplicasAvailableError, StorageError
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

    # The first attempt is given up at 100; the second starts elsewhere, saves 95 and dies.
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


@pytest.mark.fault("old-files")
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


@pytest.mark.fault("old-files")
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
    """Rank 1 has no file of 100: as if it had died before its write, after that of rank 0."""
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


@pytest.mark.fault("late-writer")
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

    assert ["000000000005.0.3." in name for name in names[0]] == [True]
    assert [name for name in names[1] if "000000000005.1.3." in name]


def _save_on_these_nodes(rank: int, world_size: int) -> None:
    with make_manager("disk", node_store(), "job") as manager:
        manager.save(state_of(rank, 5), 5)


def _find_what_two_attempts_left(rank: int, world_size: int) -> int:
    with make_manager("disk", node_store(), "job") as manager:
        return manager.find_latest()


@pytest.mark.fault("old-files")
def test_attempts_on_nodes_that_have_none_in_common_never_mix(node_dirs: Dirs) -> None:
    nodes = node_dirs(4)
    run_ranks(_save_on_these_nodes, 2, store_per_node=nodes[:2])
    run_ranks(_save_on_these_nodes, 2, store_per_node=nodes[2:])

    found = run_ranks(_find_what_two_attempts_left, 2, store_per_node=[nodes[0], nodes[3]])

    assert found == [-1, -1]


def _abandon_and_return(rank: int, world_size: int, kind: str, base: Path) -> None:
    def begin(node: str) -> Any:
        return make_manager(kind, base / node, "job", keep_last=9)

    with begin(f"node{rank}") as manager:
        manager.save(state_of(rank, 5), 5)
    # An attempt that got no further than rank 0's shard of 10: rank 1 died before its own.
    with begin(f"node{rank}") as manager:
        manager.save({"abandoned by": rank}, 10)
    if rank == 1:
        (left,) = _shards(base / "node1", 1, 10, 2)
        left.unlink()
    dist.barrier()
    # Node 0 is away, so nobody sees that shard; the next attempt comes to 10, too, and dies.
    with begin("another node" if rank == 0 else "node1") as manager:
        assert manager.find_latest() == -1
        manager.save({"second": rank}, 10)
    # Now node 0 is back.
    with begin(f"node{rank}") as manager:
        assert resume(manager, rank, 5) == "own node"


@pytest.mark.fault("old-files")
@pytest.mark.parametrize("kind", KINDS)
def test_a_node_that_was_away_never_completes_the_checkpoint_of_a_later_attempt(
    kind: str, node_dirs: Dirs, shm_roots: Dirs
) -> None:
    run_ranks(_abandon_and_return, 2, kind, (node_dirs if kind == "disk" else shm_roots)(1)[0])


def _attempts_that_keep_nothing(rank: int, world_size: int) -> None:
    for _ in range(3):
        with make_manager("disk", node_store(), "job") as manager:
            assert manager.find_latest() == -1
    with make_manager("disk", node_store(), "job") as manager:
        manager.save(state_of(rank, 1), 1)
    assert [name.split(".")[2] for name in files(node_store())] == ["4"]


@pytest.mark.fault("old-files")
def test_an_attempt_that_kept_nothing_does_not_share_its_number_with_the_next(
    node_dirs: Dirs,
) -> None:
    """A late writer of the one must not be taken for the other."""
    run_ranks(_attempts_that_keep_nothing, 2, store_per_node=node_dirs(2))


def _begin_where_nothing_can_be_noted(rank: int, world_size: int) -> str:
    with make_manager("disk", node_store(), "job") as manager:
        in_the_way = node_store() / "session-job" / "1" / ".notes.new"
        if rank == 1:
            in_the_way.mkdir()
        told = error_of(lambda: manager.save(state_of(rank, 1), 1), StorageError)
        assert files(node_store()) == []
        if rank == 1:
            in_the_way.rmdir()
        manager.save(state_of(rank, 1), 1)
        assert resume(manager, rank, 1) == "own node"
    return told


@pytest.mark.fault("unusable-store")
def test_a_node_that_cannot_note_the_attempt_is_named_on_all_ranks(node_dirs: Dirs) -> None:
    told = run_ranks(_begin_where_nothing_can_be_noted, 2, store_per_node=node_dirs(2))

    assert told[0] == told[1]
    assert "rank 1: " in told[0]
    assert ".notes" in told[0]
