"""A state that could not be loaded again is refused by the first ``save``, on all ranks at once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import localckpt
from tests.managers.jobs import Dirs, cliques, error_of, files, make_manager, resume, save, state_of
from tests.ranks import run_ranks


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
