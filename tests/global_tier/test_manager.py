"""What each call of the manager of global checkpoints promises, among real ranks."""

from __future__ import annotations

import logging
import logging.handlers
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from localckpt import (
    CheckpointingException,
    CorruptShardError,
    MismatchError,
    Retention,
    StorageError,
    UnsafeGlobalError,
)
from localckpt.global_tier.manager import GlobalCheckpointManager
from tests.global_tier.models import (
    MAX_S,
    Unpicklable,
    assert_loads,
    at_each_open,
    checkpoints_in,
    leftovers_in,
    loaded_by,
    manager_on,
    state_of,
)
from tests.managers.jobs import assert_same, damage, error_of
from tests.ranks import run_ranks


def scramble(state: Any) -> None:
    """Change all that can be changed in place."""
    for key, value in list(state.items()):
        if isinstance(value, dict):
            scramble(value)
        elif isinstance(value, torch.Tensor):
            value.fill_(7)
        elif isinstance(value, list):
            value.clear()
        else:
            state[key] = "changed"


# Saving behind training.


def _train_on_while_it_is_written(rank: int, world_size: int, root: Path) -> int:
    gate, committed = threading.Event(), threading.Event()
    at_each_open(".distcp", lambda: gate.wait(MAX_S))
    state = state_of(1, rank)
    with manager_on(root) as manager:
        manager.save(state, 1, on_commit=committed.set, is_async=True)
        scramble(state)
        manager.check_for_errors()
        assert checkpoints_in(root) == []
        steps, after = 0, 0
        # It is committed while training is inside of its own collectives.
        while after < 3:
            values = torch.tensor([rank + 1.0, float(committed.is_set())])
            dist.all_reduce(values)
            assert values[0] == world_size * (world_size + 1) / 2
            steps += 1
            if steps == 10:
                gate.set()
            after += int(values[1] > 0)
        manager.wait_until_finished()
        assert checkpoints_in(root) == ["iteration_00000001.0001"]
        assert_loads(manager, rank, 1)
    return steps


def test_a_save_keeps_the_values_of_the_call_and_is_written_and_committed_beside_training(
    tmp_path: Path,
) -> None:
    steps = run_ranks(_train_on_while_it_is_written, 2, tmp_path)

    assert min(steps) >= 13
    assert leftovers_in(tmp_path) == []


class Counter:
    def __init__(self, told: Callable[[], None] = lambda: None) -> None:
        self._told = told

    def state_dict(self) -> dict[str, Any]:
        self._told()
        return {"values": torch.ones(4)}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def _save_while_one_is_written(rank: int, world_size: int, root: Path) -> list[str]:
    told: list[str] = []
    # Who does not wait for the save before opens the gate, and is seen to be first.
    gate = threading.Event()
    at_each_open("__1_", lambda: gate.wait(0.3))

    def planning() -> None:
        told.append("planning 2")
        gate.set()

    with manager_on(root) as manager:
        manager.save(
            {"counter": Counter()}, 1, on_commit=lambda: told.append("committed 1"), is_async=True
        )
        manager.save({"counter": Counter(planning)}, 2, is_async=True)
    return told


def test_a_save_waits_for_the_one_before(tmp_path: Path) -> None:
    told = run_ranks(_save_while_one_is_written, 2, tmp_path)

    assert told == [["committed 1", "planning 2"], ["planning 2"]]
    assert len(checkpoints_in(tmp_path)) == 2


def _learn_of_commits(rank: int, world_size: int, root: Path) -> list[tuple[int, list[str]]]:
    calls: list[tuple[int, list[str]]] = []

    def committed() -> None:
        calls.append((rank, checkpoints_in(root)))

    def fail() -> None:
        raise RuntimeError("no room in the catalogue")

    with manager_on(root) as manager:
        manager.save(state_of(1, rank), 1, is_async=False, on_commit=committed)
        assert checkpoints_in(root) == ["iteration_00000001.0001"]
        manager.save(state_of(2, rank), 2, on_commit=fail, is_async=True)
        text = error_of(manager.wait_until_finished)
        assert "iteration 2 is committed, but on_commit failed" in text
        assert "no room in the catalogue" in text
        assert_loads(manager, rank, 2)
        manager.save(state_of(3, rank), 3, is_async=True)
        assert_loads(manager, rank, 3)
    return calls


