"""Who may save where: sessions and jobs that share a root, what they leave, what forks may do."""

from __future__ import annotations

from pathlib import Path

import pytest

from localckpt import StorageError
from localckpt.global_tier.root import RootLock
from tests.global_tier.models import assert_loads, checkpoints_in, manager_on, state_of
from tests.global_tier.states import blank
from tests.managers.jobs import assert_same, error_of
from tests.ranks import announce, await_announced, start_ranks


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
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        # Long enough for a busy machine's storage to answer.
        second = manager_on(tmp_path, timeout=3.0)
        expected = state_of(1, 0) | state_of(1, 1)
        found = blank(expected)
        second.load(into=found)
        assert_same(found, expected)

        told = error_of(lambda: second.save(state_of(2, 0), 2, is_async=True), StorageError)

        assert f"-{first.pids[0]}-" in told
        assert f"another job saves into {tmp_path}" in told
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
        first.announce("close")
        for rank in range(2):
            first.await_announced(f"closed {rank}")
        second.save(state_of(2, 0), 2, is_async=True)
        second.close()
        first.announce("end")
        first.join()
    assert checkpoints_in(tmp_path) == ["iteration_00000001.0001", "iteration_00000002.0002"]


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
