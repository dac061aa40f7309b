"""A loop over the front door that is killed goes on bit for bit where it was."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

import localckpt
from examples import loops
from tests.checkpointer.loops import Sharding, Tier, lives, stores, train
from tests.ranks import node_store, on_ranks, run_ranks, start_ranks

_STEPS = 40


@pytest.mark.rows(2)
@pytest.mark.fault("trainer-dies", "lost-nodes")
@pytest.mark.parametrize(
    ("sharding", "world_size"), [("plain", 1), ("ddp", 2), ("fsdp2", 2), ("fsdp1", 2)]
)
def test_a_loop_that_is_killed_goes_on_bit_for_bit(
    sharding: Sharding, world_size: int, tmp_path: Path
) -> None:
    never = {"every": localckpt.Every(steps=10**6)}
    expected = run_ranks(
        *(train, world_size, sharding, _STEPS, never),
        store_per_node=stores(tmp_path / "undisturbed", 1),
    )
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

    for (first, losses, weights), (_, all_losses, all_weights) in zip(found, expected, strict=True):
        assert first > 0
        assert losses == all_losses[first:]
        assert weights == all_weights


@pytest.mark.rows(1)
@pytest.mark.fault("trainer-dies")
@pytest.mark.parametrize("tier", ["nodes", "shared"])
@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks(nodes=1, timeout_s=150)
def test_every_kind_of_loop_goes_on_bit_for_bit_after_each_step(
    rank: int, world_size: int, tier: Tier
) -> None:
    for name, program in loops.LOOPS.items():
        own, shared = node_store() / f"{name} {rank}", node_store() / f"{name} shared"
        expected, found, count = lives(rank, program, own, tier, shared)
        assert found == expected, name
        assert count > 5, name
