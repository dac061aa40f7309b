"""One call into a manager at a time, whoever makes it; and what a call accepts and asks."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import localckpt
from localckpt import CheckpointingException, PeerLostError
from tests.managers.jobs import (
    KINDS,
    MAX_S,
    assert_same,
    error_of,
    make_manager,
    resume,
    state_of,
)
from tests.ranks import announce, await_announced, node_store, run_ranks

Dirs = Callable[[int], list[Path]]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def root(kind: str, node_dirs: Dirs, shm_roots: Dirs) -> Path:
    return (node_dirs if kind == "disk" else shm_roots)(1)[0]


@contextmanager
def _saving(manager: Any, iteration: int) -> Iterator[None]:
    """Inside, another thread is in the middle of a save."""
    began, go_on = threading.Event(), threading.Event()
    keep = manager.store.commit

    def held_up(*args: Any) -> None:
        began.set()
        assert go_on.wait(MAX_S)
        keep(*args)

    manager.store.commit = held_up
    saving = threading.Thread(target=manager.save, args=(state_of(0, iteration), iteration))
    saving.start()
    try:
        assert began.wait(MAX_S)
        yield
    finally:
        go_on.set()
        saving.join(MAX_S)
        manager.store.commit = keep


def test_a_call_at_once_with_a_save_is_an_error_and_the_save_is_not_disturbed(
    kind: str, root: Path
) -> None:
    with make_manager(kind, root) as manager:
        manager.save(state_of(0, 1), 1)
        assert manager.find_latest() == 1
        calls = {
            "save": lambda: manager.save(state_of(0, 3), 3),
            "find_latest": manager.find_latest,
            "load": manager.load,
            "explain": manager.explain,
            "close": manager.close,
        }

        with _saving(manager, 2):
            told = {name: error_of(call) for name, call in calls.items()}

        for name, text in told.items():
            assert f"{name}() was called while save() of the same manager is under way" in text
            assert "make one call at a time" in text
        assert resume(manager, 0, 2) == "own node"


def test_a_signal_handler_cannot_save_in_the_middle_of_a_save(kind: str, root: Path) -> None:
    told: list[str] = []
    with make_manager(kind, root) as manager:
        keep = manager.store.commit

        def interrupted(*args: Any) -> None:
            signal.raise_signal(signal.SIGUSR1)
            keep(*args)

        manager.store.commit = interrupted
        before = signal.signal(
            signal.SIGUSR1,
            lambda *_: told.append(error_of(lambda: manager.save(state_of(0, 2), 2))),
        )
        try:
            manager.save(state_of(0, 1), 1)
        finally:
            signal.signal(signal.SIGUSR1, before)

        assert len(told) == 1
        assert "save() was called while save() of the same manager is under way:" in told[0]
        assert resume(manager, 0, 1) == "own node"


def test_two_threads_that_save_at_random_moments_mix_no_values(kind: str, root: Path) -> None:
    refused: list[str] = []
    saved: dict[int, dict[str, torch.Tensor]] = {}

    def save(manager: Any, thread: int) -> None:
        for step in range(20):
            iteration = 2 * step + thread
            state = {f"w{n}": torch.full((20_000,), 100.0 * iteration + n) for n in range(20)}
            with suppress(CheckpointingException):
                manager.save(state, iteration)
                saved[iteration] = state
                continue
            refused.append(f"{iteration}")

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with make_manager(kind, root) as manager:
            threads = [threading.Thread(target=save, args=(manager, n)) for n in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(MAX_S)
            newest = manager.find_latest()
            found, _ = manager.load()
            assert_same(found, saved[newest])
            assert newest == max(saved)
    finally:
        sys.setswitchinterval(interval)
    assert len(saved) + len(refused) == 40


@pytest.mark.parametrize("iteration", [np.int64(3), np.uint8(3), torch.tensor(3)], ids=repr)
def test_an_iteration_may_be_any_integer(kind: str, root: Path, iteration: Any) -> None:
    with make_manager(kind, root) as manager:
        manager.save(state_of(0, 3), iteration)

        assert type(manager.find_latest()) is int
        assert resume(manager, 0, 3) == "own node"


@pytest.mark.parametrize("iteration", [True, np.bool_(True), 3.0, "3", -1, np.int64(-1)], ids=repr)
def test_what_is_no_iteration_is_refused(kind: str, root: Path, iteration: Any) -> None:
    with make_manager(kind, root) as manager:
        assert "must be an int and not negative" in error_of(lambda: manager.save({}, iteration))


class _FindsByItself(localckpt.LocalCheckpointManager):
    """As subclasses written for NVRx do."""

    def find_latest(self) -> int:
        return 2


def test_a_subclass_with_a_find_latest_of_its_own_can_load(tmp_path: Path) -> None:
    with make_manager("disk", tmp_path) as manager:
        manager.save(state_of(0, 2), 2)

    with _FindsByItself(tmp_path, timeout=MAX_S) as manager:
        assert manager.find_latest() == 2
        state, ckpt_id = manager.load()

    assert_same(state, state_of(0, 2))
    assert ckpt_id.iteration == 2


def _save_on_rank_0_only(rank: int, world_size: int) -> str:
    with make_manager("disk", node_store(), "job", timeout=0.5) as manager:
        told = ""
        if rank == 0:
            told = error_of(lambda: manager.save(state_of(0, 1), 1), PeerLostError)
            announce("told")
        await_announced("told")
        return told


def test_a_save_on_one_rank_only_asks_whether_all_ranks_call_it(node_dirs: Dirs) -> None:
    told, _ = run_ranks(_save_on_rank_0_only, 2, store_per_node=node_dirs(2))

    assert "rank 1" in told
    assert "Is save() called on every rank?" in told
    assert "waited 0.5 s" in told
