"""Checkpoints are ordered by lineage: only what a job went back from on purpose is overruled."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localckpt.errors import MismatchError
from localckpt.lineage import Point
from localckpt.storage.notes import Notes, read_notes
from tests.managers.jobs import (
    KINDS,
    assert_same,
    cliques,
    damage,
    error_of,
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


def _choose_between_two(rank: int, world_size: int, base: Path) -> tuple[str, list[int]]:
    """Each of two lineages is complete on a node of its own; one is told of the other too late."""
    for node, first, last in (("a", 3, 18), ("b", 5001, 5012)):
        with make_manager("disk", base / node / str(rank), "job", keep_last=1) as manager:
            manager.save(state_of(rank, first), first)
            manager.save(state_of(rank, last), last)
    shards = (base / "a" / str(rank)).rglob("*.safetensors")
    for path in list(shards):
        shutil.copy(path, base / "b" / str(rank) / path.relative_to(base / "a" / str(rank)))
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("localckpt").addHandler(handler)
    with make_manager("disk", base / "b" / str(rank), "job", keep_last=1) as manager:
        resume(manager, rank, 5012)
        told = [row.checkpoint.iteration for row in manager.explain().checkpoints]
        manager.save(state_of(rank, 5013), 5013)
    assert iterations_on(base / "b" / str(rank)) == {5013}
    (choice,) = [text for text in warnings if "is taken" in text]
    return choice, told


@pytest.mark.fault("old-files")
def test_where_two_lineages_are_unrelated_the_choice_is_logged_with_both(
    tmp_path: Path,
) -> None:
    told = run_ranks(_choose_between_two, 2, tmp_path)

    choice, explained = told[0]
    assert choice.startswith("iteration 5012 of epoch 1-")
    assert " is taken, and iteration 18 of epoch 1-" in choice
    assert explained == [5012, 18]


def _go_back_in_one_job(rank: int, world_size: int) -> None:
    with make_manager("disk", node_store(), "job", keep_last=2) as manager:
        for iteration in (10, 20, 30):
            manager.save(state_of(rank, iteration), iteration)
        told = error_of(lambda: manager.begin(from_iteration=20 + rank), MismatchError)
        assert "20 on rank 0, 21 on rank 1" in told
        manager.begin(from_iteration=20)
        assert "must be above it" in error_of(lambda: manager.save({}, 20))
        manager.save({"second": rank}, 25)
        assert manager.find_latest() == 25
        assert_same(manager.load()[0], {"second": rank})
        assert iterations_on(node_store()) == {20, 25}
        manager.save({"second": rank}, 30)
    with make_manager("disk", node_store(), "job", keep_last=2) as manager:
        assert manager.find_latest() == 30
        assert_same(manager.load()[0], {"second": rank})


def test_a_job_that_says_it_goes_back_overrules_what_it_left_on_all_ranks(node_dirs: Dirs) -> None:
    run_ranks(_go_back_in_one_job, 2, store_per_node=node_dirs(2))


@pytest.mark.parametrize("wrong", [-2, 1.0, True, None, "7"])
def test_what_is_no_iteration_cannot_be_begun_from(wrong: Any, tmp_path: Path) -> None:
    with make_manager("disk", tmp_path, "job") as manager:
        assert "the iteration to go on from is" in error_of(lambda: manager.begin(wrong))


def test_a_job_that_asks_for_nothing_removes_what_is_ahead_of_it_only_when_it_has_passed_it(
    tmp_path: Path,
) -> None:
    def start() -> Any:
        return make_manager("disk", tmp_path, "job", keep_last=1)

    with start() as manager:
        manager.save(state_of(0, 20), 20)
    # Another training under the same name: it does not know that there is something.
    with start() as manager:
        manager.save(state_of(0, 3), 3)
        manager.save(state_of(0, 4), 4)
        assert iterations_on(tmp_path) == {4, 20}
        assert resume(manager, 0, 4) == "own node"
    with start() as manager:
        assert resume(manager, 0, 4) == "own node"
        manager.save(state_of(0, 5), 5)

    assert iterations_on(tmp_path) == {5}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_after_an_older_one_was_loaded_is_newer_than_what_could_not_be_had(
    kind: str, tmp_path: Path, shm_roots: Dirs
) -> None:
    root = tmp_path if kind == "disk" else shm_roots(1)[0]
    with make_manager(kind, root, "job", keep_last=3) as manager:
        for iteration in (10, 20):
            manager.save(state_of(0, iteration, 3 << 20), iteration)
    (newest,) = root.rglob("*20.0.*.safetensors")
    whole = newest.read_bytes()
    # Its header is good.
    damage(newest, 0.7)
    with make_manager(kind, root, "job", keep_last=3) as manager:
        assert manager.find_latest() == 20
        assert manager.load()[1].iteration == 10
        manager.save(state_of(0, 11), 11)
    # A good copy of it comes back.
    newest.write_bytes(whole)

    with make_manager(kind, root, "job", keep_last=3) as manager:
        assert resume(manager, 0, 11) == "own node"


def test_a_job_that_loads_twice_goes_on_from_what_it_loaded_last(tmp_path: Path) -> None:
    with make_manager("disk", tmp_path, "job", keep_last=9) as manager:
        for iteration in (10, 20):
            manager.save(state_of(0, iteration), iteration)
        manager.load(iteration=10)
        manager.load(iteration=20)
        manager.save(state_of(0, 30), 30)
        epochs = [row.checkpoint.generation.epoch_id for row in manager.explain().checkpoints]
        lineages = manager._context.checkpoints.lineages

    second, *first = epochs
    assert first[0] == first[1] != second
    assert lineages[second].ancestors[0].epoch == first[0]
    assert (lineages[second].resumed_at, lineages[second].given_up) == (20, ())


def test_the_lineage_of_the_last_attempt_stays_noted_until_the_next_one_saves(
    tmp_path: Path,
) -> None:
    notes: list[Notes] = []

    def note() -> None:
        notes.append(read_notes(tmp_path / "session-job" / "0"))

    with make_manager("disk", tmp_path, "job") as manager:
        manager.save(state_of(0, 10), 10)
        note()
    with make_manager("disk", tmp_path, "job") as manager:
        assert resume(manager, 0, 10) == "own node"
        note()
        manager.save(state_of(0, 11), 11)
        note()

    first, between, second = (noted.lineage for noted in notes)
    assert first is not None
    assert second is not None
    assert [noted.epoch for noted in notes] == [1, 2, 2]
    assert (first.epoch.number, first.ancestors) == (1, ())
    assert between == first
    assert second.ancestors == (Point(first.epoch, 10),)


@pytest.mark.parametrize("lineage", ["null", "7", '"no lineage"', "[1, 2]", "{}", "[[[[]]]]"])
def test_a_note_without_a_lineage_that_can_be_read_still_gives_its_number(
    lineage: str, tmp_path: Path
) -> None:
    (tmp_path / ".notes").write_text(f'{{"epoch": 7, "lineage": {lineage}}}')

    assert read_notes(tmp_path) == Notes(7)