def test_on_commit_is_called_once_on_the_first_rank_and_its_error_is_told_to_all(
    tmp_path: Path,
) -> None:
    first, second = run_ranks(_learn_of_commits, 2, tmp_path)

    assert first == [(0, ["iteration_00000001.0001"])]
    assert second == []


def _ask_for_errors(rank: int, world_size: int, root: Path) -> None:
    gate = threading.Event()
    at_each_open("__0_", lambda: gate.wait(MAX_S))
    with manager_on(root) as manager:
        bad = {f"bad {rank}": Unpicklable()} if rank == 1 else {}
        for iteration, ask in enumerate(
            [manager.wait_until_finished, lambda: manager.save(state_of(9, rank), 9, is_async=True)]
        ):
            gate.clear()
            manager.save(state_of(iteration, rank) | bad, iteration, is_async=True)
            if rank == 0:
                # Its own part is still being written.
                manager.check_for_errors()
            dist.barrier()
            gate.set()
            lost = f"could not save iteration {iteration}: rank 1: RuntimeError: this cannot be p"
            assert lost in error_of(ask)
            manager.check_for_errors()
            manager.wait_until_finished()
        gate.clear()
        manager.save(state_of(3, rank) | bad, 3, is_async=True)
        gate.set()
        # Settles, and leaves the error to whoever asks.
        assert manager.find_latest() == -1
        assert "this cannot be pickled" in error_of(manager.check_for_errors)
        manager.check_for_errors()
        manager.save(state_of(4, rank), 4, is_async=True)
        assert_loads(manager, rank, 4)


def test_each_error_is_raised_once_on_every_rank(tmp_path: Path) -> None:
    run_ranks(_ask_for_errors, 2, tmp_path)

    assert checkpoints_in(tmp_path) == ["iteration_00000004.0001"]
    assert leftovers_in(tmp_path) == []


# Which checkpoints there are.


@pytest.mark.parametrize("root", ["", "not/there"])
def test_no_checkpoint_is_found_in_an_empty_or_missing_root(root: str, tmp_path: Path) -> None:
    with manager_on(tmp_path / root) as manager:
        found = manager.find_latest()
        told = error_of(lambda: manager.load(into={}))

    assert found == -1
    assert "there is no checkpoint under" in told
    assert list(tmp_path.iterdir()) == []


def _disagree(rank: int, world_size: int, root: Path) -> None:
    with manager_on(root) as manager:
        told = error_of(
            lambda: manager.save(state_of(5, rank), 5 + rank, is_async=True), MismatchError
        )
        for one in range(world_size):
            assert f"rank {one}: plan the save of iteration {5 + one}" in told
        unlike = {"x": torch.ones(3) if rank else 5}
        error_of(lambda: manager.save(unlike, 6, is_async=True))
        dist.barrier()
        assert leftovers_in(root) == []
        dist.barrier()
        manager.save(state_of(7, rank), 7, is_async=True)
        told = error_of(lambda: manager.save(state_of(7, rank), 7, is_async=True))
        assert "iteration 7 cannot be saved after 7" in told
        assert_loads(manager, rank, 7)
        told = error_of(lambda: loaded_by(manager, rank, 7 - rank), MismatchError)
        assert 'rank 1: ["", 6]' in told
        assert_loads(manager, rank, 7)


def test_ranks_that_speak_of_different_things_are_told_leave_nothing_and_can_go_on(
    tmp_path: Path,
) -> None:
    run_ranks(_disagree, 3, tmp_path)

    assert checkpoints_in(tmp_path) == ["iteration_00000007.0001"]
    assert leftovers_in(tmp_path) == []


# Damage.


def _swap_in_from_another(folder: Path, other: Path) -> None:
    shutil.copyfile(other / "__1_0.distcp", folder / "__1_0.distcp")


