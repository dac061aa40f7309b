"""Every set of nodes is lost.

tests/managers/test_redundancy.py has what becomes of a job on other nodes and in other shapes.
"""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from localckpt import NoReplicasAvailableError, parse_group_sequence
from localckpt.availability.coverage import complete_checkpoints, describe_incomplete
from localckpt.availability.inventory import Inventory
from localckpt.ids import Checkpoint, Generation, ShardRecord
from tests.faults.lives import Lives
from tests.managers.jobs import (
    error_of,
    resume,
    state_of,
)
from tests.ranks import run_ranks
from tests.replication.plans import plan_exchange

_OLDER, _NEWEST = 6, 7


def subsets(count: int) -> Iterator[tuple[int, ...]]:
    """All sets of numbers below ``count``, the smallest first."""
    for size in range(count + 1):
        yield from combinations(range(count), size)


def gone_with(lost: Collection[int], groups: Sequence[Sequence[int]]) -> list[int]:
    """Ranks whose shards are lost: those of cliques of which nobody is left."""
    return sorted(rank for clique in groups if set(clique) <= set(lost) for rank in clique)


def named_as_gone(text: str) -> set[tuple[int, tuple[int, ...]]]:
    """(iteration, ranks) of each checkpoint that a message says is incomplete."""
    found = re.findall(r"iteration (\d+) \([^)]*\) lacks the shards of ranks ([\d, ]+)", text)
    return {(int(iteration), tuple(map(int, ranks.split(", ")))) for iteration, ranks in found}


def _lose(
    rank: int,
    world_size: int,
    base: Path,
    params: Sequence[int],
    sets: Sequence[tuple[int, ...]],
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
    world_size: int,
    params: tuple[int, int],
    tmp_path: Path,
    long_form: bool,
    record_property: Any,
) -> None:
    groups = parse_group_sequence(*params, world_size)
    sets = list(subsets(world_size))
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
                assert named_as_gone(empty) == {(i, tuple(gone)) for i in (_OLDER, _NEWEST)}
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


def _check_coverage(lost: Collection[int], groups: Sequence[Sequence[int]]) -> None:
    world_size = sum(map(len, groups))
    newest, older = (Checkpoint(Generation(1, i), i, world_size) for i in (_NEWEST, _OLDER))
    held = {
        str(rank): [
            # Who was lost comes back with the older one.
            ShardRecord(checkpoint.shard(owner, "job"), 4096)
            for checkpoint in ([older] if rank in lost else [newest, older])
            for owner in clique
        ]
        for clique in groups
        for rank in clique
    }
    without_older = {r: [x for x in held[r] if x.identity.iteration == _NEWEST] for r in held}

    gone = gone_with(lost, groups)
    newest_only = Inventory.found(without_older)
    assert complete_checkpoints(Inventory.found(held)) == ([older] if gone else [newest, older])
    assert complete_checkpoints(newest_only) == ([] if gone else [newest])
    if gone and len(gone) < world_size:
        assert named_as_gone(describe_incomplete(newest_only)) == {(_NEWEST, tuple(gone))}
    if gone:
        return
    available = {int(r): [x.identity.rank for x in without_older[r]] for r in held}
    plan = plan_exchange(available, {rank: [rank] for rank in range(world_size)})
    assert {entry.receiver for entry in plan.transfers} == set(lost)
    for entry in plan.transfers:
        assert entry.sender not in lost
        assert any({entry.sender, entry.receiver} <= set(clique) for clique in groups)


@pytest.mark.fault("lost-nodes")
@pytest.mark.parametrize(
    "shape", [(8, 1, 2), (9, 3, 3), (10, 1, 4), (12, 2, 3), (96, 8, 3), (256, 1, 2)], ids=str
)
def test_what_is_complete_is_decided_right_for_every_set_of_lost_nodes_or_some_of_many(
    shape: tuple[int, int, int], long_form: bool, record_property: Any
) -> None:
    world_size, jump, factor = shape
    groups = parse_group_sequence(jump, factor, world_size)
    sets: list[Sequence[int]]
    if world_size <= 12:
        sets = list(subsets(world_size))[:: 1 if long_form or world_size < 10 else 7]
    else:
        chance, counts = random.Random(world_size), [1, factor, factor + 1, world_size // 8]
        # One past the limit, where it hurts: a whole clique.
        sets = [chance.sample(range(world_size), count) for count in counts * 5] + groups[::4]

    for lost in sets:
        _check_coverage(lost, groups)

    record_property("cases", len(sets))
