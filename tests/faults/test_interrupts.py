"""Interrupts at random moments of every call: what was taken is given back, and new objects go on.

An interrupt is what Ctrl-C, a signal handler or a notebook raises in the main thread.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import localckpt
from tests.interrupts import Interrupter
from tests.managers.jobs import (
    KINDS,
    MAX_S,
    assert_same,
    cliques,
    error_of,
    files,
    iterations_on,
    make_manager,
    resume,
    save,
    state_of,
)
from tests.ranks import announce, node_store, run_ranks, start_ranks
from tests.staging import staging_nbytes

pytestmark = pytest.mark.fault("interrupted")

Dirs = Callable[[int], list[Path]]

_NBYTES = 3_000_000
_CALLS = ("save", "save behind training", "schedule", "poll", "find_latest", "load", "load into")


class _Trainer:
    """One rank that is interrupted, and makes new objects."""

    def __init__(self, kind: str, again_s: float) -> None:
        self._kind = kind
        self.interrupter = Interrupter(7, again_s)
        self.iteration = 0
        self.into = state_of(0, 0, _NBYTES)
        self.begin()
        self._next_save()

    def begin(self) -> None:
        options = {"keep_last": 2, "staging_threads": 3}
        self.manager = make_manager(self._kind, node_store(), "job", **options)
        self.queue = localckpt.AsyncCallsQueue(timeout_s=MAX_S)

    def interrupt(self, name: str) -> None:
        """Make a call of this name, interrupt it, and have new objects find what was complete."""
        queue, manager, before = self.queue, self.manager, self.interrupter.interrupts
        if name == "save":
            self._call(name, self._next_save)
        elif name == "save behind training":
            request = self._call(name, lambda: self._next_save(is_async=True))
            if request is not None:
                queue.schedule_async_request(request)
        elif name == "schedule":
            request = self._next_save(is_async=True)
            self._call(name, lambda: queue.schedule_async_request(request))
        elif name == "poll":
            queue.schedule_async_request(self._next_save(is_async=True))
            self._call(name, queue.wait_until_finished)
        elif name == "find_latest":
            manager.latest_iteration = -1
            self._call(name, manager.find_latest)
        else:
            manager.find_latest()
            into = self.into if name == "load into" else None
            self._call(name, lambda: manager.load(into=into))
        if self.interrupter.interrupts > before:
            if queue._interrupted:
                assert "was interrupted" in error_of(queue.wait_until_finished)
            self._leave()
            self.begin()
        else:
            queue.wait_until_finished()
        self._find_what_was_complete(name)

    def _call(self, name: str, call: Callable[[], Any]) -> Any:
        return self.interrupter.call(name, call)

    def _next_save(self, is_async: bool = False) -> Any:
        self.iteration += 1
        return self.manager.save(
            state_of(0, self.iteration, _NBYTES), self.iteration, is_async=is_async
        )

    def _leave(self) -> None:
        interrupt = KeyboardInterrupt()
        for each in (self.queue, self.manager):
            each.__exit__(KeyboardInterrupt, interrupt, None)

    def _find_what_was_complete(self, name: str) -> None:
        found = self.manager.find_latest()
        # Or the one that was interrupted.
        assert found >= self.iteration - 1, name
        state, _ = self.manager.load()
        assert_same(state, state_of(0, found, _NBYTES))
        self.iteration = found
        self._next_save()

    def close(self) -> None:
        self.queue.close()
        self.manager.close()


def _descriptors() -> list[str]:
    """What this process has open."""
    opened = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            opened.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sorted(opened)


def _await_ends_of_threads(at_most: int) -> None:
    """Wait until no more threads are there: those that an interrupted call left may still end."""
    deadline = time.monotonic() + MAX_S
    while threading.active_count() > at_most:
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.01)


def _interrupt_often(rank: int, world_size: int, kind: str, rounds: int, again_s: float) -> int:
    trainer = _Trainer(kind, again_s)
    for name in _CALLS:
        trainer.interrupt(name)
    memory, descriptors = staging_nbytes(trainer.manager.store), _descriptors()
    threads = threading.active_count()
    for _ in range(rounds):
        for name in _CALLS:
            trainer.interrupt(name)
    # A new manager has a buffer or two more, or less, than the one before at this moment.
    assert staging_nbytes(trainer.manager.store) <= 3 * memory
    _await_ends_of_threads(threads + 2)
    assert len(_descriptors()) <= len(descriptors) + 8, (descriptors, _descriptors())
    assert len(iterations_on(node_store())) <= 3
    trainer.close()
    assert [name for name in files(node_store()) if not name.endswith(".safetensors")] == []
    with make_manager(kind, node_store(), "job") as manager:
        assert manager.find_latest() == trainer.iteration
    return trainer.interrupter.interrupts


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("again_s", [0.0, pytest.param(0.003, marks=pytest.mark.long)])
def test_a_rank_that_is_interrupted_in_any_call_finds_what_was_complete(
    kind: str,
    again_s: float,
    node_dirs: Dirs,
    shm_roots: Dirs,
    long_form: bool,
    record_property: Callable[[str, object], None],
) -> None:
    nodes = (node_dirs if kind == "disk" else shm_roots)(1)
    rounds = 30 if long_form else 4

    (interrupts,) = run_ranks(
        *(_interrupt_often, 1, kind, rounds, again_s),
        init_group=False,
        store_per_node=nodes,
        timeout_s=1200.0 if long_form else 60.0,
    )

    print(f"{interrupts} of {rounds * len(_CALLS)} calls interrupted")
    assert interrupts > rounds
    record_property("cases", interrupts)


def _interrupt_global_saves(
    rank: int, world_size: int, root: Path, rounds: int, again_s: float
) -> int:
    interrupter, threads = Interrupter(11, again_s), threading.active_count()

    def state(iteration: int) -> dict[str, Any]:
        return {"w": torch.full((_NBYTES // 4,), float(iteration)), "iteration": iteration}

    for turn in range(3 * rounds):
        with localckpt.GlobalCheckpointManager(root, timeout=MAX_S, keep_last=2) as manager:
            into, before = state(-1), interrupter.interrupts
            if turn:
                # What was complete before the interrupt, or the save that it came into.
                found = manager.load(into=into)[1].iteration
                assert_same(into, state(found))
                assert found >= 2 * turn - 2
            number = 2 * turn
            manager.save(state(number), number, is_async=turn % 3 == 1)
            if turn % 3 == 0:
                interrupter.call("save", partial(manager.save, state(number + 1), number + 1))
            elif turn % 3 == 1:
                interrupter.call("wait", manager.wait_until_finished)
            else:
                interrupter.call("load", partial(manager.load, into=into))
            # Unless the interrupt came before the call had begun.
            if interrupter.interrupts > before and manager._interrupted:
                assert "was interrupted" in error_of(manager.find_latest)
            # It holds the root.
            assert manager._save is None or manager._save.over.wait(MAX_S)
    _await_ends_of_threads(threads + 2)
    return interrupter.interrupts


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("again_s", [0.0, pytest.param(0.003, marks=pytest.mark.long)])
def test_an_interrupt_closes_a_manager_of_shared_storage_and_what_was_complete_stays(
    again_s: float,
    tmp_path: Path,
    long_form: bool,
    record_property: Callable[[str, object], None],
) -> None:
    rounds = 60 if long_form else 5

    (interrupts,) = run_ranks(
        *(_interrupt_global_saves, 1, tmp_path, rounds, again_s),
        init_group=False,
        timeout_s=1200.0 if long_form else 60.0,
    )

    print(f"{interrupts} of {3 * rounds} calls interrupted")
    assert interrupts > rounds
    record_property("cases", interrupts)


def _interrupt_one_of_two(rank: int, world_size: int) -> list[str]:
    """Rank 1 is interrupted in a save, and in a poll; rank 0 waits for it."""
    told: list[str] = []

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with cliques(1, 2) as replicas:
        with make_manager("disk", node_store(), "job", replicas, timeout=2.0) as manager:
            manager.save(state_of(rank, 1), 1)
            if rank == 1:
                manager.store.commit = interrupted
                with pytest.raises(KeyboardInterrupt):
                    manager.save(state_of(rank, 2), 2)
                told.append(error_of(lambda: manager.save(state_of(rank, 3), 3)))
                told.append(error_of(manager.find_latest))
                assert [str(standing) for standing in manager.status()] == [
                    "iteration 1 is replicated, 2 of 2"
                ]
            else:
                told.append(error_of(lambda: manager.save(state_of(rank, 2), 2)))
        with (
            make_manager("disk", node_store(), "job", replicas) as manager,
            localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue,
        ):
            assert resume(manager, rank, 1) == "own node"
            save(manager, state_of(rank, 2), 2, queue)
            if rank == 1:
                queue.schedule_async_request(manager.save(state_of(rank, 3), 3, is_async=True))
                signal.signal(signal.SIGALRM, interrupted)
                signal.setitimer(signal.ITIMER_REAL, 0.3)
                with pytest.raises(KeyboardInterrupt):
                    queue.wait_until_finished()
                told.append(error_of(queue.wait_until_finished))
    return told


def test_a_rank_that_was_interrupted_beside_others_says_so_and_new_managers_go_on(
    node_dirs: Dirs,
) -> None:
    waited, told = run_ranks(_interrupt_one_of_two, 2, store_per_node=node_dirs(2))

    assert "rank 1 (last seen:" in waited[0]
    assert "save() of this manager was interrupted on this rank" in told[0]
    assert "save() of this manager was interrupted on this rank" in told[1]
    assert "of this queue was interrupted on this rank" in told[2]


def _strategy(redundancy: str, world_size: int) -> Any:
    if redundancy == "parity":
        return localckpt.ParityReplicationStrategy(1, world_size)
    return localckpt.CliqueReplicationStrategy.from_replication_params(1, 2)


def _train_until_interrupted(rank: int, world_size: int, redundancy: str, queued: bool) -> int:
    """Save on and on; gives how many saves were complete when Ctrl-C came."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    done = -1
    try:
        # As much time as there is by default: nothing may wait for it to be over.
        with (
            _strategy(redundancy, world_size) as strategy,
            make_manager("disk", node_store(), "job", strategy, timeout=300.0) as manager,
            localckpt.AsyncCallsQueue() as queue,
        ):
            announce(f"training {rank}")
            for iteration in range(100_000):
                state = state_of(rank, iteration, _NBYTES)
                if queued:
                    queue.schedule_async_request(manager.save(state, iteration, is_async=True))
                    queue.maybe_finalize_async_calls(blocking=iteration % 3 == 0)
                else:
                    manager.save(state, iteration)
                done = iteration
    except KeyboardInterrupt:
        return done
    raise AssertionError("nobody interrupted this rank")


