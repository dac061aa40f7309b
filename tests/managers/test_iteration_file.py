"""The file by which a launcher knows how far a job has come, and that a job outlives its loss."""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from localckpt import AsyncCallsQueue, Checkpointer, CheckpointingException
from localckpt.managers import save as saving
from tests.managers.jobs import MAX_S, cliques, error_of, make_manager, save, state_of
from tests.managers.own_managers import DictManager
from tests.ranks import node_store, run_ranks
from tests.upstream.environment import UPSTREAM, run_upstream_ranks

Dirs = Callable[[int], list[Path]]

_TRACKER = UPSTREAM / "nvidia_resiliency_ext" / "fault_tolerance" / "progress_tracker.py"


def _number(path: Path) -> int:
    """As NVRx's launcher reads it."""
    return int(path.read_text().strip())


def _save_each(rank: int, world_size: int, folder: Path, is_async: bool) -> list[Any]:
    own, shared = folder / f"rank-{rank}", folder / "shared"
    told: list[Any] = []
    with (
        cliques(2, 2) as strategy,
        AsyncCallsQueue() as queue,
        make_manager(
            *("disk", node_store(), "job", strategy),
            iteration_file=own if is_async else shared,
        ) as manager,
    ):
        for iteration in (4, 10, 3000):
            save(manager, state_of(rank, iteration), iteration, queue if is_async else None)
            torch.distributed.barrier()
            told.append(_number(own) if own.exists() else None if is_async else _number(shared))
            torch.distributed.barrier()
    return told


def test_the_first_rank_of_each_node_writes_each_complete_iteration(
    node_dirs: Dirs, tmp_path: Path
) -> None:
    told = run_ranks(_save_each, 4, tmp_path, True, store_per_node=node_dirs(2))

    assert told == [[4, 10, 3000], [None] * 3, [4, 10, 3000], [None] * 3]


def test_nodes_that_write_one_file_leave_it_whole_and_nothing_beside_it(
    node_dirs: Dirs, tmp_path: Path
) -> None:
    folder, is_over, torn = tmp_path / "files", threading.Event(), list[str]()
    folder.mkdir()

    def read() -> None:
        while not is_over.wait(0.0005):
            if (folder / "shared").exists():
                text = (folder / "shared").read_text()
                torn.extend([text] if text not in ("4\n", "10\n", "3000\n") else [])

    reader = threading.Thread(target=read)
    reader.start()
    try:
        told = run_ranks(_save_each, 4, folder, False, store_per_node=node_dirs(4))
    finally:
        is_over.set()
        reader.join()

    assert told == [[4, 10, 3000]] * 4
    assert torn == []
    assert [path.name for path in folder.iterdir()] == ["shared"]


def test_a_save_that_failed_or_is_bad_is_no_progress(node_dirs: Dirs, tmp_path: Path) -> None:
    def check(tensors: Any) -> str | None:
        if tensors["model.weight"].isnan().any():
            raise ValueError("it cannot be judged")
        return "it is infinite" if tensors["model.weight"].isinf().any() else None

    file = tmp_path / "iteration"
    with make_manager("disk", *node_dirs(1), "job", check=check, iteration_file=file) as manager:
        save(manager, state_of(0, 1), 1)
        failing, bad = state_of(0, 2), state_of(0, 3)
        failing["model"]["weight"].fill_(float("nan"))
        bad["model"]["weight"].fill_(float("inf"))
        assert "it cannot be judged" in error_of(lambda: save(manager, failing, 2))
        assert _number(file) == 1
        save(manager, bad, 3)
        assert _number(file) == 1
        save(manager, state_of(0, 4), 4)

    assert _number(file) == 4


def test_a_manager_of_hooks_and_a_checkpointer_write_it_too(tmp_path: Path) -> None:
    file = tmp_path / "iteration"
    with DictManager({}, iteration_file=file, timeout=MAX_S) as manager:
        save(manager, state_of(0, 5), 5)
        assert _number(file) == 5

    with Checkpointer(
        {"model": torch.nn.Linear(2, 2)}, local=tmp_path / "local", every=3, iteration_file=file
    ) as checkpointer:
        for step in range(checkpointer.resume(), 8):
            checkpointer.step(step)

    assert _number(file) == 7


def test_a_file_that_cannot_be_written_costs_one_warning_and_no_save(
    node_dirs: Dirs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "not" / "there"
    with make_manager("disk", *node_dirs(1), "job", iteration_file=file) as manager:
        save(manager, state_of(0, 1), 1)
        save(manager, state_of(0, 2), 2)
        assert manager.find_latest() == 2
        warned = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
        file.parent.mkdir()
        save(manager, state_of(0, 3), 3)

    assert len(warned) == 1
    assert "a launcher may take the job for stuck" in warned[0]
    assert str(file) in warned[0]
    assert _number(file) == 3


def test_storage_that_hangs_is_waited_for_once_and_never_overwrites_a_later_iteration(
    node_dirs: Dirs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    answers, replace_file = threading.Event(), saving.replace_file

    def replace_late(*args: Any) -> None:
        answers.wait(MAX_S)
        replace_file(*args)

    monkeypatch.setattr(saving, "replace_file", replace_late)
    monkeypatch.setattr(saving, "_NOTING_S", 0.2)
    file = tmp_path / "iteration"
    with make_manager("disk", *node_dirs(1), "job", iteration_file=file) as manager:
        for iteration in (1, 2):
            save(manager, state_of(0, iteration), iteration)
        assert manager.find_latest() == 2
        assert not file.exists()
        answers.set()
        assert manager._saves._noting.wait(MAX_S)
        assert _number(file) == 1
        save(manager, state_of(0, 3), 3)

    assert _number(file) == 3
    assert caplog.text.count("a launcher may take the job for stuck") == 1


def test_what_is_no_path_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    state = {"model": torch.nn.Linear(2, 2)}
    for make in (
        lambda: make_manager("disk", tmp_path / "local", iteration_file=3),
        lambda: Checkpointer(state, local=tmp_path / "local", iteration_file=3),  # type: ignore[arg-type]
    ):
        with pytest.raises(CheckpointingException, match="iteration_file is 3; give the path"):
            make()


def _track(rank: int, world_size: int, folder: Path) -> list[Any]:
    """What NVRx's own tracker makes of four starts, of which the third saves nothing."""
    spec = importlib.util.spec_from_file_location("progress_tracker", _TRACKER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    file = folder / "iteration"
    tracker = module.TrainingProgressTracker(
        max_no_progress_cycles=1, checkpoint_iteration_file=str(file)
    )
    told = []
    for last in (10, 20, None, 30):
        with make_manager("disk", folder / "local", "job", iteration_file=file) as manager:
            manager.find_latest()
            if last is not None:
                save(manager, state_of(0, last), last)
        tracker.analyze_previous_cycle()
        told.append((tracker.last_restart_iteration, tracker.should_terminate_early()))
    return told


@pytest.mark.skipif(not _TRACKER.exists(), reason="needs nvidia-resiliency-ext 0.6 or newer")
def test_nvrxs_own_tracker_reads_it_as_progress(tmp_path: Path) -> None:
    (told,) = run_upstream_ranks(_track, 1, tmp_path, init_group=False)

    assert told == [(10, False), (20, False), (20, True), (30, False)]
