"""A loop over the front door that is killed, or stopped, goes on bit for bit where it was."""

from __future__ import annotations

import random
import shutil
import signal
from pathlib import Path

import pytest

import localckpt
from tests.checkpointer.loops import Outcome, Sharding, stores, train
from tests.ranks import run_ranks, start_ranks

_STEPS = 40


def _undisturbed(sharding: Sharding, world_size: int, tmp_path: Path) -> list[Outcome]:
    options = {"every": localckpt.Every(steps=10**6)}
    outcomes: list[Outcome] = run_ranks(
        *(train, world_size, sharding, _STEPS, options),
        store_per_node=stores(tmp_path / "undisturbed", 1),
    )
    assert all(outcome.first == 0 and len(outcome.losses) == _STEPS for outcome in outcomes)
    return outcomes


def _assert_goes_on(found: list[Outcome], expected: list[Outcome]) -> None:
    for outcome, reference in zip(found, expected, strict=True):
        assert outcome.losses == reference.losses[outcome.first :]
        assert outcome.weights == reference.weights
        assert outcome.buffers == reference.buffers


@pytest.mark.rows(2)
@pytest.mark.fault("trainer-dies", "lost-nodes")
@pytest.mark.parametrize(
    ("sharding", "world_size"), [("plain", 1), ("ddp", 2), ("fsdp2", 2), ("fsdp1", 2)]
)
def test_a_loop_that_is_killed_goes_on_bit_for_bit(
    sharding: Sharding, world_size: int, tmp_path: Path
) -> None:
    expected = _undisturbed(sharding, world_size, tmp_path)
    nodes = stores(tmp_path, world_size)
    options = {"every": localckpt.Every(steps=3)}
    killed = (train, world_size, sharding, 10**6, options, 0.005)
    with start_ranks(*killed, store_per_node=nodes) as group:
        group.await_announced(f"step {random.Random(sharding).randint(8, 30)}", 60.0)
        # Its death ends the others.
        group.kill(world_size - 1)
    if world_size > 1:
        # The node of the last rank goes with its disk.
        shutil.rmtree(nodes[-1])

    found = run_ranks(*(train, world_size, sharding, _STEPS, options), store_per_node=nodes)

    assert all(outcome.first > 0 for outcome in found)
    _assert_goes_on(found, expected)


@pytest.mark.fault("interrupted")
@pytest.mark.parametrize(("told", "by"), [(0, signal.SIGUSR1), (1, signal.SIGTERM)])
def test_a_signal_to_one_rank_stops_all_after_the_same_step_and_its_state_is_safe(
    told: int, by: signal.Signals, tmp_path: Path
) -> None:
    expected = _undisturbed("ddp", 2, tmp_path)
    nodes = stores(tmp_path, 2)
    # No cadence would save before the job is stopped.
    options = {"every": localckpt.Every(steps=10**6)}
    with start_ranks(*(train, 2, "ddp", 10**6, options, 0.005), store_per_node=nodes) as group:
        group.await_announced(f"step {5 + 10 * told}", 60.0)
        group.kill(told, by)
        stopped = group.join(60.0)

    (last,) = {outcome.last for outcome in stopped}
    assert all(outcome.stopped.startswith(f"rank {told}: signal") for outcome in stopped)
    steps = max(_STEPS, last + 4)
    found = run_ranks(*(train, 2, "ddp", steps, options), store_per_node=nodes)
    assert [outcome.first for outcome in found] == [last + 1] * 2
    if steps == _STEPS:
        _assert_goes_on(found, expected)
