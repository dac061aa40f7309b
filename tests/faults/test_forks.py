"""A trainer forks, at chosen and at random moments, and its forks end in every way: it goes on.

A fork that leaves the interpreter hangs in torch's own destructors where the process group is
gloo's, with and without this library. So the forks here end by ``os._exit``, as those of
``multiprocessing`` do, once they have left the blocks of the managers.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import localckpt
from tests.managers.jobs import MAX_S, Dirs, cliques, error_of, make_manager, resume, state_of
from tests.ranks import node_store, run_ranks

pytestmark = pytest.mark.fault("interrupted")

_CHILD_S = 20
_ROUNDS, _ROUNDS_IN_LONG_FORM = 6, 75


def _exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _use_in_a_fork(*calls: Callable[[], Any]) -> int:
    """Every call says whose the manager is; 0 if it does."""
    try:
        for call in calls:
            assert "of which this one is a fork" in error_of(call)
    except BaseException:  # noqa: BLE001 - shown with the output of the rank
        traceback.print_exc()
        return 1
    return 0


class _Forker:
    """Forks at random moments, in another thread; each fork leaves in a way that is drawn.

    Not in a signal handler: Python itself cannot be forked there while it starts a thread.
    """

    def __init__(self, seed: int, things: list[Any]) -> None:
        self._random = random.Random(seed)
        self._things = things
        self._usual_s = 0.05
        self.children: list[int] = []

    def call(self, function: Callable[[], None]) -> None:
        """Call, and fork at a moment of the time that such a call takes."""
        forking = threading.Thread(
            target=self._fork, args=(self._random.uniform(0, self._usual_s),), daemon=True
        )
        began = time.monotonic()
        forking.start()
        function()
        self._usual_s = min(1.0, time.monotonic() - began)
        forking.join(_CHILD_S)
        assert not forking.is_alive()

    def _fork(self, after_s: float) -> None:
        time.sleep(after_s)
        leave = self._random.choice([lambda: None, self._exit_blocks, self._close, self._drop])
        lives_s = self._random.choice([0.0, self._random.uniform(0.0, 0.3)])
        child = os.fork()
        if child:
            self.children.append(child)
            return
        code = 1
        try:
            signal.alarm(_CHILD_S)
            # Nor collected there, with what else of torch's is garbage by now.
            gc.disable()
            time.sleep(lives_s)
            leave()
            code = 0
        except BaseException:  # noqa: BLE001 - shown with the output of the rank
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)

    def _exit_blocks(self) -> None:
        for thing in self._things:
            thing.__exit__(SystemExit, SystemExit(7), None)

    def _close(self) -> None:
        for thing in self._things:
            thing.close()

    def _drop(self) -> None:
        # Not the strategy: torch's gloo cannot be destructed in a fork.
        for thing in self._things[:-1]:
            thing.__dict__.clear()


def _save_and_fork(rank: int, world_size: int, shared: Path, rounds: int, seed: int) -> int:
    with (
        cliques(1, 2) as replicas,
        localckpt.GlobalCheckpointManager(shared, keep_last=2, timeout=MAX_S) as global_tier,
        localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue,
        make_manager("disk", node_store(), "run", replicas) as manager,
    ):
        manager.save(state_of(rank, 0), 0)
        if (child := os.fork()) == 0:
            calls = [lambda: manager.save({}, 2), manager.find_latest, manager.explain]
            calls += [lambda: global_tier.save({}, 2), lambda: global_tier.load(into={})]
            calls += [global_tier.find_latest, global_tier.wait_until_finished]
            os._exit(_use_in_a_fork(*calls))
        assert _exit_code(child) == 0
        forker = _Forker(seed + rank, [manager, queue, global_tier, replicas])

        def one_round(iteration: int) -> None:
            request = manager.save(state_of(rank, iteration), iteration, is_async=True)
            queue.schedule_async_request(request)
            if iteration % 3 == 0:
                global_tier.save({"n": iteration}, iteration)
            queue.maybe_finalize_async_calls(blocking=True)

        for iteration in range(1, rounds + 1):
            forker.call(lambda n=iteration: one_round(n))
            if iteration % 5 == 0:
                assert resume(manager, rank, iteration) == "own node"
        global_tier.wait_until_finished()
        assert global_tier.find_latest() == rounds // 3 * 3
        assert manager.skipped_saves == manager.degraded_saves == 0
        # The lock is still the parent's.
        with localckpt.GlobalCheckpointManager(shared, timeout=1.0) as other:
            told = error_of(lambda: other.save({"n": 0}, rounds + 1), localckpt.StorageError)
        assert "another job saves into" in told
    assert [_exit_code(child) for child in forker.children] == [0] * len(forker.children)
    return len(forker.children)


def test_forks_at_random_moments_disturb_no_save(
    node_dirs: Dirs,
    tmp_path: Path,
    long_form: bool,
    pytestconfig: pytest.Config,
    record_property: Callable[[str, object], None],
) -> None:
    rounds = _ROUNDS_IN_LONG_FORM if long_form else _ROUNDS
    seed = pytestconfig.getoption("--seed") or random.randrange(10**6)
    print(f"seed {seed}")

    forks = run_ranks(
        *(_save_and_fork, 2, tmp_path / "shared", rounds, seed),
        store_per_node=node_dirs(2),
        timeout_s=60.0 + 5 * rounds,
    )

    assert sum(forks) > rounds / 2
    record_property("cases", sum(forks))
