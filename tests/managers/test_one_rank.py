"""A job of one rank, without torch.distributed: everything but the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import torch

import localckpt
from localckpt import CheckpointingException, NoReplicasAvailableError, StorageError
from tests.managers.jobs import (
    KINDS,
    assert_same,
    error_of,
    files,
    iterations_on,
    make_manager,
    our_children,
    our_threads,
    resume,
    save,
    state_of,
)

WAYS = ("sync", "thread")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def root(
    kind: str,
    node_dirs: Callable[[int], list[Path]],
    shm_roots: Callable[[int], list[Path]],
) -> Path:
    return (node_dirs if kind == "disk" else shm_roots)(1)[0]


@pytest.fixture
def queue() -> Iterator[localckpt.AsyncCallsQueue]:
    with localckpt.AsyncCallsQueue(timeout_s=20.0) as queue:
        yield queue


@pytest.mark.parametrize("way", WAYS)
def test_what_was_saved_comes_back_in_the_next_process_life(
    kind: str, root: Path, way: str, queue: localckpt.AsyncCallsQueue
) -> None:
    with make_manager(kind, root) as manager:
        assert manager.find_latest() == -1
        for iteration in (0, 3):
            save(manager, state_of(0, iteration), iteration, None if way == "sync" else queue)
        report = manager.last_save
    with make_manager(kind, root) as manager:
        source = resume(manager, 0, 3)
        loaded = manager.last_load

    assert source == "own node"
    assert (report.iteration, loaded.iteration) == (3, 3)
    assert report.nbytes == loaded.nbytes == (root / files(root)[-1]).stat().st_size
    assert 0 <= report.stage_s <= report.stall_s <= report.durable_s
    assert loaded.seconds > 0
    with pytest.raises(FrozenInstanceError):
        report.iteration = 4


def test_a_save_is_durable_only_once_its_request_was_carried_out(
    kind: str, root: Path, queue: localckpt.AsyncCallsQueue
) -> None:
    with make_manager(kind, root) as manager:
        request = manager.save(state_of(0, 1), 1, is_async=True)
        before, files_before = manager.last_save, files(root)

        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)

        assert isinstance(request, localckpt.AsyncRequest)
        assert (before.iteration, before.durable_s) == (1, None)
        assert before.nbytes > 0
        assert not [name for name in files_before if name.endswith(".safetensors")]
        assert manager.last_save.durable_s >= manager.last_save.stall_s > 0
        assert manager.find_latest() == 1


def test_saves_behind_training_can_overlap(
    kind: str, root: Path, queue: localckpt.AsyncCallsQueue
) -> None:
    with make_manager(kind, root, keep_last=5) as manager:
        for iteration in range(5):
            queue.schedule_async_request(
                manager.save(state_of(0, iteration), iteration, is_async=True)
            )
        queue.maybe_finalize_async_calls(blocking=True)

        resume(manager, 0, 4)
        assert iterations_on(root) == {0, 1, 2, 3, 4}


def test_a_plain_dict_comes_back_plain(kind: str, root: Path) -> None:
    with make_manager(kind, root) as manager:
        manager.save({"a": torch.arange(3), 5: [torch.ones(2), "x"]}, 0)
        manager.find_latest()
        found, _ = manager.load()

    assert_same(found, {"a": torch.arange(3), 5: [torch.ones(2), "x"]})


def test_a_tensor_aware_state_comes_back_as_one(kind: str, root: Path) -> None:
    state = localckpt.BasicTensorAwareStateDict(state_of(0, 1))
    with make_manager(kind, root) as manager:
        manager.save(state, 1)
        manager.find_latest()
        found, _ = manager.load()

    assert type(found) is localckpt.BasicTensorAwareStateDict
    assert not found.is_hollow
    assert not state.is_hollow
    assert_same(found.state_dict, state_of(0, 1))
    assert_same(state.state_dict, state_of(0, 1))


def test_a_class_of_the_users_own_needs_to_be_allowed(kind: str, root: Path) -> None:
    state = {"own": OwnValue(3), "tensor": torch.ones(2)}
    with make_manager(kind, root) as manager:
        refused = error_of(lambda: manager.save(state, 1))
        assert files(root) == []
        assert manager.find_latest() == -1
    with make_manager(kind, root, safe_globals=[OwnValue]) as manager:
        manager.save(state, 1)
        manager.find_latest()
        found, _ = manager.load()
    with make_manager(kind, root) as manager:
        manager.find_latest()
        not_loaded = error_of(manager.load, localckpt.UnsafeGlobalError)

    assert found["own"] == OwnValue(3)
    assert "OwnValue" in refused
    assert "safe_globals" in refused
    assert "OwnValue" in not_loaded


class OwnValue:
    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OwnValue) and other.number == self.number

    __hash__ = None  # type: ignore[assignment]


def test_load_fills_the_tensors_that_are_given(kind: str, root: Path) -> None:
    with make_manager(kind, root) as manager:
        manager.save(state_of(0, 2), 2)
        manager.find_latest()
        mine = state_of(0, 1)
        tensors = [mine["model"]["weight"], mine["model"]["bias"], mine["optimizer"]["step"]]
        places = [tensor.data_ptr() for tensor in tensors]

        found, ckpt_id = manager.load(into=mine)

        assert ckpt_id.iteration == 2
        assert_same(found, state_of(0, 2))
        assert [t.data_ptr() for t in tensors] == places
        assert found["model"]["weight"] is mine["model"]["weight"]
        assert_same(mine["model"], state_of(0, 2)["model"])


def test_load_into_another_structure_is_refused_and_changes_nothing(kind: str, root: Path) -> None:
    with make_manager(kind, root) as manager:
        manager.save(state_of(0, 2), 2)
        manager.find_latest()
        other = state_of(0, 1)
        other["model"]["weight"] = torch.zeros(7)

        refused = error_of(lambda: manager.load(into=other), localckpt.MismatchError)

        assert "weight" in refused
        assert_same(other["model"]["bias"], state_of(0, 1)["model"]["bias"])
        assert_same(other["model"]["weight"], torch.zeros(7))
        assert [name.endswith(".safetensors") for name in files(root)] == [True]
        resume(manager, 0, 2)


def test_load_puts_tensors_on_the_device_that_it_is_given(kind: str, root: Path) -> None:
    with make_manager(kind, root) as manager:
        manager.save(state_of(0, 2), 2)
        manager.find_latest()
        found, _ = manager.load(map_location="meta")
        devices = {found["model"]["weight"].device.type, found["model"]["bias"].device.type}
        at_home, _ = manager.load(map_location=torch.device("cpu"))

    assert devices == {"meta"}
    assert_same(at_home, state_of(0, 2))


@pytest.mark.parametrize("keep_last", [1, 2, 3])
def test_as_many_checkpoints_as_asked_for_are_kept(kind: str, root: Path, keep_last: int) -> None:
    with make_manager(kind, root, keep_last=keep_last) as manager:
        for iteration in range(5):
            manager.save(state_of(0, iteration), iteration)
            assert iterations_on(root) == set(range(iteration + 1)[-keep_last:])
        resume(manager, 0, 4)
        in_use = [name for name in files(root) if not name.endswith(".recycled")]
        recycled = len(files(root)) - len(in_use)

        # One file more than is kept: the one that the next save writes into.
        assert (len(in_use), recycled) == (keep_last, 1)
    assert files(root) == in_use


def test_files_of_retired_checkpoints_are_written_into_again(kind: str, root: Path) -> None:
    seen = []
    with make_manager(kind, root, keep_last=1) as manager:
        for iteration in range(6):
            manager.save(state_of(0, iteration, 4000 + 900 * (iteration % 3)), iteration)
            seen.append({path.stat().st_ino for path in root.rglob("*.s*")})
            manager.find_latest()
            found, _ = manager.load()
            assert_same(found, state_of(0, iteration, 4000 + 900 * (iteration % 3)))

    assert len(set().union(*seen)) == 2
    assert all(len(inodes) <= 2 for inodes in seen)


def test_what_is_kept_counts_the_checkpoints_of_earlier_process_lives(
    kind: str, root: Path
) -> None:
    with make_manager(kind, root, keep_last=2) as manager:
        manager.save(state_of(0, 1), 1)
        manager.save(state_of(0, 2), 2)
    with make_manager(kind, root, keep_last=2) as manager:
        assert manager.find_latest() == 2
        assert iterations_on(root) == {1, 2}
        manager.load()
        manager.save(state_of(0, 3), 3)
        assert iterations_on(root) == {2, 3}


def test_a_manager_that_never_looked_still_keeps_no_more_than_it_should(
    kind: str, root: Path
) -> None:
    with make_manager(kind, root, keep_last=2) as manager:
        manager.save(state_of(0, 1), 1)
        manager.save(state_of(0, 2), 2)
    with make_manager(kind, root, keep_last=2) as manager:
        manager.save(state_of(0, 3), 3)
        manager.save(state_of(0, 4), 4)
        assert iterations_on(root) == {3, 4}


def test_find_latest_is_kept_until_a_save_or_until_it_is_reset(kind: str, root: Path) -> None:
    with make_manager(kind, root) as manager:
        manager.save(state_of(0, 7), 7)
        assert manager.find_latest() == 7
        for path in root.rglob("*.safetensors"):
            path.unlink()

        assert manager.find_latest() == 7
        manager.latest_iteration = -1
        assert manager.find_latest() == -1
        manager.save(state_of(0, 8), 8)
        assert manager.find_latest() == 8


@pytest.mark.parametrize("iteration", [-1, True, False, 1.0, "3", None])
def test_an_iteration_that_is_none_is_refused(kind: str, root: Path, iteration: Any) -> None:
    with make_manager(kind, root) as manager:
        refused = error_of(lambda: manager.save(state_of(0, 1), iteration))

        assert repr(iteration) in refused
        assert files(root) == []
        assert manager.last_save is None


@pytest.mark.parametrize("is_async", [False, True])
def test_an_iteration_must_be_above_the_last_one_saved_or_loaded(
    kind: str, root: Path, is_async: bool
) -> None:
    with make_manager(kind, root, keep_last=3) as manager:
        manager.save(state_of(0, 5), 5)
        for iteration in (5, 4, 0):
            refused = error_of(lambda i=iteration: manager.save(state_of(0, i), i, is_async))
            assert f"iteration {iteration}" in refused
            assert "iteration 5" in refused
        assert manager.last_save.iteration == 5
        resume(manager, 0, 5)
        assert iterations_on(root) == {5}
    with make_manager(kind, root, keep_last=3) as manager:
        resume(manager, 0, 5)
        error_of(lambda: manager.save(state_of(0, 5), 5, is_async))
        # Refusing it has not made anybody look again.
        assert manager.latest_iteration == 5
        manager.load()
        manager.save(state_of(0, 6), 6)
        resume(manager, 0, 6)


def test_load_looks_for_the_latest_by_itself(kind: str, root: Path) -> None:
    with make_manager(kind, root) as manager:
        assert "no complete checkpoint" in error_of(manager.load)
        for iteration in (1, 2):
            manager.save(state_of(0, iteration), iteration)
            assert_same(manager.load()[0], state_of(0, iteration))
            assert manager.find_latest() == iteration


def test_what_was_found_while_a_save_was_under_way_is_looked_for_again(
    kind: str, root: Path
) -> None:
    with make_manager(kind, root, keep_last=2) as manager, localckpt.AsyncCallsQueue() as queue:
        manager.save(state_of(0, 1), 1)
        manager.save(state_of(0, 2), 2)
        request = manager.save(state_of(0, 3), 3, is_async=True)
        before = manager.find_latest()
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)

        assert (before, manager.find_latest()) == (2, 3)
        resume(manager, 0, 3)

    assert len(files(root)) == 2


def test_load_says_so_when_there_is_nothing(kind: str, root: Path) -> None:
    with make_manager(kind, root) as manager:
        assert manager.find_latest() == -1
        nothing = error_of(manager.load, NoReplicasAvailableError)
        # It is an answer, not a failure: the job begins anew.
        manager.save(state_of(0, 0), 0)
        resume(manager, 0, 0)

    assert "no shard" in nothing


@pytest.mark.fault("hostile-file")
@pytest.mark.parametrize("session_id", ["", "run1", "a/../../b", "..", ".", "ü ñ %2F", "x" * 80])
def test_any_text_can_name_a_session_and_stays_inside_the_directory(
    kind: str, root: Path, session_id: str
) -> None:
    root = root / "store"
    with make_manager(kind, root, session_id) as manager:
        manager.save(state_of(0, 1), 1)
    with make_manager(kind, root, session_id) as manager:
        resume(manager, 0, 1)

    assert len(files(root)) == 1
    assert list(root.parent.iterdir()) == [root]


def test_a_session_name_that_is_too_long_is_a_storage_error(kind: str, root: Path) -> None:
    refused = error_of(lambda: make_manager(kind, root, "x" * 300), StorageError)

    assert "session_id" in refused


@pytest.mark.fault("two-jobs")
def test_two_sessions_share_a_directory_and_nothing_else(kind: str, root: Path) -> None:
    with make_manager(kind, root, "a", keep_last=1) as a, make_manager(kind, root, "b") as b:
        a.save(state_of(0, 1), 1)
        b.save(state_of(0, 10), 10)
        a.save(state_of(0, 2), 2)
        a.save(state_of(0, 3), 3)

        resume(a, 0, 3)
        resume(b, 0, 10)
    with make_manager(kind, root, "c") as other:
        assert other.find_latest() == -1


@pytest.mark.fault("two-jobs")
def test_one_session_has_one_owner_at_a_time(kind: str, root: Path) -> None:
    from tests.ranks import start_ranks

    with start_ranks(hold_a_store, 1, kind, root, init_group=False) as group:
        group.await_announced("holding")
        refused = error_of(lambda: make_manager(kind, root, "taken", timeout=0.5), StorageError)
        with make_manager(kind, root, "free") as manager:
            manager.save(state_of(0, 1), 1)
        pid = group.pids[0]
        group.announce("let go")
        group.join()
    with make_manager(kind, root, "taken") as manager:
        resume(manager, 0, 1)

    assert str(pid) in refused
    assert "session_id" in refused


def hold_a_store(rank: int, world_size: int, kind: str, root: Path) -> None:
    from tests.ranks import announce, await_announced

    with make_manager(kind, root, "taken") as manager:
        manager.save(state_of(0, 1), 1)
        announce("holding")
        await_announced("let go")


def test_options_that_make_no_sense_are_refused(kind: str, root: Path) -> None:
    for options, named in (
        ({"keep_last": 0}, "keep_last"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": -1.0}, "timeout"),
    ):
        assert named in error_of(lambda o=options: make_manager(kind, root, **o))
    assert list(root.iterdir()) == []


def test_leaving_the_context_closes_the_manager(kind: str, root: Path) -> None:
    # Threads and processes of other tests' ranks are not of this process.
    before = our_threads(), our_children()
    manager = make_manager(kind, root, keep_last=1)

    def leave_by_an_error() -> None:
        with manager:
            for iteration in range(3):
                manager.save(state_of(0, iteration), iteration)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        leave_by_an_error()
    manager.close()

    assert len(files(root)) == 1
    assert (our_threads(), our_children()) == before


def test_the_memory_is_logged_once_and_a_save_and_a_load_are_one_line_each(
    kind: str, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "localckpt")
    with make_manager(kind, root) as manager:
        manager.save(state_of(0, 1), 1)
        resume(manager, 0, 1)
        manager.save(state_of(0, 2), 2)

    infos = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    room, saved, loaded, _ = infos
    assert "MB more memory" in room
    assert "MB are left" in room
    assert f"saved iteration 1: {manager.last_load.nbytes} bytes" in saved
    assert f"loaded iteration 1 from own node: {manager.last_load.nbytes} bytes" in loaded
    assert "GB/s" in saved
    assert "GB/s" in loaded


@pytest.mark.fault("unusable-store")
def test_a_root_that_cannot_be_used_is_a_storage_error_with_the_path(kind: str, root: Path) -> None:
    in_the_way = root / "file"
    in_the_way.write_text("")

    refused = error_of(lambda: make_manager(kind, in_the_way / "store"), StorageError)

    assert str(in_the_way) in refused
    assert CheckpointingException in StorageError.__mro__


def test_a_request_that_is_frozen_twice_is_written_once(tmp_path: Path) -> None:
    with localckpt.LocalCheckpointManager(tmp_path) as manager:
        request = manager.save({"a": torch.ones(3)}, 1, is_async=True)

        first, second = request.freeze(), request.freeze()

        assert first.async_fn is not None
        assert first.async_fn is second.async_fn
        first.async_fn()
        for finalize in first.finalize_fns:
            finalize()
        assert manager.find_latest() == 1


def test_a_long_load_logs_its_progress(
    kind: str, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    state = {"w": torch.zeros(3 << 20)}
    with make_manager(kind, root) as manager:
        manager.save(state, 1)
        assert manager.find_latest() == 1
        manager.load()
        quick = list(caplog.messages)
        # No load of a test takes ten seconds.
        monkeypatch.setattr("localckpt.state_dict.source._EVERY_S", 0.0)
        manager.load(into=state)

    assert not [text for text in quick if text.startswith("reading")]
    lines = [text for text in caplog.messages if text.startswith("reading")]
    assert lines
    assert all(" of 0.0 GB after " in text and "iteration 1" in text for text in lines)
