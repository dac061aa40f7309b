"""Who may save where: sessions and jobs that share a root, what they leave, what forks may do."""

from __future__ import annotations

import gc
import os
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from localckpt import CheckpointingException, StorageError
from localckpt.global_tier.manager import GlobalCheckpointManager
from localckpt.global_tier.root import RootLock
from tests.global_tier.models import (
    assert_loads,
    blank,
    checkpoints_in,
    manager_on,
    state_of,
)
from tests.managers.jobs import assert_same, error_of
from tests.ranks import announce, await_announced, run_ranks, start_ranks


def _tree(root: Path) -> dict[str, bytes]:
    """All files and what is in them."""
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def _in_a_fork(act: Callable[[], object]) -> int:
    """Exit status of a forked child that does it."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status = 1
    try:
        act()
        status = 0
    except BaseException:  # noqa: BLE001 - shown with the output of the test
        traceback.print_exc()
    finally:
        os._exit(status)


# Sessions.


# Jobs.


def _hold_the_root(rank: int, world_size: int, root: Path) -> None:
    manager = manager_on(root)
    manager.save(state_of(1, rank), 1, is_async=True)
    manager.wait_until_finished()
    announce(f"saved {rank}")
    await_announced("close")
    manager.close()
    announce(f"closed {rank}")
    await_announced("end")


@pytest.mark.fault("two-jobs")
def test_a_second_job_is_refused_until_the_first_is_closed(tmp_path: Path) -> None:
    with start_ranks(_hold_the_root, 2, tmp_path) as first:
        for rank in range(2):
            first.await_announced(f"saved {rank}")
        before = _tree(tmp_path)
        # Long enough for a busy machine's storage to answer.
        second = manager_on(tmp_path, timeout=3.0)
        expected = state_of(1, 0) | state_of(1, 1)
        found = blank(expected)
        second.load(into=found)
        assert_same(found, expected)

        told = error_of(lambda: second.save(state_of(2, 0), 2, is_async=True), StorageError)

        assert f"-{first.pids[0]}-" in told
        assert f"another job saves into {tmp_path}" in told
        assert _tree(tmp_path) == before
        first.announce("close")
        for rank in range(2):
            first.await_announced(f"closed {rank}")
        second.save(state_of(2, 0), 2, is_async=True)
        second.close()
        first.announce("end")
        first.join()
    assert checkpoints_in(tmp_path) == ["iteration_00000001.0001", "iteration_00000002.0002"]


# Forks.


def _refuse(manager: GlobalCheckpointManager) -> None:
    """In a fork: the manager is of no use, and closing it does nothing."""
    manager.close()
    for call in (
        manager.find_latest,
        manager.wait_until_finished,
        lambda: manager.save({}, 9, is_async=True),
        lambda: manager.load(into={}),
    ):
        with pytest.raises(CheckpointingException, match="a fork"):
            call()


def _fork_and_go_on(rank: int, world_size: int, root: Path) -> None:
    kept = [manager_on(root, staging_threads=2)]
    # It may still be written while the process forks.
    kept[0].save(state_of(1, 0), 1, is_async=True)

    def leave_the_block() -> None:
        with kept[0]:
            pass

    def drop() -> None:
        kept.clear()
        gc.collect()

    for act in (lambda: _refuse(kept[0]), leave_the_block, drop):
        assert _in_a_fork(act) == 0
        kept[0].wait_until_finished()
    # Nobody else may save: the lock is still the parent's.
    with manager_on(root, timeout=0.2) as other:
        told = error_of(lambda: other.save(state_of(5, 0), 5, is_async=True), StorageError)
    assert f"-{os.getpid()}-" in told
    kept[0].save(state_of(2, 0), 2, is_async=True)
    assert_loads(kept[0], 0, 2)
    kept[0].close()


def test_a_fork_that_closes_or_drops_the_manager_does_nothing_to_its_parents(
    tmp_path: Path,
) -> None:
    run_ranks(_fork_and_go_on, 1, tmp_path, init_group=False)

    assert len(checkpoints_in(tmp_path)) == 2


# Roots that are gone while a job runs.


def test_a_root_that_is_gone_before_the_first_save_of_a_start_is_an_error(tmp_path: Path) -> None:
    with manager_on(tmp_path / "root") as manager:
        manager.save(state_of(1, 0), 1)
    with manager_on(tmp_path / "root") as manager:
        assert manager.find_latest() == 1
        (tmp_path / "root").rename(tmp_path / "away")

        told = error_of(lambda: manager.save(state_of(2, 0), 2), StorageError)
        assert "was removed, emptied or unmounted" in told
        assert not (tmp_path / "root").exists()
        (tmp_path / "away").rename(tmp_path / "root")
        manager.save(state_of(2, 0), 2)
        assert_loads(manager, 0, 2)


def test_a_root_that_was_closed_while_its_lock_was_waited_for_is_free_for_the_next(
    tmp_path: Path,
) -> None:
    lock = RootLock(tmp_path, "run")
    lock.release()

    with pytest.raises(StorageError, match="its manager was closed"):
        lock.take(5.0)
    after = RootLock(tmp_path, "run")
    after.take(5.0)

    assert after.is_held
    after.release()
