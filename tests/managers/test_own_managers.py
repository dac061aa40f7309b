"""A user's own manager gives five hooks, and gets the protocol, replication and async saves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import localckpt
from localckpt import BaseCheckpointManager, CheckpointingException, NoReplicasAvailableError
from tests.managers.jobs import (
    MAX_S,
    assert_same,
    cliques,
    error_of,
    make_manager,
    our_children,
    our_threads,
    save,
    state_of,
)
from tests.managers.own_managers import (
    DictManager,
    FileManager,
    FsspecManager,
    TroubledDictManager,
)
from tests.ranks import run_ranks

Begin = Callable[..., Any]


@pytest.fixture(params=["dict", "fsspec", "files"])
def begin(request: pytest.FixtureRequest, tmp_path: Path) -> Begin:
    """Makes managers whose shards outlive them."""
    kept: dict[Any, Any] = {}

    def make(**options: Any) -> Any:
        options = {"timeout": MAX_S} | options
        if request.param == "dict":
            return DictManager(kept, **options)
        if request.param == "fsspec":
            return FsspecManager(f"/{tmp_path}", **options)
        return FileManager(tmp_path, **options)

    return make


@pytest.fixture
def queue() -> Iterator[localckpt.AsyncCallsQueue]:
    with localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue:
        yield queue


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_what_the_hooks_kept_comes_back_from_a_new_manager(
    begin: Begin, is_async: bool, queue: localckpt.AsyncCallsQueue
) -> None:
    with begin(session_id="a") as manager:
        assert manager.find_latest() == -1
        for iteration in (1, 2, 3):
            save(manager, state_of(0, iteration), iteration, queue if is_async else None)
        iterations = {ckpt_id.iteration for ckpt_id in manager._my_ckpt_ids()}
    with begin(session_id="a") as manager:
        assert manager.find_latest() == 3
        state, ckpt_id = manager.load()
    with begin(session_id="b") as manager:
        other = manager.find_latest()

    assert_same(state, state_of(0, 3))
    assert ckpt_id == (3, 0, "a")
    assert 3 in iterations
    assert 1 not in iterations
    assert other == -1


def test_the_hooks_are_given_a_state_of_their_own(
    begin: Begin, queue: localckpt.AsyncCallsQueue
) -> None:
    state = state_of(0, 1)
    with begin() as manager:
        request = manager.save(state, 1, is_async=True)
        state["model"]["weight"].zero_()
        state["optimizer"]["step"].fill_(99)
        state["losses"][1].clear()
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)
        manager.find_latest()
        found, _ = manager.load()

    assert_same(found, state_of(0, 1))


def test_load_knows_its_options_whatever_the_hooks_keep(begin: Begin) -> None:
    with begin() as manager:
        manager.save(state_of(0, 2), 2)
        manager.find_latest()
        mine = state_of(0, 1)
        place = mine["model"]["weight"].data_ptr()
        filled, _ = manager.load(into=mine)
        moved, _ = manager.load(map_location="meta")
        other = state_of(0, 1) | {"more": torch.ones(1)}
        refused = error_of(lambda: manager.load(into=other), localckpt.MismatchError)

    assert_same(filled, state_of(0, 2))
    assert filled["model"]["weight"].data_ptr() == place
    assert moved["model"]["weight"].device.type == "meta"
    assert "more" in refused


def test_a_tensor_aware_state_reaches_the_hooks_and_comes_back_as_one(begin: Begin) -> None:
    with begin() as manager:
        manager.save(localckpt.BasicTensorAwareStateDict(state_of(0, 2)), 2)
        manager.find_latest()
        found, _ = manager.load()

    assert type(found) is localckpt.BasicTensorAwareStateDict
    assert_same(found.state_dict, state_of(0, 2))


class OwnState(localckpt.TensorAwareStateDict):
    """A user's own state: two tensors, one of which may be absent."""

    def __init__(self, weight: torch.Tensor, moment: torch.Tensor) -> None:
        self.weight: torch.Tensor | None = weight
        self.moment: torch.Tensor | None = moment
        self.name = "own"

    def pop_tensors(self) -> list[torch.Tensor]:
        tensors = list(self.tensors)
        self.weight = self.moment = None
        return tensors

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        assert self.weight is not None
        assert self.moment is not None
        return iter((self.weight, self.moment))

    @property
    def is_hollow(self) -> bool:
        return self.weight is None

    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        self.weight, self.moment = tensor_data

    def init_tensors(self) -> None:
        self.insert_tensors([torch.empty(3), torch.empty(3)])

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        self.insert_tensors([t.to("cpu", non_blocking=non_blocking) for t in self.tensors])

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        return


def test_a_state_of_the_users_own_type_comes_back_as_one(begin: Begin) -> None:
    state = OwnState(torch.arange(3.0), torch.ones(3))
    with begin() as manager:
        manager.save(state, 2)
        state.weight.zero_()
        manager.find_latest()
        found, _ = manager.load()

    assert type(found) is OwnState
    assert found.name == "own"
    assert_same(found.weight, torch.arange(3.0))
    assert_same(found.moment, torch.ones(3))


