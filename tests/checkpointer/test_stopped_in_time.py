"""A job that gets SIGTERM ends within its grace time, whatever its storage does."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.stores import serve_store
from localckpt import Checkpointer
from tests.checkpointer import stopped_program
from tests.checkpointer.loops import stores
from tests.ranks import node_store, run_ranks

_WORLD = 2
# A step, 2 s to hear of the signal, the grace time and 2 s.
_ENDED_S = stopped_program.STEP_S + 2 + stopped_program.GRACE_S + 2
# Of starts and ends on a machine that is busy.
_PATIENCE_S = 120.0
_LONG = pytest.mark.timeout(400)


@functools.cache
def _exits_s() -> float:
    """Measure how long two processes at once take to import torch and to exit, here and now.

    The exit alone takes torch a second of the processor, which is many seconds on a busy machine.
    """
    began = time.monotonic()
    ranks = [subprocess.Popen([sys.executable, "-c", "import torch"]) for _ in range(_WORLD)]
    assert [rank.wait() for rank in ranks] == [0, 0]
    return time.monotonic() - began


class _Job:
    """Ranks of :mod:`stopped_program` in processes of their own."""

    def __init__(self, folder: Path, slow: str, tier: str) -> None:
        self._logs = [folder / f"log {rank}" for rank in range(_WORLD)]
        self._store = serve_store()
        self.ranks = [
            subprocess.Popen(
                [sys.executable, "-m", stopped_program.__name__, str(folder), slow, tier],
                env=os.environ
                | {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(_WORLD),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(self._store.port),
                    "TORCHELASTIC_USE_AGENT_STORE": "True",
                    "GLOO_SOCKET_IFNAME": "lo",
                    "OMP_NUM_THREADS": "1",
                },
                stdout=log.open("w"),
                stderr=subprocess.STDOUT,
            )
            for rank, log in enumerate(self._logs)
        ]

    def text(self, rank: int) -> str:
        return self._logs[rank].read_text()

    def number(self, rank: int, word: str) -> int:
        """The number of the last line that begins with a word."""
        lines = [line.split() for line in self.text(rank).splitlines()]
        return next(int(line[1]) for line in reversed(lines) if line[:1] == [word])

    def await_end(self) -> list[int]:
        """Wait until both have ended; their exit codes."""
        until = time.monotonic() + _PATIENCE_S
        while any(rank.poll() is None for rank in self.ranks):
            assert time.monotonic() < until, [self.text(rank) for rank in range(_WORLD)]
            time.sleep(0.02)
        return [rank.returncode for rank in self.ranks]

    def await_(self, holds: Callable[[], bool]) -> None:
        until = time.monotonic() + _PATIENCE_S
        while not holds():
            assert time.monotonic() < until, [self.text(rank) for rank in range(_WORLD)]
            assert all(rank.poll() is None for rank in self.ranks), self.text(0)
            time.sleep(0.02)


@contextmanager
def _job(folder: Path, slow: str, tier: str = "nodes") -> Iterator[_Job]:
    job = _Job(folder, slow, tier)
    try:
        yield job
    finally:
        for rank in job.ranks:
            rank.kill()
            rank.wait()


def _go_on(rank: int, world_size: int, folder: Path, steps: int) -> int:
    """Make some steps more, on storage that answers; the first of them."""
    first = stopped_program.main(folder, "", "nodes", steps=steps)
    dist.destroy_process_group()
    return first


@pytest.mark.rows(1)
@_LONG
@pytest.mark.parametrize(
    ("tier", "slow"),
    [
        *product(["nodes", "shared"], ["fsync", "hangs"]),
        *(("nodes", stopped_program.BEGIN), ("nodes", stopped_program.END)),
    ],
)
def test_it_ends_in_time_on_storage_that_does_not_answer_and_resumes_what_was_complete(
    tier: str, slow: str, tmp_path: Path
) -> None:
    with _job(tmp_path, slow, tier) as job:
        job.await_(lambda: any(tmp_path.glob("slow*")))
        # Some save begins, and is in the way of the next.
        time.sleep(20 * stopped_program.STEP_S)
        began = time.monotonic()

        job.ranks[1].send_signal(signal.SIGTERM)
        codes = job.await_end()

        took_s = time.monotonic() - began
        texts = [job.text(rank) for rank in range(_WORLD)]
        stopped = {job.number(rank, "stopped") for rank in range(_WORLD)}
        newest = min(job.number(rank, "newest") for rank in range(_WORLD))
    assert codes == [0, 0], texts
    assert took_s < _ENDED_S + _exits_s(), texts
    assert len(stopped) == 1
    where = "safe on the nodes" if tier == "nodes" else "on shared storage"
    assert all(f"step {max(stopped)} is not {where}" in text for text in texts)
    for flag in tmp_path.glob("slow*"):
        flag.unlink()

    if tier == "shared":
        assert newest == max(stopped)
        shutil.rmtree(tmp_path / "nodes")
    first = min(run_ranks(_go_on, _WORLD, tmp_path, 1, init_group=False))
    # It has looked whether the state is that of the step before.
    assert first - 1 >= (newest if tier == "nodes" else 19)


@pytest.mark.rows(1)
@_LONG
@pytest.mark.parametrize("slow_from", ["resume", "first save"])
def test_a_start_on_storage_that_does_not_answer_hears_a_signal_at_once(
    slow_from: str, tmp_path: Path
) -> None:
    run_ranks(_go_on, _WORLD, tmp_path, 2, init_group=False)
    if slow_from == "resume":
        # The first step notes that this start is counted.
        (tmp_path / "slow at resume").touch()
    with _job(tmp_path, "fsync") as job:
        job.await_(lambda: "resumed 2\n" in job.text(0))
        (tmp_path / "slow").touch()
        # A step, or the first save, waits.
        time.sleep(20 * stopped_program.STEP_S)
        began = time.monotonic()

        job.ranks[1].send_signal(signal.SIGTERM)
        codes = job.await_end()

        took_s = time.monotonic() - began
        texts = [job.text(rank) for rank in range(_WORLD)]
    assert codes == [0, 0], texts
    assert took_s < _ENDED_S + _exits_s(), texts
    assert all("is not safe on the nodes" in text for text in texts)


# Between two steps.


def _evaluate(rank: int, world_size: int, told: int, steps: int) -> tuple[str | None, int, int]:
    """Make some steps, and evaluate for long; returns why it stopped, when, and the next step."""
    model, polls = torch.nn.Linear(2, 2), 0
    options: dict[str, Any] = {"every": 1000, "timeout_s": 30.0}
    with Checkpointer({"model": model}, local=node_store(), **options) as checkpointer:
        for step in range(checkpointer.resume(), steps):
            torch.nn.init.constant_(model.weight, step)
            assert not checkpointer.step(step)
        until = time.monotonic() + 30
        while checkpointer.poll_stop() is None and time.monotonic() < until:
            polls += 1
            if polls == 100 and rank == told:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.005)
        stopped = checkpointer.stopped
        assert stopped == checkpointer.poll_stop()
        assert checkpointer.step(steps) == (stopped is not None)
    with Checkpointer({"model": model}, local=node_store(), **options) as checkpointer:
        first = checkpointer.resume()
        assert first == 0 or bool((model.weight == first - 1).all())
    return stopped, polls, first


@pytest.mark.parametrize(("steps", "told"), [(3, 1), (0, 0)])
def test_a_poll_between_steps_stops_all_ranks_in_one_call_with_the_last_step_safe(
    steps: int, told: int, tmp_path: Path
) -> None:
    ended = run_ranks(_evaluate, 2, told, steps, store_per_node=stores(tmp_path, 2))

    assert ended[0] == ended[1]
    why, polls, first = ended[0]
    assert why == f"rank {told}: signal SIGTERM"
    assert polls >= 100
    assert first == steps


def test_a_signal_that_came_in_an_evaluation_stops_the_next_step(tmp_path: Path) -> None:
    with Checkpointer({"m": torch.nn.Linear(1, 1)}, local=tmp_path, every=1000) as checkpointer:
        checkpointer.step(checkpointer.resume())
        checkpointer.poll_stop()

        signal.raise_signal(signal.SIGTERM)
        step = 1
        while not checkpointer.step(step) and step < 2000:
            step += 1
            time.sleep(0.005)

        assert checkpointer.stopped == "rank 0: signal SIGTERM"
        assert checkpointer.newest == step
