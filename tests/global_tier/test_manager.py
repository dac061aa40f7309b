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
)
from localckpt.global_tier.folders import CommitRecord
from localckpt.global_tier.manager import GlobalCheckpointManager
from localckpt.global_tier.places import FilePlace
from localckpt.lineage import Lineage, Point
from localckpt.state_dict.source import read_header
from localckpt.storage.files import FileSource
from tests.global_tier.models import (
    MAX_S,
    assert_loads,
    at_each_open,
    checkpoints_in,
    leftovers_in,
    loaded_by,
    manager_on,
    save_numbers,
    state_of,
)
from tests.global_tier.states import blank
from tests.managers.jobs import assert_same, damage, error_of, make_manager
from tests.ranks import node_store, run_ranks


def _change_in_place(state: Any) -> None:
    for key, value in list(state.items()):
        if isinstance(value, dict):
            _change_in_place(value)
        elif isinstance(value, torch.Tensor):
            value.fill_(7)
        elif isinstance(value, list):
            value.clear()
        else:
            state[key] = "changed"


def _train_on_while_it_is_written(rank: int, world_size: int, root: Path) -> int:
    gate, committed = threading.Event(), threading.Event()
    at_each_open(".distcp", lambda: gate.wait(MAX_S))
    state = state_of(1, rank)
    with manager_on(root) as manager:
        manager.save(state, 1, on_commit=committed.set, is_async=True)
        _change_in_place(state)
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


def test_no_checkpoint_is_found_in_an_empty_or_missing_root(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "not" / "there"):
        with manager_on(root) as manager:
            assert manager.find_latest() == -1
            assert "there is no checkpoint under" in error_of(lambda: manager.load(into={}))
        assert list(tmp_path.iterdir()) == []


# What is done to the newest checkpoint, given the one before; and the file it is done to.
DAMAGES: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "data": (lambda new, old: damage(new / "__1_0.distcp", 0.3), "__1_0.distcp"),
    "trailer": (lambda new, old: damage(new / "__0_1.distcp", 1.0), "__0_1.distcp"),
    "metadata": (lambda new, old: damage(new / ".metadata"), ".metadata"),
    "no metadata": (lambda new, old: (new / ".metadata").unlink(), ".metadata"),
    "record": (lambda new, old: damage(new / "localckpt.json"), "localckpt.json"),
    "missing": (lambda new, old: (new / "__1_0.distcp").unlink(), "__1_0.distcp"),
    "foreign": (lambda new, old: shutil.copy(old / "__1_0.distcp", new), "__1_0.distcp"),
}


def _load_each_that_is_damaged(rank: int, _: int, root: Path) -> dict[str, tuple[str, str]]:
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


def test_options_that_mean_nothing_and_calls_of_a_closed_manager_are_refused(
    tmp_path: Path,
) -> None:
    for name in ("keep_last", "timeout", "concurrent_bytes", "thread_count"):
        with pytest.raises(CheckpointingException, match=f"{name} is 0"):
            GlobalCheckpointManager(tmp_path, **{name: 0})
    with pytest.raises(CheckpointingException, match="give keep_last= or retention=, not"):
        GlobalCheckpointManager(tmp_path, keep_last=2, retention=Retention(every=3))
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


def test_a_partial_load_never_mixes_two_checkpoints(tmp_path: Path) -> None:
    with manager_on(tmp_path, thread_count=1) as manager:
        manager.save({"b": torch.ones(9)}, 1, is_async=False)
        manager.save({"a": torch.ones(1 << 20), "b": torch.ones(9)}, 2, is_async=False)
        # In the tail of "b", which comes last.
        file = tmp_path / "iteration_00000002.0001" / "__0_0.distcp"
        damage(file, 1 - 600 / file.stat().st_size)

        with pytest.raises(CorruptShardError):
            manager.load(into={"b": torch.zeros(9)}, partial=True)

        with pytest.raises(MismatchError, match="1 values that the state has not: a"):
            manager.load(into={"b": torch.zeros(9)})
        assert manager.load(into={"b": torch.zeros(9)}, iteration=1)[1].iteration == 1


def test_a_copy_under_another_name_and_one_that_lacks_a_file_are_not_found(tmp_path: Path) -> None:
    with manager_on(tmp_path) as manager:
        save_numbers(manager, 1, 2)
        shutil.copytree(tmp_path / "iteration_00000001.0001", tmp_path / "iteration_00000900.0001")
        min((tmp_path / "iteration_00000002.0001").glob("*.distcp")).unlink()

        assert manager.find_latest() == 1
        with pytest.raises(CorruptShardError, match="give it its name again"):
            manager.load(into={"w": torch.zeros(9)}, iteration=900)


