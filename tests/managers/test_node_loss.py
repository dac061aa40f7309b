"""Nodes are lost, come back empty, with older files, or in other places."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Sequence
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import localckpt
from localckpt import NoReplicasAvailableError, parse_group_sequence
from tests.managers.jobs import (
    KINDS,
    cliques,
    error_of,
    files,
    make_manager,
    resume,
    save,
    state_of,
)
from tests.ranks import run_ranks

Dirs = Callable[[int], list[Path]]


def _base(kind: str, node_dirs: Dirs, shm_roots: Dirs) -> Path:
    return (node_dirs if kind == "disk" else shm_roots)(1)[0]


def _kept(base: Path, which: str, node: int) -> Path:
    return base / f"kept {which}" / f"node{node}"


class _Lives:
    """The lives of one job on nodes that are set up anew for each, in the same processes."""

    def __init__(
        self, kind: str, base: Path, rank: int, ranks_per_node: int, params: Sequence[int] | None
    ) -> None:
        self.rank = rank
        self._kind = kind
        self._base = base
        self._node, place = divmod(rank, ranks_per_node)
        self._sets_up = place == 0
        self._number = 0
        self._repl = cliques(*params) if params else None

    def begin(self, node_holds: str | Path | None, **options: Any) -> Any:
        """A manager on a fresh node: an empty one, or with a copy of what was kept.

        Args:
            node_holds: What :meth:`keep` kept under this name, or some other directory.
        """
        self._number += 1
        root = self._base / f"life {self._number}" / f"node{self._node}"
        if self._sets_up:
            if isinstance(node_holds, str):
                node_holds = _kept(self._base, node_holds, self._node)
            if node_holds is None:
                root.mkdir(parents=True)
            else:
                shutil.copytree(node_holds, root)
        dist.barrier()
        self.root = root
        return make_manager(self._kind, root, "job", self._repl, **options)

    def keep(self, which: str) -> None:
        """Copy the node as it is, for later lives."""
        dist.barrier()
        if self._sets_up:
            shutil.copytree(self.root, _kept(self._base, which, self._node))
        dist.barrier()

    def end(self) -> None:
        if self._repl is not None:
            self._repl.close()


def _lose_every_subset(
    rank: int, world_size: int, kind: str, base: Path, params: Sequence[int], ranks_per_node: int
) -> dict[tuple[int, ...], str]:
    lives = _Lives(kind, base, rank, ranks_per_node, params)
    with lives.begin(None, keep_last=2) as manager, localckpt.AsyncCallsQueue() as queue:
        save(manager, state_of(rank, 6), 6, queue)
        save(manager, state_of(rank, 7), 7, queue)
    lives.keep("all")
    nodes = range(world_size // ranks_per_node)
    told = {}
    for lost in (lost for count in range(len(nodes) + 1) for lost in combinations(nodes, count)):
        with lives.begin(None if rank // ranks_per_node in lost else "all") as manager:
            if manager.find_latest() == -1:
                told[lost] = error_of(manager.load, NoReplicasAvailableError)
            else:
                told[lost] = resume(manager, rank, 7)
                # Whoever was lost is replicated again from here on.
                manager.save(state_of(rank, 8), 8)
                assert len([f for f in files(lives.root) if "000008." in f]) == (
                    ranks_per_node * len(_clique_of(rank, params, world_size))
                )
    lives.end()
    return told


def _clique_of(rank: int, params: Sequence[int], world_size: int) -> list[int]:
    return next(c for c in parse_group_sequence(*params, world_size) if rank in c)


@pytest.mark.rows(1)
@pytest.mark.fault("lost-nodes")
@pytest.mark.parametrize(
    ("kind", "world_size", "ranks_per_node", "params"),
    [
        ("disk", 4, 1, (1, 2)),
        ("memory", 4, 1, (1, 4)),
        ("disk", 4, 2, (2, 2)),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [
                ("memory", 4, 1, (1, 2)),
                ("disk", 4, 1, (2, 2)),
                ("disk", 4, 1, (1, 3)),
                ("disk", 5, 1, (1, 2)),
            ]
        ),
    ],
)
def test_a_checkpoint_survives_exactly_when_every_clique_keeps_a_member(
    kind: str,
    world_size: int,
    ranks_per_node: int,
    params: tuple[int, int],
    node_dirs: Dirs,
    shm_roots: Dirs,
) -> None:
    base = _base(kind, node_dirs, shm_roots)

    told = run_ranks(_lose_every_subset, world_size, kind, base, params, ranks_per_node)

    groups = parse_group_sequence(*params, world_size)
    assert len(told[0]) == 2 ** (world_size // ranks_per_node)
    for lost in told[0]:
        lost_ranks = {rank for rank in range(world_size) if rank // ranks_per_node in lost}
        gone = sorted(rank for clique in groups if set(clique) <= lost_ranks for rank in clique)
        for rank in range(world_size):
            _check_outcome(told[rank][lost], rank, lost_ranks, gone, groups)
        if len(lost) < min(map(len, groups)):
            assert not gone


def _check_outcome(
    told: str, rank: int, lost: Collection[int], gone: list[int], groups: list[list[int]]
) -> None:
    if len(gone) == sum(map(len, groups)):
        assert "no shard of this session was found on any node" in told
    elif gone:
        assert f"lacks the shards of ranks {', '.join(map(str, gone))}" in told
        assert "iteration 7" in told
    elif rank in lost:
        clique = next(clique for clique in groups if rank in clique)
        assert told in {f"peer rank {peer}" for peer in clique if peer not in lost}
    else:
        assert told == "own node"


def _lose_one_after_the_other(rank: int, world_size: int, kind: str, base: Path) -> None:
    lives = _Lives(kind, base, rank, 1, (1, 2))
    with lives.begin(None) as manager:
        manager.save(state_of(rank, 0), 0)
    for life in range(1, 5):
        lives.keep(f"life {life}")
        lost = life % world_size
        with lives.begin(None if rank == lost else f"life {life}") as manager:
            source = resume(manager, rank, life - 1)
            assert source == (f"peer rank {lost ^ 1}" if rank == lost else "own node")
            manager.save(state_of(rank, life), life)
    lives.end()


@pytest.mark.fault("lost-nodes")
@pytest.mark.parametrize("kind", KINDS)
def test_nodes_can_be_lost_one_after_the_other_without_end(
    kind: str, node_dirs: Dirs, shm_roots: Dirs
) -> None:
    run_ranks(_lose_one_after_the_other, 4, kind, _base(kind, node_dirs, shm_roots))


def _return_with_older_files(rank: int, world_size: int, base: Path) -> None:
    lives = _Lives("disk", base, rank, 1, (1, 2))
    with lives.begin(None) as manager:
        manager.save(state_of(rank, 6), 6)
    lives.keep("old")
    with lives.begin("old") as manager:
        assert resume(manager, rank, 6) == "own node"
        manager.save(state_of(rank, 7), 7)
    lives.keep("new")
    cases = [old for count in range(5) for old in combinations(range(4), count)]
    for old in cases:
        with lives.begin("old" if rank in old else "new") as manager:
            both_of_a_clique = {0, 1} <= set(old) or {2, 3} <= set(old)
            if both_of_a_clique:
                assert resume(manager, rank, 6) == "own node"
            else:
                source = resume(manager, rank, 7)
                assert source == (f"peer rank {rank ^ 1}" if rank in old else "own node")
    lives.end()


@pytest.mark.fault("old-files")
def test_nodes_that_return_with_older_files_never_mix_with_newer_ones(node_dirs: Dirs) -> None:
    run_ranks(_return_with_older_files, 4, node_dirs(1)[0])


def _come_back_elsewhere(
    rank: int, world_size: int, kind: str, base: Path, params: Sequence[int] | None
) -> None:
    lives = _Lives(kind, base, rank, 1, params)
    with lives.begin(None, keep_last=1) as manager:
        manager.save(state_of(rank, 7), 7)
    lives.keep("all")
    for places in permutations(range(world_size)):
        if params and sum(place != r for r, place in enumerate(places)) < 3:
            continue
        with lives.begin(_kept(base, "all", places[rank]), keep_last=1) as manager:
            source = resume(manager, rank, 7)

            held_here = _clique_of(places[rank], params, world_size) if params else [places[rank]]
            if rank in held_here:
                assert source == "own node"
            else:
                assert source.startswith("peer rank ")
                holder = places[int(source.removeprefix("peer rank "))]
                assert rank in (_clique_of(holder, params, world_size) if params else [holder])
    # Those who now live where others wrote let the others' shards go, too.
    manager = lives.begin(_kept(base, "all", (rank + 1) % world_size), keep_last=1)
    assert manager.find_latest() == 7
    manager.load()
    manager.save(state_of(rank, 8), 8)
    manager.close()
    assert not [name for name in files(lives.root) if "000007." in name]
    with make_manager(kind, lives.root, "job", lives._repl) as manager:
        assert resume(manager, rank, 8) == "own node"
    lives.end()


@pytest.mark.rows(2)
@pytest.mark.fault("moved-ranks")
@pytest.mark.parametrize(
    ("kind", "world_size", "params"),
    [("disk", 2, None), ("disk", 3, None), ("memory", 3, None), ("disk", 4, (1, 2))],
)
def test_ranks_that_come_back_on_other_nodes_get_their_own_shards(
    kind: str,
    world_size: int,
    params: tuple[int, int] | None,
    node_dirs: Dirs,
    shm_roots: Dirs,
) -> None:
    run_ranks(_come_back_elsewhere, world_size, kind, _base(kind, node_dirs, shm_roots), params)


def _come_back_on_one_node(rank: int, world_size: int, base: Path) -> list[str]:
    lives = _Lives("disk", base, rank, 2, None)
    with lives.begin(None) as manager:
        manager.save(state_of(rank, 7), 7)
    dist.barrier()
    sources = []
    # All four ranks on each of the two nodes in turn: no peer holds what is missing.
    for node in range(2):
        root = lives.root.parent / f"node{node}"
        with make_manager("disk", root, "job") as manager:
            assert manager.find_latest() == -1
            sources.append(error_of(manager.load, NoReplicasAvailableError))
    # Two ranks of the four change places, each with one of the other node.
    root = lives.root.parent / f"node{rank % 2}"
    with make_manager("disk", root, "job") as manager:
        sources.append(resume(manager, rank, 7))
    return sources


@pytest.mark.fault("moved-ranks")
def test_ranks_that_are_dealt_to_nodes_in_another_order_find_each_others_shards(
    node_dirs: Dirs,
) -> None:
    told = run_ranks(_come_back_on_one_node, 4, node_dirs(1)[0])

    assert all("lacks the shards of ranks 2, 3" in sources[0] for sources in told)
    assert all("lacks the shards of ranks 0, 1" in sources[1] for sources in told)
    # Node 0 holds 0 and 1, and now has ranks 0 and 2; node 1 holds 2 and 3, and has 1 and 3.
    assert [sources[2] for sources in told] == [
        "own node",
        "peer rank 0",
        "peer rank 1",
        "own node",
    ]


def _another_number_of_ranks(rank: int, world_size: int, base: Path) -> str:
    with make_manager("disk", base / f"node{rank}", "job") as manager:
        if world_size == 4:
            manager.save(state_of(rank, 3), 3)
            return ""
        return error_of(manager.find_latest, localckpt.MismatchError)


@pytest.mark.fault("world-size")
def test_another_number_of_ranks_is_an_error_that_says_what_to_do(node_dirs: Dirs) -> None:
    base = node_dirs(1)[0]
    run_ranks(_another_number_of_ranks, 4, base)
    before = files(base)

    # The ranks that are missing have left their nodes to the others.
    for number in (2, 3):
        shutil.copytree(
            base / f"node{number}" / "session-job",
            base / f"node{number - 2}" / "session-job",
            dirs_exist_ok=True,
        )
    told = run_ranks(_another_number_of_ranks, 2, base)

    for text in told:
        assert "iteration 3" in text
        assert "saved by 4 ranks, and this job has 2" in text
        assert "Start with 4 ranks" in text
    assert set(before) <= set(files(base))
