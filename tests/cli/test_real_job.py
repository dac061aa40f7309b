"""A real job that is killed again and again: what its record tells is what the script knows."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import localckpt
from localckpt.cli.output import duration
from localckpt.events.event import Event
from localckpt.events.jsonl import JsonLines
from tests.cli.commands import call
from tests.ranks import announce, node_store, start_ranks

_STEP_S, _SAVE_S = 0.05, 0.05
_STARTS, _EVERY = 2, 2
_ABOUT_S = 0.05
"""How far apart the clocks of processes and of the kernel may be: all bounds are exact else."""


@dataclass
class _Known:
    """What the script of one rank knows of one start, by its own clock."""

    came: float
    ready: float
    resumed: float
    first: int
    done_at: dict[int, float] = field(default_factory=dict)
    saves: int = 0
    saves_s: float = 0.0
    died: float = 0.0
    begun: float = 0.0
    """When the test started the rank."""


class _LastNote:
    """Sink that knows which step was noted last, once that is in the record before it."""

    def __init__(self) -> None:
        self.step = -1

    def write(self, event: Event) -> None:
        if event.name == "steps" and event.step is not None:
            self.step = event.step

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def _slow_value() -> int:
    """A part of the state that takes long to give: training waits for it in each save."""
    time.sleep(_SAVE_S)
    return 3


def _train_until_killed(rank: int, world_size: int) -> None:
    came = time.time()
    model, note = torch.nn.Linear(50, 50), _LastNote()
    checkpointer = localckpt.Checkpointer(
        {"model": model, "slow": (_slow_value, lambda _: None)},
        local=node_store(),
        every=localckpt.Every(steps=_EVERY),
        timeout_s=60.0,
        events=[JsonLines(node_store() / "events"), note],
    )
    ready = time.time()
    first = checkpointer.resume()
    known = _Known(came, ready, time.time(), first)
    for step in range(first, 10_000):
        time.sleep(_STEP_S)
        known.done_at[step] = time.time()
        checkpointer.step(step)
        since_save = (step - first + 1) % _EVERY
        if since_save == 0:
            known.saves_s += time.time() - known.done_at[step]
            known.saves += 1
        time.sleep(_STEP_S)
        # All end with the same step, one that is noted, and some after a save.
        may_end = note.step == step and step > first + _EVERY and since_save > 0
        agreed = torch.tensor(int(may_end))
        dist.all_reduce(agreed, dist.ReduceOp.MIN)
        if agreed:
            known.died = time.time()
            announce(f"known by {rank}", known)
            os.kill(os.getpid(), signal.SIGKILL)


def test_the_report_names_the_steps_and_seconds_that_the_script_knows(tmp_path: Path) -> None:
    nodes = [tmp_path / f"node {number}" for number in range(2)]
    starts: list[list[_Known]] = []
    for _ in range(_STARTS):
        begun = time.time()
        with start_ranks(_train_until_killed, 2, store_per_node=nodes) as job:
            starts.append([job.await_announced(f"known by {rank}", 100) for rank in range(2)])
            job.join(expect_dead={0, 1})
        for known in starts[-1]:
            known.begun = begun

    answer, told = call("report", *nodes), call("report", *nodes, "--json").json()

    (session,) = told["sessions"]
    assert [start["ending"] for start in session["starts"]] == ["killed", "open"]
    for start, known in zip(session["starts"], starts, strict=True):
        _assert_of_start(start, known)
    for restart, before, after in zip(session["starts"][1:], starts, starts[1:], strict=False):
        _assert_of_restart(restart, before, after)
        row = (
            rf"{restart['lost_steps']} +{_said(restart['repeated_s'])} +{_said(restart['down_s'])}"
        )
        assert re.search(rf"^ +\d +{row} ", answer.out, re.MULTILINE)
    assert 0 < session["goodput"] < 1
    assert session["total_s"] == pytest.approx(sum(session["seconds"].values()))


def _said(seconds: float) -> str:
    return re.escape(duration(seconds))


def _assert_of_start(start: dict[str, Any], known: list[_Known]) -> None:
    """What is told of one start by itself."""
    assert {one.first for one in known} == {start["resumed_step"] + 1}
    assert {max(one.done_at) for one in known} == {start["last_step"]}
    saves = start["saves"]["nodes"]
    assert saves["ok"] + saves["cut_off"] == known[0].saves
    assert saves["failed"] == 0
    # Training waits for the slowest rank.
    assert (
        known[0].saves * _SAVE_S
        <= saves["blocking_s"]
        <= sum(one.saves_s for one in known) + _ABOUT_S
    )
    resumed = max(one.resumed for one in known)
    assert start["recovery_s"] <= resumed - known[0].begun + _ABOUT_S
    assert start["recovery_s"] >= max(one.ready - one.came for one in known) - _ABOUT_S
    assert sum(start["recovery"].values()) <= start["recovery_s"] + _ABOUT_S


def _assert_of_restart(restart: dict[str, Any], before: list[_Known], after: list[_Known]) -> None:
    """What is told of what a kill has cost."""
    done, resumed = max(before[0].done_at), after[0].first - 1
    assert restart["lost_steps"] == done - resumed
    alive, died = max(one.done_at[done] for one in before), max(one.died for one in before)
    # What the job began with may be what it has to begin with again.
    saved_at = min(one.done_at.get(resumed, one.resumed) for one in before)
    # After the last step it slept only once for certain before it was heard of no more.
    assert restart["repeated_s"] >= ((done - resumed) * 2 - 1) * _STEP_S - _ABOUT_S
    assert restart["repeated_s"] <= died - saved_at + _ABOUT_S
    assert restart["down_s"] >= after[0].begun - died - _ABOUT_S
    assert restart["down_s"] <= min(one.came for one in after) - alive + _ABOUT_S
