"""A job that gets SIGTERM ends within its grace time, whatever its storage does."""

from __future__ import annotations

import os
import shutil
import signal
import time
from contextlib import AbstractContextManager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from localckpt import Checkpointer
from tests.checkpointer import stopped_program
from tests.checkpointer.loops import stores
from tests.ranks import RankGroup, node_store, run_ranks, start_ranks

_WORLD = 2
# A step, 2 s to hear of the signal, the grace time and 2 s, beside what ranks take to start, to
# resume and to end, here and now.
_ENDED_S = stopped_program.STEP_S + 2 + stopped_program.GRACE_S + 2
# Of ranks on a machine that is busy.
_PATIENCE_S = 120.0
_LONG = pytest.mark.timeout(400)


def _number(group: RankGroup, rank: int, word: str) -> int:
    """The number of the last line of a rank that begins with a word."""
    lines = [line.split() for line in group.output(rank).splitlines()]
    return next(int(line[1]) for line in reversed(lines) if line[:1] == [word])


def _job(folder: Path, slow: str, tier: str) -> AbstractContextManager[RankGroup]:
    return start_ranks(_run, _WORLD, folder, slow, tier, init_group=False)


def _run(rank: int, world_size: int, folder: Path, slow: str, tier: str) -> None:
    stopped_program.main(folder, slow, tier)


def _stop(group: RankGroup) -> tuple[float, list[str]]:
    """Signal one rank; how long all take to end, and what they have printed."""
    # Some save, or step, begins, and is in the way of the next.
    time.sleep(20 * stopped_program.STEP_S)
    began = time.monotonic()
    group.kill(1, signal.SIGTERM)
    group.join(_PATIENCE_S)
    return time.monotonic() - began, [group.output(rank) for rank in range(_WORLD)]


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
    with _job(tmp_path, slow, tier) as group:
        group.await_(lambda: any(tmp_path.glob("slow*")), _PATIENCE_S)
        took_s, texts = _stop(group)
        stopped = {_number(group, rank, "stopped") for rank in range(_WORLD)}
        newest = min(_number(group, rank, "newest") for rank in range(_WORLD))
    assert len(stopped) == 1
    where = "safe on the nodes" if tier == "nodes" else "on shared storage"
    assert all(f"step {max(stopped)} is not {where}" in text for text in texts)
    for flag in tmp_path.glob("slow*"):
        flag.unlink()

    if tier == "shared":
        assert newest == max(stopped)
        shutil.rmtree(tmp_path / "nodes")
    began = time.monotonic()
    first = min(run_ranks(_go_on, _WORLD, tmp_path, 1, init_group=False))
    assert took_s < _ENDED_S + time.monotonic() - began, texts
    # It has looked whether the state is that of the step before.
    assert first - 1 >= (newest if tier == "nodes" else 19)


@pytest.mark.rows(1)
@_LONG
@pytest.mark.parametrize("slow_from", ["resume", "first save"])
def test_a_start_on_storage_that_does_not_answer_hears_a_signal_at_once(
    slow_from: str, tmp_path: Path
) -> None:
    began = time.monotonic()
    run_ranks(_go_on, _WORLD, tmp_path, 2, init_group=False)
    ended_s = _ENDED_S + time.monotonic() - began
    if slow_from == "resume":
        # The first step notes that this start is counted.
        (tmp_path / "slow at resume").touch()
    with _job(tmp_path, "fsync", "nodes") as group:
        group.await_printed(0, "resumed 2\n", _PATIENCE_S)
        (tmp_path / "slow").touch()
        took_s, texts = _stop(group)
    assert took_s < ended_s, texts
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
