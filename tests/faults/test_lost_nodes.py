"""Every set of nodes is lost; tests/managers/test_elastic.py has jobs of other shapes."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from localckpt import NoReplicasAvailableError, parse_group_sequence
from tests.faults.lives import Lives
from tests.managers.jobs import error_of, resume, state_of
from tests.ranks import run_ranks

_OLDER, _NEWEST = 6, 7


def gone_with(lost: Collection[int], groups: Sequence[Sequence[int]]) -> list[int]:
    """Ranks whose shards are lost: those of cliques of which nobody is left."""
    return sorted(rank for clique in groups if set(clique) <= set(lost) for rank in clique)


def _lose(
    rank: int, world_size: int, base: Path, params: Sequence[int], sets: Sequence[tuple[int, ...]]
) -> list[tuple[str, str]]:
    """For each set of nodes: what happens when they come back empty, and with older files."""
    lives = Lives("disk", base, rank, params)
    with lives.life(None, keep_last=2) as manager:
        manager.save(state_of(rank, _OLDER), _OLDER)
        lives.keep("older")
        manager.save(state_of(rank, _NEWEST), _NEWEST)
    lives.keep("newest")
    groups = parse_group_sequence(*params, world_size)
    told = []
    for lost in sets:
        with lives.life(None if rank in lost else "newest", keep_last=2) as manager:
            if gone_with(lost, groups):
                assert manager.find_latest() == -1
                empty = error_of(manager.load, NoReplicasAvailableError)
                # The job can begin anew, on the same nodes.
                manager.save(state_of(rank, 0), 0)
                resume(manager, rank, 0)
            else:
                empty = resume(manager, rank, _NEWEST)
        with lives.life("older" if rank in lost else "newest", keep_last=2) as manager:
            older = resume(manager, rank, _OLDER if gone_with(lost, groups) else _NEWEST)
        told.append((empty, older))
    lives.close()
    return told


@pytest.mark.rows(1)
@pytest.mark.fault("lost-nodes")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("world_size", "params"),
    # Two cliques of two, neighbours or not; one of four; as many nodes as no factor divides; three.
    [(4, (1, 2)), (4, (2, 2)), (4, (1, 4)), (4, (1, 3)), (5, (1, 2)), (6, (3, 2)), (6, (2, 3))],
)
def test_every_set_of_lost_nodes_is_survived_that_leaves_each_clique_a_member(
    world_size: int, params: tuple[int, int], tmp_path: Path, long_form: bool, record_property: Any
) -> None:
    groups = parse_group_sequence(*params, world_size)
    counts = range(world_size + 1)
    sets = [lost for count in counts for lost in combinations(range(world_size), count)]
    # Some of all sizes, with that of all nodes.
    sets = sets[:: -1 if long_form else -(len(sets) // 8)]

    told = run_ranks(_lose, world_size, tmp_path, params, sets, timeout_s=1200.0)

    for rank in range(world_size):
        for lost, (empty, older) in zip(sets, told[rank], strict=True):
            gone = gone_with(lost, groups)
            peers = {f"peer rank {r}" for c in groups if rank in c for r in c if r not in lost}
            if len(gone) == world_size:
                assert "no shard of this session was found on any node" in empty
            elif gone:
                lacks = r"iteration (\d+) \([^)]*\) lacks the shards of ranks ([\d, ]+)"
                ranks = ", ".join(map(str, gone))
                assert {*re.findall(lacks, empty)} == {(f"{i}", ranks) for i in (_OLDER, _NEWEST)}
            else:
                assert {empty} <= (peers if rank in lost else {"own node"})
            if gone:
                assert older == "own node"
            else:
                assert {older} <= (peers if rank in lost else {"own node"})
            assert gone or len(lost) < world_size
            # Up to one less than the factor, any nodes may go.
            assert not gone or len(lost) >= min(map(len, groups))
    record_property("cases", 2 * len(sets))