def test_tied_tensors_are_loaded_if_one_value_was_saved_of_them(tmp_path: Path) -> None:
    tied, whole = torch.zeros(3), torch.zeros(5)
    with manager_on(tmp_path) as manager:
        manager.save({"a": torch.ones(3), "b": torch.ones(3)}, 1)
        manager.save({"a": torch.ones(3), "b": torch.full((3,), 2.0)}, 2)
        manager.save({"a": torch.ones(5), "b": torch.full((3,), 2.0)}, 3)

        for iteration, state in ((2, {"a": tied, "b": tied}), (3, {"a": whole, "b": whole[1:4]})):
            with pytest.raises(MismatchError, match="a and b share memory now"):
                manager.load(into=state, iteration=iteration)
        assert not tied.any()
        assert not whole.any()
        manager.load(into={"a": tied, "b": tied}, iteration=1)

    assert torch.equal(tied, torch.ones(3))


def test_a_lock_that_cannot_be_taken_is_an_error_and_nothing_is_saved_without_it(
    tmp_path: Path,
) -> None:
    (tmp_path / ".localckpt.lock").mkdir()

    with (
        manager_on(tmp_path) as manager,
        pytest.raises(CheckpointingException, match="could not lock"),
    ):
        save_numbers(manager, 1)

    assert checkpoints_in(tmp_path) == []


def test_a_manager_that_is_called_by_its_own_on_commit_says_so_at_once(tmp_path: Path) -> None:
    with manager_on(tmp_path) as manager:
        manager.save(
            {"w": torch.ones(3)}, 1, on_commit=lambda: print(manager.find_latest()), is_async=True
        )

        with pytest.raises(CheckpointingException, match="on_commit called the manager"):
            manager.wait_until_finished()

        assert manager.find_latest() == 1


def _recorded(root: Path, iteration: int) -> Lineage:
    (folder,) = root.glob(f"iteration_{iteration:08d}.*")
    record = CommitRecord.read(FilePlace(folder, "localckpt.json"))
    assert record is not None
    assert record.lineage is not None
    return record.lineage


def _kept(rank: int, iteration: int) -> Lineage:
    (path,) = node_store().rglob(f"{iteration:012d}.{rank}.*.safetensors")
    source = FileSource(path)
    try:
        identity = read_header(source).identity
    finally:
        source.close()
    assert identity.lineage is not None
    assert identity.lineage.epoch == identity.generation.epoch_id
    return identity.lineage


def _go_on(rank: int, world_size: int, root: Path) -> None:
    def local(keep_last: int = 9) -> Any:
        return make_manager("disk", node_store(), "job", keep_last=keep_last)

    # The first job saves to both.
    with local() as nodes, manager_on(root, local=nodes) as shared:
        shared.save(state_of(1, rank), 1, is_async=False)
        nodes.save({"iteration": 2}, 2)
        nodes.save({"iteration": 9}, 9)
    first = _kept(rank, 2)
    assert _recorded(root, 1) == first == Lineage(first.epoch)

    # The second goes back to shared storage, and saves to both.
    with local() as nodes, manager_on(root, local=nodes) as shared:
        assert nodes.find_latest() == 9
        assert shared.load(into=blank(state_of(1, rank)))[1].iteration == 1
        nodes.save({"iteration": 3}, 3)
        shared.save(state_of(4, rank), 4, is_async=False)
    second = _kept(rank, 3)
    assert (second.origin, second.resumed_at) == ("shared", 1)
    assert second.ancestors == (Point(first.epoch, 1),)
    assert second.given_up == (Point(first.epoch, 9),)
    assert _recorded(root, 4) == second

    # The third goes on from the nodes.
    with local() as nodes, manager_on(root, local=nodes) as shared:
        assert nodes.find_latest() == 3
        nodes.load()
        shared.save(state_of(5, rank), 5, is_async=False)
    third = _recorded(root, 5)
    assert (third.origin, third.resumed_at) == ("local", 3)
    assert third.ancestors == (Point(second.epoch, 3), Point(first.epoch, 1))

    # The fourth knows shared storage alone.
    with manager_on(root) as shared:
        assert shared.load(into=blank(state_of(5, rank)))[1].iteration == 5
        shared.save(state_of(6, rank), 6, is_async=False)
        shared.save(state_of(7, rank), 7, is_async=False)
    fourth = _recorded(root, 6)
    assert (fourth.origin, fourth.ancestors[0]) == ("shared", Point(third.epoch, 5))
    assert _recorded(root, 7) == fourth
    assert len({first.epoch, second.epoch, third.epoch, fourth.epoch}) == 4


def test_what_one_tier_loads_the_other_descends_from(tmp_path: Path, node_dirs: Any) -> None:
    run_ranks(_go_on, 2, tmp_path / "shared", store_per_node=node_dirs(2))
