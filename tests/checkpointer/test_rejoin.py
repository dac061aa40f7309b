"""Survivors of a lost rank keep their processes, and go back to their newest checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpointer.loops import stores
from tests.checkpointer.survivors import Survivor, train_through
from tests.ranks import DeadRank, run_ranks

_WORLDS = {
    "a rank replaced": [[0, 1], [0, 2]],
    "the first rank replaced": [[0, 1, 2], [3, 1, 2]],
    "shrunk": [[0, 1, 2], [0, 2]],
    "shrunk, without the first": [[0, 1, 2], [2, 1]],
    "grown": [[0, 1], [0, 1, 2]],
    "shrunk and grown": [[0, 1, 2], [1, 2], [1, 2, 3]],
    "twice in a row": [[0, 1], [0, 2], [3, 2]],
}


def _survive(
    worlds: list[list[int]], tmp_path: Path, *args: Any, **options: Any
) -> dict[int, Survivor]:
    homes = 1 + max(home for world in worlds for home in world)
    digests = tmp_path / "digests"
    digests.mkdir()
    lost = [home for home in range(homes) if home not in worlds[-1]]
    outcomes = run_ranks(
        *(train_through, homes, digests, worlds, {"replication_factor": 2, **options}, *args),
        init_group=False,
        store_per_node=stores(tmp_path / "nodes", homes),
        expect_dead=lost,
        timeout_s=120.0,
    )
    return {n: seen for n, seen in enumerate(outcomes) if not isinstance(seen, DeadRank)}


@pytest.mark.fault("survivors")
@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
@pytest.mark.parametrize("name", _WORLDS)
def test_survivors_go_back_to_the_newest_checkpoint_bit_for_bit(
    name: str, sharded: bool, tmp_path: Path
) -> None:
    worlds = _WORLDS[name]
    survivors = _survive(worlds, tmp_path, sharded)

    for home, seen in survivors.items():
        lives = [number for number, world in enumerate(worlds) if home in world]
        assert [life.rank for life in seen.lives] == [worlds[n].index(home) for n in lives]
        assert all(life.is_as_saved for life in seen.lives)
        for number, life in zip(lives, seen.lives, strict=True):
            if number > 0:
                assert life.first > 0


def test_survivors_read_their_own_memory_and_nothing_from_disk(tmp_path: Path) -> None:
    survivors = _survive([[0, 1], [2, 1]], tmp_path, False, 1 << 16)

    rejoined = survivors[1].lives[1].rejoined
    assert rejoined is not None
    assert rejoined.source == "own memory"
    assert rejoined.nbytes > 1 << 20
    assert rejoined.lost_steps == 7 - rejoined.step
    assert survivors[1].lives[1].read_nbytes == 0
    assert survivors[2].lives[0].rejoined is None
