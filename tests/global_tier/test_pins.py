"""Pins and rules of retention at work: on a real root, among ranks, while a job prunes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from localckpt import (
    Best,
    CheckpointingException,
    GlobalCheckpointManager,
    MismatchError,
    NoReplicasAvailableError,
    Retention,
    StorageError,
)
from localckpt.global_tier.folders import (
    PIN_NAME,
    CommitRecord,
    Folder,
    SharedSession,
    folders_in,
    pin,
    remove,
    why_kept,
)
from localckpt.global_tier.places import FilePlace
from tests.global_tier.models import at_each_rename, leftovers_in, manager_on, state_of
from tests.managers.jobs import error_of
from tests.ranks import run_ranks


def _save(manager: GlobalCheckpointManager, losses: dict[int, float | None]) -> None:
    for iteration, loss in losses.items():
        metrics = {} if loss is None else {"loss": torch.tensor(loss)}
        manager.save({"w": torch.full((9,), float(iteration))}, iteration, metrics=metrics)


def _iterations(root: Path) -> list[int]:
    return sorted(folder.iteration for folder in folders_in(FilePlace(root))[0])


def _reasons(root: Path) -> dict[int, tuple[str, ...]]:
    """What a tool that only looks says of each checkpoint."""
    kept = why_kept(SharedSession(FilePlace(root), "").checkpoints())
    return {iteration: kept.get((epoch, iteration), ()) for epoch, iteration in _versions(root)}


def _versions(root: Path) -> list[tuple[int, int]]:
    return sorted(folder.version for folder in folders_in(FilePlace(root))[0])


def _keep_by_all_rules(rank: int, world_size: int, root: Path) -> None:
    retention = Retention(last=1, every=50, best=Best("loss", count=2))
    with manager_on(root, retention=retention) as manager:
        # Each rank has its own loss: the first one's counts.
        for iteration, loss in ((40, 9.0), (50, 8.0), (60, 0.5), (70, float("nan")), (80, 0.7)):
            metrics = {"loss": loss + 100 * rank}
            manager.save(state_of(iteration, rank), iteration, metrics=metrics, is_async=True)
        told = error_of(lambda: manager.pin(40), NoReplicasAvailableError)
        assert "there is no checkpoint of iteration 40" in told
        assert "the newest are: 80, 60, 50" in told
        told = error_of(lambda: manager.pin(50 + 10 * rank), MismatchError)
        assert 'rank 1: ["", 60]' in told
        manager.pin(50)
        manager.pin(50)
        manager.save(state_of(90, rank), 90)
        manager.save(state_of(110, rank), 110, is_async=True)
        manager.unpin(90)


def test_all_ranks_keep_what_the_rules_and_the_pins_say(tmp_path: Path) -> None:
    run_ranks(_keep_by_all_rules, 2, tmp_path)

    assert _reasons(tmp_path) == {
        50: ("pinned", "every"),
        60: ("best",),
        80: ("best",),
        90: ("every",),
        110: ("newest", "last", "every"),
    }
    record = CommitRecord.read(Folder(FilePlace(tmp_path), 80, 1).beside("localckpt.json"))
    assert record is not None
    assert record.metrics == {"loss": 0.7}
    assert record.retention == Retention(last=1, every=50, best=Best("loss", count=2))
    assert leftovers_in(tmp_path) == []


def _checkpoint(root: Path) -> Folder:
    with manager_on(root) as manager:
        _save(manager, {1: None, 2: None})
    return Folder(FilePlace(root), 1, 1)


def _when(part: str, act: Callable[[], object]) -> None:
    """Do it once, when a file next gets a name with ``part`` in it."""
    once = [act]
    at_each_rename(part, lambda: once.pop()() if once else None)  # type: ignore[func-returns-value]


def test_a_checkpoint_that_is_pinned_while_it_is_removed_is_put_back(tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path)
    _when(".removed", lambda: pin(folder))

    is_gone = remove(folder)

    assert folder.is_pinned
    assert not is_gone
    with manager_on(tmp_path) as manager:
        assert manager.load(into={"w": torch.zeros(9)}, iteration=1)[1].iteration == 1
    assert leftovers_in(tmp_path) == []


def test_what_a_job_that_died_was_removing_is_put_back_if_it_is_pinned(tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path)
    pin(folder)
    # It was pinned after the job had looked, and the job was killed after this rename.
    folder.path.rename(replace(folder, label="old.removed").path)

    with manager_on(tmp_path, keep_last=1) as manager:
        _save(manager, {3: None})
        assert manager.load(into={"w": torch.zeros(9)}, iteration=1)[1].iteration == 1

    assert _iterations(tmp_path) == [1, 3]
    assert leftovers_in(tmp_path) == []


def test_a_checkpoint_whose_pin_cannot_be_seen_stays(tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path)
    (folder.path / PIN_NAME).symlink_to(folder.path / PIN_NAME)

    with pytest.raises(StorageError, match="could not look at"):
        remove(folder)
    with manager_on(tmp_path, keep_last=1) as manager:
        _save(manager, {3: None})

    assert folder.path.is_dir()
    assert Folder(FilePlace(tmp_path), 2, 1).path.is_dir()


def test_a_manager_that_only_loads_pins_nothing(tmp_path: Path) -> None:
    with manager_on(tmp_path) as manager:
        _save(manager, {1: None})
    with manager_on(tmp_path, read_only=True) as manager:
        for call in (manager.pin, manager.unpin):
            with pytest.raises(CheckpointingException, match="read_only=True"):
                call(1)

    assert _reasons(tmp_path) == {1: ("newest", "all")}