# What is done to the newest checkpoint, given the one before; and the file it is done to.
DAMAGES: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "data": (lambda new, old: damage(new / "__1_0.distcp", 0.3), "__1_0.distcp"),
    "trailer": (lambda new, old: damage(new / "__0_1.distcp", 1.0), "__0_1.distcp"),
    "metadata": (lambda new, old: damage(new / ".metadata"), ".metadata"),
    "no metadata": (lambda new, old: (new / ".metadata").unlink(), ".metadata"),
    "record": (lambda new, old: damage(new / "localckpt.json"), "localckpt.json"),
    "missing": (lambda new, old: (new / "__1_0.distcp").unlink(), "__1_0.distcp"),
    "foreign": (_swap_in_from_another, "__1_0.distcp"),
}


def _load_each_that_is_damaged(
    rank: int, world_size: int, root: Path
) -> dict[str, tuple[str, str]]:
    return {name: _load_what_is_damaged(rank, root / name, name) for name in DAMAGES}


def _load_what_is_damaged(rank: int, root: Path, name: str) -> tuple[str, str]:
    said = logging.handlers.BufferingHandler(1000)
    said.setLevel(logging.ERROR)
    with manager_on(root) as manager:
        manager.save(state_of(1, rank), 1, is_async=True)
        manager.save(state_of(2, rank), 2, is_async=True)
        manager.wait_until_finished()
        if rank == 0:
            older, newer = (root / folder for folder in checkpoints_in(root))
            DAMAGES[name][0](newer, older)
        dist.barrier()
        logging.getLogger("localckpt").addHandler(said)
        found, state = loaded_by(manager, rank)
        assert found == 1
        assert_same(state, state_of(1, rank))
        told = error_of(lambda: loaded_by(manager, rank, 2), (CorruptShardError, StorageError))
        # A new attempt goes on from there, and is newer than what is damaged.
        assert loaded_by(manager, rank)[0] == 1
        manager.save(state_of(2, rank), 2, is_async=True)
        assert_loads(manager, rank, 2)
    logging.getLogger("localckpt").removeHandler(said)
    return told, "\n".join(record.getMessage() for record in said.buffer)


@pytest.mark.fault("flipped-bit", "torn-file", "wrong-place")
def test_a_damaged_checkpoint_gives_way_to_the_one_before_on_all_ranks(tmp_path: Path) -> None:
    told = run_ranks(_load_each_that_is_damaged, 2, tmp_path)

    for name, (_, file) in DAMAGES.items():
        assert all(file in of_rank[name][0] for of_rank in told), name
        assert any(file in of_rank[name][1] for of_rank in told), name


# What is refused.


class OfMine:
    def __init__(self, number: int) -> None:
        self.number = number


def test_objects_that_could_not_be_loaded_are_refused_when_they_are_saved(tmp_path: Path) -> None:
    with manager_on(tmp_path) as manager:
        told = error_of(
            lambda: manager.save({"mine": OfMine(3)}, 1, is_async=True), UnsafeGlobalError
        )
        manager.wait_until_finished()
        # Also where the plan of the save before has that key.
        manager.save({"mine": [1, 2]}, 1)
        assert error_of(lambda: manager.save({"mine": [OfMine(3)]}, 2), UnsafeGlobalError)
        assert manager.find_latest() == 1
    state: dict[str, Any] = {"mine": None}
    with manager_on(tmp_path, safe_globals=[OfMine]) as manager:
        manager.save({"mine": OfMine(3)}, 2, is_async=True)
        manager.load(into=state)

    assert "OfMine" in told
    assert state["mine"].number == 3


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"keep_last": 0}, "keep_last is 0"),
        ({"timeout": 0}, "timeout is 0"),
        ({"concurrent_bytes": 0}, "concurrent_bytes is 0"),
        ({"thread_count": 0}, "thread_count is 0"),
        ({"keep_last": 2, "retention": Retention(every=3)}, "give keep_last= or retention=, not"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    options: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointingException, match=told):
        GlobalCheckpointManager(tmp_path, **options)


def test_a_closed_manager_says_so(tmp_path: Path) -> None:
    manager = manager_on(tmp_path)
    manager.save(state_of(1, 0), 1, is_async=True)
    manager.close()
    manager.close()

    for call in (
        lambda: manager.save(state_of(2, 0), 2, is_async=True),
        lambda: loaded_by(manager, 0),
        manager.find_latest,
    ):
        assert "is closed" in error_of(call)
    assert checkpoints_in(tmp_path) == ["iteration_00000001.0001"]
