"""A loop over the front door that is killed, or stopped, goes on bit for bit where it was."""

from __future__ import annotations

import random
import shutil
import signal
from pathlib import Path
from typing import Any

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
    ("sharding", "world_size"),
    [("plain", 1), ("ddp", 4), ("fsdp2", 4), ("fsdp1", 2)],
)
def test_a_loop_that_is_killed_goes_on_bit_for_bit(
    sharding: Sharding, world_size: int, tmp_path: Path, long_form: bool
) -> None:
    world_size = world_size if long_form else min(world_size, 2)
    expected = _undisturbed(sharding, world_size, tmp_path)
    moments = random.Random(sharding)
    nodes = stores(tmp_path, 1 if world_size == 1 else 2)
    options = {"every": localckpt.Every(steps=3)}
    for number in range(30 if long_form else 1):
        for node in nodes:
            shutil.rmtree(node, ignore_errors=True)
        with start_ranks(
            *(train, world_size, sharding, 10**6, options, 0.005), store_per_node=nodes
        ) as group:
            group.await_announced(f"step {moments.randint(8, 30)}", 60.0)
            # One rank, whose death ends the others; or all of them.
            for rank in range(world_size if number % 2 else 1):
                group.kill(world_size - 1 - rank)
        if world_size > 1 and number % 3 == 0:
            # The node of the last ranks goes with its disk.
            shutil.rmtree(nodes[-1])

        found = run_ranks(*(train, world_size, sharding, _STEPS, options), store_per_node=nodes)

        assert all(outcome.first > 0 for outcome in found)
        _assert_goes_on(found, expected)


@pytest.mark.rows(1)
@pytest.mark.fault("interrupted")
@pytest.mark.parametrize("memory", [False, True], ids=["disk", "memory"])
def test_a_signal_to_one_rank_stops_all_after_the_same_step_and_its_state_is_safe(
    memory: bool, tmp_path: Path, long_form: bool, shm_roots: Any
) -> None:
    world_size = 4 if long_form else 2
    moments = random.Random(memory)
    expected = _undisturbed("ddp", world_size, tmp_path)
    for number in range(25 if long_form else 1):
        nodes = shm_roots(2) if memory else stores(tmp_path / f"{number}", 2)
        # No cadence would save before the job is stopped.
        options = {"every": localckpt.Every(steps=10**6), "memory": memory}
        with start_ranks(
            *(train, world_size, "ddp", 10**6, options, 0.005), store_per_node=nodes
        ) as group:
            group.await_announced(f"step {moments.randint(0, 20)}", 60.0)
            told = moments.randrange(world_size)
            group.kill(told, moments.choice([signal.SIGTERM, signal.SIGUSR1]))
            stopped = group.join(60.0)

        (last,) = {outcome.last for outcome in stopped}
        assert all(outcome.stopped.startswith(f"rank {told}: signal") for outcome in stopped)
        steps = max(_STEPS, last + 4)
        found = run_ranks(*(train, world_size, "ddp", steps, options), store_per_node=nodes)
        assert [outcome.first for outcome in found] == [last + 1] * world_size
        if steps == _STEPS:
            _assert_goes_on(found, expected)
