"""Every set of nodes is lost; tests/managers/test_elastic.py has jobs of other shapes."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from localckpt import NoReplicasAvailableError, parse_group_sequence
from tests.managers.jobs import (
    KINDS,
    NodesOf,
    error_of,
    make_manager,
    resume,
    state_of,
    strategy_of,
)
from tests.ranks import run_ranks

_OLDER, _NEWEST = 6, 7


@contextmanager
def _life(kind: str, node: Path, kept: Path | None, repl: Any) -> Iterator[Any]:
    """A manager of the job on a node that is as it was kept, or on an empty one."""
    shutil.rmtree(node, ignore_errors=True)
    if kept is None:
        node.mkdir(parents=True)
    else:
        shutil.copytree(kept, node)
    # Nobody begins while another node is still what it was in the last life.
    dist.barrier()
    with make_manager(kind, node, "job", repl, keep_last=2) as manager:
        yield manager
    dist.barrier()


def _lose(
    rank: int,
    world_size: int,
    kind: str,
    base: Path,
    redundancy: Any,
    sets: dict[tuple[int, ...], list[int]],
) -> tuple[str, list[tuple[str, str]]]:
    """For each set of nodes: what happens when they come back empty, and with older files."""
    node, older, newest = (base / what / str(rank) for what in ("node", "older", "newest"))
    with strategy_of(redundancy) as repl:
        with _life(kind, node, None, repl) as manager:
            manager.save(state_of(rank, _OLDER), _OLDER)
            shutil.copytree(node, older)
            manager.save(state_of(rank, _NEWEST), _NEWEST)
            status = str(manager.status()[0])
        shutil.copytree(node, newest)
        told = []
        for lost, gone in sets.items():
            with _life(kind, node, None if rank in lost else newest, repl) as manager:
                if gone:
                    assert manager.find_latest() == -1
                    empty = error_of(manager.load, NoReplicasAvailableError)
                    # The job can begin anew, on the same nodes.
                    manager.save(state_of(rank, 0), 0)
                    resume(manager, rank, 0)
                else:
                    empty = resume(manager, rank, _NEWEST)
            with _life(kind, node, older if rank in lost else newest, repl) as manager:
                told.append((empty, resume(manager, rank, _OLDER if gone else _NEWEST)))
    return status, told


def _groups(redundancy: Any, world_size: int) -> list[tuple[list[int], int]]:
    """Ranks that protect each other, and how many of them may be lost."""
    if isinstance(redundancy, str):
        return [([*range(world_size)], int(redundancy.split()[1]))]
    return [(ranks, len(ranks) - 1) for ranks in parse_group_sequence(*redundancy, world_size)]


def _gone_with(lost: tuple[int, ...], groups: list[tuple[list[int], int]]) -> list[int]:
    """Ranks whose shards are lost."""
    of_groups = [({*lost} & {*ranks}, most) for ranks, most in groups]
    return sorted(rank for ranks, most in of_groups if len(ranks) > most for rank in ranks)


_PARITY = [(KINDS[g % 2], g, f"parity {m} of {g}") for g in range(4, 9) for m in (1, 2)]


@pytest.mark.rows(3)
@pytest.mark.fault("lost-nodes")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("kind", "world_size", "redundancy"),
    [
        # Two cliques of two, neighbours or not; one of four; as many nodes as no factor divides.
        *(("disk", 4, (1, 2)), ("disk", 4, (2, 2)), ("disk", 4, (1, 4)), ("disk", 4, (1, 3))),
        *(("disk", 5, (1, 2)), ("disk", 6, (3, 2)), ("disk", 6, (2, 3))),
        *(("disk", 3, "parity 1 of 3"), ("memory", 4, "parity 2 of 4")),
        # Large groups differ in what is computed alone, not in what is read and sent.
        *(pytest.param(*row, marks=pytest.mark.long) for row in _PARITY),
    ],
)
def test_every_set_of_lost_nodes_is_survived_that_leaves_each_group_enough_members(
    kind: str,
    world_size: int,
    redundancy: Any,
    nodes_of: NodesOf,
    long_form: bool,
    record_property: Any,
) -> None:
    groups = _groups(redundancy, world_size)
    is_parity = isinstance(redundancy, str)
    counts = range(groups[0][1] + 2 if is_parity else world_size + 1)
    sets = [lost for count in counts for lost in combinations(range(world_size), count)]
    # Some of all sizes, with the last.
    chosen = sets[:: -1 if long_form else -max(1, round(len(sets) / 8))]
    gone = {lost: _gone_with(lost, groups) for lost in chosen}
    base = nodes_of(kind, 1)[0]

    told = run_ranks(_lose, world_size, kind, base, redundancy, gone, timeout_s=1200.0)

    copies = 1 + min(most for _, most in groups)
    for rank, (status, outcomes) in enumerate(told):
        assert status == f"iteration 7 is replicated, {copies} of {copies}"
        (group,) = [ranks for ranks, _ in groups if rank in ranks]
        for (lost, ranks), (empty, older) in zip(gone.items(), outcomes, strict=True):
            peers = {"parity"} if is_parity else {f"peer rank {r}" for r in {*group} - {*lost}}
            sources = peers if rank in lost else {"own node"}
            if len(ranks) == world_size:
                assert "no shard of this session was found on any node" in empty
            elif ranks:
                lacks = r"iteration (\d+) \([^)]*\) lacks the shards of ranks ([\d, ]+)"
                those = ", ".join(map(str, ranks))
                assert {*re.findall(lacks, empty)} == {(f"{i}", those) for i in (_OLDER, _NEWEST)}
            else:
                assert empty in sources
            assert older in ({"own node"} if ranks else sources)
            # Up to one less than the copies, any nodes may go.
            assert bool(ranks) >= (len(lost) == world_size)
            assert not ranks or len(lost) >= copies
    record_property("cases", 2 * len(chosen))
