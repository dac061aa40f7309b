"""Loops of eight kinds of programs go on bit for bit where they were killed, after every step."""

from __future__ import annotations

import inspect
import re
import shutil
from pathlib import Path

import pytest

from examples import loops
from tests.checkpointer.lives import Losses, Tier, lives
from tests.ranks import node_store, run_ranks


def run_lives(
    rank: int, world_size: int, names: list[str], folder: Path, tier: Tier
) -> dict[str, tuple[Losses, Losses, int]]:
    outcomes = {}
    for name in names:
        outcomes[name] = lives(rank, loops.LOOPS[name], node_store(), tier, folder / name)
        shutil.rmtree(node_store())
    return outcomes


@pytest.mark.rows(1)
@pytest.mark.fault("trainer-dies")
@pytest.mark.parametrize("tier", ["nodes", "shared"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_every_kind_of_loop_goes_on_bit_for_bit_after_each_step(
    world_size: int, tier: Tier, tmp_path: Path
) -> None:
    outcomes = run_ranks(
        *(run_lives, world_size, list(loops.LOOPS), tmp_path, tier),
        store_per_node=[tmp_path / f"node {number}" for number in range(world_size)],
        timeout_s=150,
    )

    for of_rank in outcomes:
        for name, (expected, found, count) in of_rank.items():
            assert found == expected, name
            assert count > 5, name


def test_a_program_gets_ten_lines_at_most() -> None:
    sources = re.split(r"^(?:def|class) ", inspect.getsource(loops), flags=re.MULTILINE)
    added = {source.partition("(")[0]: source.count("# +") for source in sources[1:]}

    assert sum(count > 0 for count in added.values()) == len(loops.LOOPS)
    assert max(added.values()) <= 10
