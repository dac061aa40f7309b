"""What goes wrong on one rank alone is raised on all of them at once, and names that rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localckpt import CheckpointingException, SaveFailedError, StorageError
from tests.managers.jobs import (
    KINDS,
    assert_same,
    error_of,
    files,
    make_manager,
    put_back,
    resume,
    state_of,
    take_away,
)
from tests.managers.own_managers import DictManager
from tests.ranks import node_store, run_ranks

Dirs = Callable[[int], list[Path]]

# Far more than an answer takes, far less than the managers' timeout.
_AT_ONCE_S = 8.0
_TIMEOUT_S = 40.0


def _told_at_once(call: Callable[[], Any], kind: type[Exception]) -> str:
    began = time.monotonic()
    told = error_of(call, kind)
    assert time.monotonic() - began < _AT_ONCE_S
    return told


def _use_a_store_that_one_cannot(rank: int, world_size: int, kind: str) -> str:
    root = node_store()
    if rank == 1:
        root = root / "file"
        root.write_text("no directory")

    def begin() -> None:
        with make_manager(kind, root, "job", timeout=_TIMEOUT_S) as manager:
            manager.find_latest()

    told = _told_at_once(begin, StorageError)
    with make_manager(kind, node_store() / "other", "job", timeout=_TIMEOUT_S) as manager:
        manager.save(state_of(rank, 1), 1)
        assert resume(manager, rank, 1) == "own node"
    return told


@pytest.mark.fault("unusable-store")
@pytest.mark.parametrize("kind", KINDS)
def test_a_store_that_one_rank_cannot_use(kind: str, node_dirs: Dirs, shm_roots: Dirs) -> None:
    nodes = (node_dirs if kind == "disk" else shm_roots)(3)

    told = run_ranks(_use_a_store_that_one_cannot, 3, kind, store_per_node=nodes)

    for text in told:
        assert str(nodes[1] / "file") in text
    for rank in (0, 2):
        assert "could not join the job: rank 1: " in told[rank]


def _lose_the_directory(rank: int, world_size: int) -> list[str]:
    told = []
    with make_manager("disk", node_store(), "job", timeout=_TIMEOUT_S) as manager:
        manager.save(state_of(rank, 1), 1)
        session = node_store() / "session-job"
        if rank == 1:
            take_away(session)
        told.append(_told_at_once(manager.find_latest, StorageError))
        told.append(_told_at_once(lambda: manager.save(state_of(rank, 2), 2), StorageError))
        if rank == 1:
            put_back(session)
        manager.save(state_of(rank, 3), 3)
        assert resume(manager, rank, 3) == "own node"
    return told


@pytest.mark.fault("unusable-store")
def test_a_directory_that_vanishes_on_one_node(node_dirs: Dirs) -> None:
    told = run_ranks(_lose_the_directory, 3, store_per_node=node_dirs(3))

    for finding, saving in told:
        assert saving.count("are as they were") == 1
        assert "could not find the latest checkpoint: rank 1: " in finding
        assert "rank 1: " in saving


class _Forgetful(DictManager):
    """Its catalogue can break."""

    broken = False

    def _my_ckpt_ids(self) -> Any:
        if self.broken:
            raise RuntimeError("the catalogue is broken")
        return super()._my_ckpt_ids()


def _break_the_catalogue(rank: int, world_size: int) -> list[str]:
    told = []
    manager = _Forgetful({}, session_id="job", timeout=_TIMEOUT_S)
    manager.save(state_of(rank, 1), 1)
    manager.broken = rank == 1
    told.append(_told_at_once(lambda: manager.save(state_of(rank, 2), 2), SaveFailedError))
    told.append(_told_at_once(manager.find_latest, CheckpointingException))
    manager.broken = False
    manager.save(state_of(rank, 3), 3)
    assert manager.find_latest() == 3
    assert_same(manager.load()[0], state_of(rank, 3))
    manager.close()
    return told


def test_hooks_of_one_rank_that_cannot_say_what_is_kept(node_dirs: Dirs) -> None:
    told = run_ranks(_break_the_catalogue, 3)

    for text in (text for rank in told for text in rank):
        assert "rank 1: RuntimeError: the catalogue is broken" in text


def test_close_removes_what_nobody_wrote(tmp_path: Path) -> None:
    with make_manager("disk", tmp_path, "job") as manager:
        for iteration in (1, 2, 3):
            manager.save(state_of(0, iteration), iteration)
        # Nobody carries it out, and a recycled file waits for it.
        manager.save(state_of(0, 4), 4, is_async=True)
        assert any(name.endswith(".recycled") for name in files(tmp_path))

    assert [name.rpartition("/")[2].split(".")[0] for name in files(tmp_path)] == [
        f"{iteration:012d}" for iteration in (2, 3)
    ]