class LazyState(localckpt.TensorAwareStateDict):
    """Does nothing of what the interface says."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("nobody should ask for this")

    pop_tensors = insert_tensors = init_tensors = _refuse
    copy_tensors_to_cpu = restore_tensor_device = _refuse
    tensors = is_hollow = property(_refuse)


def test_the_built_in_managers_need_none_of_a_states_methods(tmp_path: Path) -> None:
    with make_manager("disk", tmp_path) as manager:
        manager.save(LazyState(torch.arange(5)), 1)
        manager.find_latest()
        found, _ = manager.load()

    assert type(found) is LazyState
    assert_same(found.weight, torch.arange(5))


def test_a_session_that_the_hooks_do_not_know_is_not_found(begin: Begin) -> None:
    with begin(session_id="a") as manager:
        manager.save(state_of(0, 1), 1)
    with begin(session_id="b") as manager:
        assert manager.find_latest() == -1
        error_of(manager.load, NoReplicasAvailableError)
        manager.save(state_of(0, 5), 5)
        assert manager.find_latest() == 5


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("trouble", ["raises", "does nothing"])
def test_a_hook_that_fails_is_an_error_and_the_next_save_is_good(
    trouble: str, is_async: bool, queue: localckpt.AsyncCallsQueue
) -> None:
    kept: dict[Any, Any] = {}
    with TroubledDictManager(kept, timeout=MAX_S) as manager:
        manager.save(state_of(0, 1), 1)
        manager.trouble = trouble
        told = error_of(lambda: save(manager, state_of(0, 2), 2, queue if is_async else None))
        manager.trouble = None
        assert {ckpt_id.iteration for ckpt_id in kept} == {1}
        assert manager.find_latest() == 1
        assert_same(manager.load()[0], state_of(0, 1))
        save(manager, state_of(0, 2), 2, queue if is_async else None)
        assert manager.find_latest() == 2

    assert "rank 0" in told
    assert ("no place for it" in told) == (trouble == "raises")


def _two_ranks(rank: int, world_size: int, kind: str, folder: Path, replicated: bool) -> None:
    kept: dict[Any, Any] = {}
    repl = cliques(1, 2) if replicated else None
    options = {"session_id": "job", "repl_strategy": repl, "timeout": MAX_S}

    def begin() -> BaseCheckpointManager:
        if kind == "dict":
            return TroubledDictManager(kept, **options)
        if kind == "fsspec":
            return FsspecManager("/two ranks", **options)
        return FileManager(folder, **options)

    with localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue:
        with begin() as manager:
            assert manager.find_latest() == -1
            save(manager, state_of(rank, 1), 1)
            save(manager, state_of(rank, 2), 2, queue)
            owners = {i.rank for i in manager._my_ckpt_ids() if i.iteration == 2}
            assert owners == ({0, 1} if replicated else {rank})
        with begin() as manager:
            assert manager.find_latest() == 2
            assert_same(manager.load()[0], state_of(rank, 2))
            assert manager.last_load.source == "own node"
            if kind == "dict":
                _fail_on_one_rank(rank, manager, queue, replicated)
        with begin() as manager:
            # Rank 1 comes back with nothing.
            if rank == 1:
                manager._cleanup_failed_save(2)
                manager._cleanup_failed_save(1)
            if replicated:
                assert manager.find_latest() == 2
                assert_same(manager.load()[0], state_of(rank, 2))
                assert manager.last_load.source == ("own node", "peer rank 0")[rank]
            else:
                assert manager.find_latest() == -1
                assert "ranks 1" in error_of(manager.load, NoReplicasAvailableError)
            save(manager, state_of(rank, 3), 3, queue)
            assert manager.find_latest() == 3
            assert_same(manager.load()[0], state_of(rank, 3))
    if repl:
        repl.close()
    assert our_threads() == []
    assert our_children() == []


def _fail_on_one_rank(rank: int, manager: Any, queue: Any, replicated: bool) -> None:
    troubles = ["raises", "does nothing", *(["raises for the replica"] if replicated else [])]
    for trouble in troubles:
        for how in (None, queue):
            manager.trouble = trouble if rank == 1 else None
            told = error_of(lambda h=how: save(manager, state_of(rank, 5), 5, h))
            assert "rank 1" in told
            assert 5 not in {ckpt_id.iteration for ckpt_id in manager.kept}
    manager.trouble = None
    unpicklable = {"hook": lambda: None} if rank == 0 else {}
    told = error_of(lambda: manager.save(state_of(rank, 5) | unpicklable, 5))
    assert "rank 0" in told
    assert "pickled" in told
    assert manager.find_latest() == 2


@pytest.mark.parametrize(
    ("kind", "replicated"),
    [
        ("dict", False),
        ("dict", True),
        ("fsspec", True),
        ("files", True),
        pytest.param("files", False, marks=pytest.mark.long),
    ],
)
def test_two_ranks_with_hooks_replicate_fail_and_recover_together(
    kind: str, replicated: bool, tmp_path: Path
) -> None:
    run_ranks(_two_ranks, 2, kind, tmp_path, replicated)


def test_every_hook_must_be_there() -> None:
    hooks = ("_my_ckpt_ids", "_load", "_save", "_cleanup", "_cleanup_failed_save")

    assert BaseCheckpointManager.__abstractmethods__ == set(hooks)
    with pytest.raises(TypeError, match="abstract"):
        BaseCheckpointManager()  # type: ignore[abstract]
    assert issubclass(NoReplicasAvailableError, CheckpointingException)
