"""Checkpoints are ordered by lineage: only what a job went back from on purpose is overruled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.managers.jobs import (
    cliques,
    iterations_on,
    make_manager,
    resume,
    state_of,
)
from tests.ranks import node_store, run_ranks

Dirs = Callable[[int], list[Path]]


def _go_on(
    rank: int,
    world_size: int,
    kind: str,
    attempts: list[tuple[int, list[int]]],
    begins_at: int | None = None,
) -> None:
    """Attempts of a job: each finds and loads what is there, or begins elsewhere, and saves."""
    repl = cliques(1, 2)
    for resumes_at, saves in attempts:
        with make_manager(kind, node_store(), "job", repl, keep_last=1) as manager:
            if resumes_at >= 0:
                resume(manager, rank, resumes_at)
            elif begins_at is not None:
                manager.begin(from_iteration=begins_at)
            for iteration in saves:
                manager.save(state_of(rank, iteration), iteration)
    repl.close()


@pytest.mark.fault("old-files")
@pytest.mark.parametrize(("kind", "begins_at"), [("disk", None), ("memory", 5000)])
def test_a_repaired_node_does_not_bring_back_an_older_checkpoint_of_more_restarts(
    kind: str, begins_at: int | None, node_dirs: Dirs, shm_roots: Dirs
) -> None:
    a, b, c, d = (node_dirs if kind == "disk" else shm_roots)(4)
    # The job runs on A and B, and is restarted three times.
    ab: list[tuple[int, list[int]]] = [(-1, [3]), (3, [8]), (8, [13]), (13, [18])]
    run_ranks(_go_on, 2, kind, ab, store_per_node=[a, b])
    # Both go to repair; it goes on from shared storage on C and D, and is restarted once.
    cd: list[tuple[int, list[int]]] = [(-1, [5001, 5006]), (5006, [5011, 5012])]
    run_ranks(_go_on, 2, kind, cd, begins_at, store_per_node=[c, d])

    # C dies; A is back, and takes its place.
    run_ranks(_go_on, 2, kind, [(5012, []), (5012, [5013])], store_per_node=[a, d])

    assert iterations_on(a, d) == {5013}