def _find_after(rank: int, world_size: int, redundancy: str) -> int:
    with (
        _strategy(redundancy, world_size) as strategy,
        make_manager("disk", node_store(), "job", strategy) as manager,
    ):
        newest = int(manager.find_latest())
        if newest >= 0:
            assert_same(manager.load()[0], state_of(rank, newest, _NBYTES))
        return newest


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("redundancy", "queued"), [("replicas", True), ("parity", False)])
def test_the_first_ctrl_c_ends_a_job_within_two_seconds(
    redundancy: str,
    queued: bool,
    node_dirs: Dirs,
    long_form: bool,
    record_property: Callable[[str, object], None],
) -> None:
    world_size = 3 if redundancy == "parity" else 2
    moments = random.Random(f"{redundancy} {queued}")
    rounds = 10 if long_form else 1
    for _ in range(rounds):
        nodes = node_dirs(world_size)
        run = (_train_until_interrupted, world_size, redundancy, queued)
        with start_ranks(*run, store_per_node=nodes) as group:
            for rank in range(world_size):
                group.await_announced(f"training {rank}", 60.0)
            time.sleep(moments.uniform(0.0, 1.0))
            began = time.monotonic()
            for rank in range(world_size):
                group.kill(rank, signal.SIGINT)
            done = group.join(60.0)
            took_s = time.monotonic() - began
        # Where other work has the cores, the same takes as much longer.
        assert took_s < 2.0 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        found = run_ranks(_find_after, world_size, redundancy, store_per_node=nodes)
        # What any rank saw complete is there.
        assert len(set(found)) == 1
        assert found[0] >= (max(done) if not queued else -1)
    record_property("cases", rounds)
