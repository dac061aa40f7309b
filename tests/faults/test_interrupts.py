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
from functools import partial
from typing import Any

import psutil
import pytest
import torch

import localckpt
from localckpt.waiting import wait_until
from tests.interrupts import Interrupter
from tests.managers.jobs import (
    KINDS,
    MAX_S,
    Dirs,
    NodesOf,
    assert_same,
    cliques,
    error_of,
    files,
    in_job,
    iterations_on,
    make_manager,
    state_of,
)
from tests.ranks import announce, node_store, run_ranks, start_ranks
from tests.staging import staging_nbytes

pytestmark = pytest.mark.fault("interrupted")

_NBYTES = 3_000_000
_CALLS = ("save", "save behind training", "schedule", "poll", "find_latest", "load", "load into")


class _Trainer:
    """One rank that is interrupted, and makes new objects."""

    def __init__(self, kind: str, again_s: float) -> None:
        self._kind = kind
        self.interrupter = Interrupter(7, again_s)
        self.iteration = 0
        self._into = state_of(0, 0, _NBYTES)
        self.begin()
        self._save()

    def begin(self) -> None:
        options = {"keep_last": 2, "staging_threads": 3}
        self.manager = make_manager(self._kind, node_store(), "job", **options)
        self.queue = localckpt.AsyncCallsQueue(timeout_s=MAX_S)

    def interrupt(self, name: str) -> None:
        """Make a call of this name, interrupt it, and have new objects find what was complete."""
        queue, manager, before = self.queue, self.manager, self.interrupter.interrupts
        request = self._save(is_async=True) if name in ("schedule", "poll") else None
        if name == "poll":
            queue.schedule_async_request(request)
        manager.latest_iteration = -1
        if name.startswith("load"):
            manager.find_latest()
        calls: dict[str, Callable[[], Any]] = {
            "save": self._save,
            "save behind training": lambda: self._save(is_async=True),
            "schedule": lambda: queue.schedule_async_request(request),
            "poll": queue.wait_until_finished,
            "find_latest": manager.find_latest,
            "load": manager.load,
            "load into": lambda: manager.load(into=self._into),
        }
        made = self.interrupter.call(name, calls[name])
        if name == "save behind training" and made is not None:
            queue.schedule_async_request(made)
        if self.interrupter.interrupts > before:
            # Unless the interrupt came before the call had begun.
            for each, again in ((queue, queue.wait_until_finished), (manager, manager.find_latest)):
                assert not each._interrupted or "was interrupted" in error_of(again)
            for each in (queue, manager):
                each.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
            self.begin()
        else:
            queue.wait_until_finished()
        found = self.manager.find_latest()
        # Or the one that was interrupted.
        assert found >= self.iteration - 1, name
        assert_same(self.manager.load()[0], state_of(0, found, _NBYTES))
        self.iteration = found
        self._save()

    def _save(self, is_async: bool = False) -> Any:
        self.iteration += 1
        state = state_of(0, self.iteration, _NBYTES)
        return self.manager.save(state, self.iteration, is_async=is_async)


def _interrupt_often(rank: int, world_size: int, kind: str, rounds: int, again_s: float) -> int:
    trainer = _Trainer(kind, again_s)
    for name in _CALLS:
        trainer.interrupt(name)
    memory, descriptors = staging_nbytes(trainer.manager.store), psutil.Process().num_fds()
    threads = threading.active_count()
    for _ in range(rounds):
        for name in _CALLS:
            trainer.interrupt(name)
    # A new manager has a buffer or two more, or less, than the one before at this moment.
    assert staging_nbytes(trainer.manager.store) <= 3 * memory
    # Threads that an interrupted call left may still end.
    assert wait_until(lambda: threading.active_count() <= threads + 2, MAX_S)
    assert psutil.Process().num_fds() <= descriptors + 8
    assert len(iterations_on(node_store())) <= 3
    trainer.queue.close()
    trainer.manager.close()
    assert [name for name in files(node_store()) if not name.endswith(".safetensors")] == []
    with make_manager(kind, node_store(), "job") as manager:
        assert manager.find_latest() == trainer.iteration
    return trainer.interrupter.interrupts


def _interrupt_global_saves(
    rank: int, world_size: int, kind: str, rounds: int, again_s: float
) -> int:
    """Each interrupt closes the manager; what was complete stays."""
    interrupter, threads = Interrupter(11, again_s), threading.active_count()

    def state(iteration: int) -> dict[str, Any]:
        return {"w": torch.full((_NBYTES // 4,), float(iteration)), "iteration": iteration}

    for turn in range(3 * rounds):
        with localckpt.GlobalCheckpointManager(node_store(), timeout=MAX_S, keep_last=2) as manager:
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
    assert wait_until(lambda: threading.active_count() <= threads + 2, MAX_S)
    return interrupter.interrupts


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", [*KINDS, "shared"])
@pytest.mark.parametrize("again_s", [0.0, pytest.param(0.003, marks=pytest.mark.long)])
def test_a_rank_that_is_interrupted_in_any_call_finds_what_was_complete(
    kind: str,
    again_s: float,
    nodes_of: NodesOf,
    long_form: bool,
    record_property: Callable[[str, object], None],
) -> None:
    nodes = nodes_of(kind, 1)
    rounds = 30 if long_form else 4

    (interrupts,) = run_ranks(
        _interrupt_global_saves if kind == "shared" else _interrupt_often,
        *(1, kind, rounds, again_s),
        init_group=False,
        store_per_node=nodes,
        timeout_s=1200.0 if long_form else 60.0,
    )

    assert interrupts > rounds
    record_property("cases", interrupts)


def _train_until_interrupted(rank: int, world_size: int, queued: bool) -> int:
    """Save on and on; gives how many saves were complete when Ctrl-C came."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    done = -1
    try:
        # As much time as there is by default: nothing may wait for it to be over.
        with in_job(cliques(1, 2, 300.0), timeout=300.0) as (manager, queue):
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


def _find_after(rank: int, world_size: int) -> int:
    with in_job() as (manager, _):
        newest = int(manager.find_latest())
        if newest >= 0:
            assert_same(manager.load()[0], state_of(rank, newest, _NBYTES))
        return newest


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("queued", [True, False])
def test_the_first_ctrl_c_ends_a_job_within_two_seconds(
    queued: bool, node_dirs: Dirs, long_form: bool, record_property: Callable[[str, object], None]
) -> None:
    moments = random.Random(queued)
    rounds = 10 if long_form else 1
    for _ in range(rounds):
        nodes = node_dirs(2)
        with start_ranks(_train_until_interrupted, 2, queued, store_per_node=nodes) as group:
            for rank in range(2):
                group.await_announced(f"training {rank}", 60.0)
            time.sleep(moments.uniform(0.0, 1.0))
            began = time.monotonic()
            for rank in range(2):
                group.kill(rank, signal.SIGINT)
            done = group.join(60.0)
            took_s = time.monotonic() - began
        # Where other work has the cores, the same takes as much longer.
        assert took_s < 2.0 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        found = run_ranks(_find_after, 2, store_per_node=nodes)
        # What any rank saw complete is there.
        assert len(set(found)) == 1
        assert found[0] >= (max(done) if not queued else -1)
    record_property("cases", rounds)
