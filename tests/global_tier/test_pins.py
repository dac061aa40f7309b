"""Pins and rules of retention at work: on a real root, among ranks, while a job prunes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from localckpt import (
    Best,
    CheckpointingException,
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
from tests.global_tier.models import (
    at_each_rename,
    leftovers_in,
    manager_on,
    save_numbers,
    state_of,
)
from tests.managers.jobs import error_of
from tests.ranks import run_ranks


def _reasons(root: Path) -> dict[int, tuple[str, ...]]:
    """What a tool that only looks says of each checkpoint."""
    kept = why_kept(SharedSession(FilePlace(root), "").checkpoints())
    versions = sorted(folder.version for folder in folders_in(FilePlace(root))[0])
    return {iteration: kept.get((epoch, iteration), ()) for epoch, iteration in versions}


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


def test_a_pinned_checkpoint_stays_whatever_removes_it(tmp_path: Path) -> None:
    folder = Folder(FilePlace(tmp_path), 1, 1)
    with manager_on(tmp_path) as manager:
        save_numbers(manager, 1, 2)

    # It is pinned while it is removed.
    once = [pin]
    at_each_rename(".removed", lambda: once.pop()(folder) if once else None)
    assert not remove(folder)
    assert folder.is_pinned
    assert leftovers_in(tmp_path) == []
    # It is pinned after a job had looked, which was killed after this rename.
    folder.path.rename(replace(folder, label="old.removed").path)
    with manager_on(tmp_path, keep_last=1) as manager:
        save_numbers(manager, 3)
        assert manager.load(into={"w": torch.zeros(9)}, iteration=1)[1].iteration == 1
    assert [*_reasons(tmp_path)] == [1, 3]
    assert leftovers_in(tmp_path) == []
    # Its pin cannot be seen.
    (folder.path / PIN_NAME).unlink()
    (folder.path / PIN_NAME).symlink_to(folder.path / PIN_NAME)
    with pytest.raises(StorageError, match="could not look at"):
        remove(folder)
    with manager_on(tmp_path, keep_last=1) as manager:
        save_numbers(manager, 4)
    assert [*_reasons(tmp_path)] == [1, 3, 4]


def test_a_manager_that_only_loads_pins_nothing(tmp_path: Path) -> None:
    with manager_on(tmp_path) as manager:
        save_numbers(manager, 1)
    with manager_on(tmp_path, read_only=True) as manager:
        for call in (manager.pin, manager.unpin):
            with pytest.raises(CheckpointingException, match="read_only=True"):
                call(1)

    assert _reasons(tmp_path) == {1: ("newest", "all")}
