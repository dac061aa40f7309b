"""A user's own manager gives five hooks, and gets the protocol, replication and async saves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import localckpt
from localckpt import NoReplicasAvailableError
from tests.managers.jobs import (
    MAX_S,
    assert_same,
    cliques,
    error_of,
    our_children,
    our_threads,
    save,
    state_of,
)
from tests.managers.own_managers import FileManager, TroubledDictManager
from tests.ranks import run_ranks


def test_what_the_hooks_kept_comes_back_from_a_new_manager(tmp_path: Path) -> None:
    with FileManager(tmp_path, session_id="a", timeout=MAX_S) as manager:
        assert manager.find_latest() == -1
        for iteration in (1, 2, 3):
            save(manager, state_of(0, iteration), iteration)
        iterations = {ckpt_id.iteration for ckpt_id in manager._my_ckpt_ids()}
    with FileManager(tmp_path, session_id="a", timeout=MAX_S) as manager:
        assert manager.find_latest() == 3
        state, ckpt_id = manager.load()
    with FileManager(tmp_path, session_id="b", timeout=MAX_S) as manager:
        other = manager.find_latest()

    assert_same(state, state_of(0, 3))
    assert ckpt_id == (3, 0, "a")
    assert 3 in iterations
    assert 1 not in iterations
    assert other == -1


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


def test_a_state_of_the_users_own_type_comes_back_as_one() -> None:
    state = OwnState(torch.arange(3.0), torch.ones(3))
    with TroubledDictManager({}, timeout=MAX_S) as manager:
        manager.save(state, 2)
        state.weight.zero_()
        manager.find_latest()
        found, _ = manager.load()

    assert type(found) is OwnState
    assert found.name == "own"
    assert_same(found.weight, torch.arange(3.0))
    assert_same(found.moment, torch.ones(3))


def _two_ranks(rank: int, world_size: int, replicated: bool) -> None:
    repl = cliques(1, 2) if replicated else None
    options = {"session_id": "job", "repl_strategy": repl, "timeout": MAX_S}
    begin = partial(TroubledDictManager, dict[Any, Any](), **options)
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


@pytest.mark.parametrize("replicated", [False, True])
def test_two_ranks_with_hooks_replicate_fail_and_recover_together(replicated: bool) -> None:
    run_ranks(_two_ranks, 2, replicated)
