"""Ranks that do not do the same, or cannot, are told so, every one; nothing is spoiled."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import localckpt
from localckpt import MismatchError, PeerLostError, SaveFailedError
from tests.managers.jobs import (
    Dirs,
    cliques,
    error_of,
    files,
    in_job,
    iterations_on,
    make_manager,
    resume,
    save,
    state_of,
)
from tests.ranks import node_store, run_ranks

pytestmark = pytest.mark.fault("disagreement")


_TIMEOUT_S = 2.0


def _other_sessions(rank: int, world_size: int) -> list[str]:
    session = "right" if rank != 1 else "wrong"

    def begin(repl: Any = None) -> Any:
        return make_manager("disk", node_store(), session, repl, timeout=_TIMEOUT_S)

    with begin() as manager:
        told = [error_of(manager.find_latest, MismatchError)]
    with begin() as manager:
        told.append(error_of(lambda: manager.save(state_of(rank, 1), 1), MismatchError))
    with cliques(1, world_size, _TIMEOUT_S) as repl:
        # With a strategy that is there, making a manager is where ranks meet first.
        told.append(error_of(lambda: begin(repl), MismatchError))
        with make_manager("disk", node_store(), "right", repl) as manager:
            assert manager.find_latest() == -1
            manager.save(state_of(rank, 1), 1)
            assert resume(manager, rank, 1) == "own node"
    return told


def test_ranks_of_different_sessions_are_named_on_every_rank(node_dirs: Dirs) -> None:
    told = run_ranks(_other_sessions, 3, store_per_node=node_dirs(3))

    for text in (text for rank in told for text in rank):
        assert "session_id: 'right' on ranks 0 and 2, 'wrong' on rank 1" in text


def _other_iterations(rank: int, world_size: int) -> list[str]:
    told = []
    with in_job(keep_last=9) as (manager, queues):
        for number, queue in enumerate((None, queues)):
            good = 10 * number
            save(manager, state_of(rank, good), good, queue)
            mine = good + 5 + rank
            told.append(
                error_of(
                    lambda i=mine, q=queue: save(manager, state_of(rank, i), i, q), SaveFailedError
                )
            )
            assert max(iterations_on(node_store())) == good
            assert resume(manager, rank, good) == "own node"
        save(manager, state_of(rank, 20), 20)
        assert resume(manager, rank, 20) == "own node"
    return told


def test_ranks_that_save_different_iterations_are_named_and_can_go_on(node_dirs: Dirs) -> None:
    told = run_ranks(_other_iterations, 2, store_per_node=node_dirs(2))

    for first, text in [*zip((5, 15), told[0], strict=True), *zip((5, 15), told[1], strict=True)]:
        assert "different iterations" in text
        assert f"'{first}' on rank 0" in text
        assert f"'{first + 1}' on rank 1" in text


def _one_more_async_save(rank: int, world_size: int) -> list[str]:
    told = []
    queue = localckpt.AsyncCallsQueue(timeout_s=_TIMEOUT_S)
    with make_manager("disk", node_store(), "job", keep_last=9) as manager:
        save(manager, state_of(rank, 1), 1, queue)
        if rank == 0:
            told.append(error_of(lambda: save(manager, state_of(rank, 2), 2, queue), PeerLostError))
        # Here the ranks meet again, and find out which of them has saved more.
        told.append(error_of(lambda: manager.save(state_of(rank, 3), 3), SaveFailedError))
        assert iterations_on(node_store()) == {1}
        manager.save(state_of(rank, 4), 4)
        assert resume(manager, rank, 4) == "own node"
        assert iterations_on(node_store()) == {1, 4}
    queue.close(abort=True)
    return told


def test_a_rank_that_saves_once_more_behind_training_is_named_at_the_next_save(
    node_dirs: Dirs,
) -> None:
    told = run_ranks(_one_more_async_save, 2, store_per_node=node_dirs(2))

    assert "rank 1" in told[0][0]
    assert told[0][1] == told[1][0]
    assert "the ranks saved different save numbers: '1.3' on rank 0, '1.2' on rank 1" in told[1][0]


class Unknown:
    """A class that nobody allowed."""


def _save_what_is_refused(
    rank: int, world_size: int, roots: list[Path], refused_on: list[int], is_async: bool
) -> tuple[list[str], float, list[str]]:
    root = roots[rank]
    told = []
    with make_manager("disk", root, "run", cliques(1, 2)) as manager:
        queue = localckpt.AsyncCallsQueue() if is_async else None
        bad: dict[str, Any] = state_of(rank, 1)
        if rank in refused_on:
            bad = bad | {"args": {"hook": lambda: 1, "unknown": Unknown()}}
        began = time.monotonic()
        told.append(error_of(lambda: manager.save(bad, 1, is_async=is_async)))
        seconds = time.monotonic() - began
        left = [name for name in files(root) if name.endswith(".safetensors")]
        save(manager, state_of(rank, 1), 1, queue)
        resume(manager, rank, 1)
        # From the second on it is an error of the save, as any other.
        told.append(error_of(lambda: save(manager, bad | {"iteration": 2}, 2, queue)))
        resume(manager, rank, 1)
        if queue is not None:
            queue.close()
    return told, seconds, left


@pytest.mark.parametrize("is_async", [False, True], ids=["at once", "behind training"])
@pytest.mark.parametrize("refused_on", [[0, 1], [1]], ids=str)
def test_a_first_state_that_is_refused_is_an_error_of_save_on_all_ranks(
    node_dirs: Dirs, refused_on: list[int], is_async: bool
) -> None:
    outcomes = run_ranks(_save_what_is_refused, 2, node_dirs(2), refused_on, is_async)

    who = "rank 1" if refused_on == [1] else "ranks 0 and 1"
    for told, seconds, left in outcomes:
        assert told == outcomes[0][0]
        assert told[0].startswith(f"UnsafeGlobalError: could not save iteration 1: {who}: ")
        assert "(at 'args.hook')" in told[0]
        assert f"{Unknown.__module__}.Unknown (at 'args.unknown')" in told[0]
        # Once where it stands, and in what to do.
        assert told[0].count("Unknown") == 3
        assert "the save of iteration 2 failed: " in told[1]
        assert seconds < 20
        assert left == []
