"""The file by which a launcher knows how far a job has come, and that a job outlives its loss."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from localckpt import AsyncCallsQueue
from localckpt.managers import save as saving
from tests.managers.jobs import MAX_S, Dirs, cliques, error_of, make_manager, save, state_of
from tests.ranks import node_store, run_ranks


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
