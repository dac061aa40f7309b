"""Jobs of 1, 2, 4 and 8 ranks, with every number of copies that fits, saved and started again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch.distributed as dist

import localckpt
from localckpt import MismatchError, parse_group_sequence
from tests.managers.jobs import KINDS, MAX_S, cliques, files, make_manager, resume, save, state_of
from tests.ranks import node_store, run_ranks

pytestmark = pytest.mark.fault("moved-ranks")

# (replication_jump, replication_factor), or None for no replication; by (ranks, ranks on a node).
_ONE_RANK_A_NODE = {
    1: [None],
    2: [None, (1, 2)],
    4: [None, (1, 2), (2, 2), (1, 3), (1, 4)],
    8: [None, (1, 2), (2, 3), (1, 3), (4, 2), (2, 4), (1, 8)],
}
_TWO_RANKS_A_NODE = {4: [None, (2, 2)], 8: [(2, 2), (2, 4), (2, 3), (4, 2)]}
_ITERATIONS = (3, 4, 10)


def _session(params: tuple[int, int] | None) -> str:
    return f"replication {params}"


def _save_async(
    rank: int, world_size: int, kind: str, sessions: list[tuple[int, int] | None]
) -> None:
    for params in sessions:
        with (
            localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue,
            make_manager(
                kind,
                node_store(),
                _session(params),
                cliques(*params) if params else None,
                keep_last=2,
            ) as manager,
        ):
            assert (manager.rank, manager.world_size) == (rank, world_size)
            assert manager.find_latest() == -1
            for iteration in _ITERATIONS:
                save(manager, state_of(rank, iteration), iteration, queue)
            if params:
                manager.repl_strategy.close()


def _start_again(
    rank: int, world_size: int, kind: str, sessions: list[tuple[int, int] | None]
) -> None:
    for params in sessions:
        repl = cliques(*params) if params else None
        with make_manager(kind, node_store(), _session(params), repl) as manager:
            assert resume(manager, rank, _ITERATIONS[-1]) == "own node"
            manager.save(state_of(rank, 11), 11)
            assert resume(manager, rank, 11) == "own node"
            if repl:
                repl.close()


def _assert_copies(
    nodes: list[Path], world_size: int, params: tuple[int, int] | None, iterations: set[int]
) -> None:
    """Every rank keeps, in its own folder, the shards of its clique and nothing else."""
    groups = (
        parse_group_sequence(*params, world_size) if params else [[r] for r in range(world_size)]
    )
    expected = sorted(
        (rank, owner, iteration)
        for clique in groups
        for rank in clique
        for owner in clique
        for iteration in iterations
    )
    found = []
    for number, node in enumerate(nodes):
        for name in files(node):
            session, rank, file = name.split("/")
            if unquote(session) == f"session-{_session(params)}":
                iteration, owner, *_, suffix = file.split(".")
                assert suffix == "safetensors"
                assert int(rank) * len(nodes) // world_size == number
                found.append((int(rank), int(owner), int(iteration)))
    assert sorted(found) == expected


@pytest.mark.rows(3)
@pytest.mark.parametrize(
    ("world_size", "ranks_per_node", "kind"),
    [
        *((world_size, 1, kind) for kind in KINDS for world_size in (1, 2, 4)),
        *((4, 2, kind) for kind in KINDS),
        (8, 1, "disk"),
        (8, 2, "disk"),
    ],
)
def test_every_rank_gets_its_own_shard_back_and_every_shard_has_its_copies(
    world_size: int,
    ranks_per_node: int,
    kind: str,
    node_dirs: Callable[[int], list[Path]],
    shm_roots: Callable[[int], list[Path]],
) -> None:
    sessions = (_ONE_RANK_A_NODE if ranks_per_node == 1 else _TWO_RANKS_A_NODE)[world_size]
    nodes = (node_dirs if kind == "disk" else shm_roots)(world_size // ranks_per_node)

    run_ranks(_save_async, world_size, kind, sessions, store_per_node=nodes)

    for params in sessions:
        _assert_copies(nodes, world_size, params, {4, 10})

    run_ranks(_start_again, world_size, kind, sessions, store_per_node=nodes)

    # The memory manager keeps one checkpoint unless told otherwise.
    for params in sessions:
        _assert_copies(nodes, world_size, params, {10, 11} if kind == "disk" else {11})


def _work_in_half_of_the_job(rank: int, world_size: int) -> None:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = halves[rank // 2]
    with (
        localckpt.CliqueReplicationStrategy(mine, timeout_s=MAX_S, process_group=mine) as repl,
        make_manager(
            "disk", node_store(), f"half {rank // 2}", repl, process_group=mine
        ) as manager,
    ):
        assert (manager.rank, manager.world_size) == (rank % 2, 2)
        manager.save(state_of(manager.rank, 1), 1)
        resume(manager, manager.rank, 1)
    whole = cliques(1, 2)
    with pytest.raises(MismatchError, match="same process_group"):
        make_manager("disk", node_store(), "whole", whole, process_group=mine)
    whole.close()


def test_the_halves_of_a_job_can_save_each_for_itself(
    node_dirs: Callable[[int], list[Path]],
) -> None:
    run_ranks(_work_in_half_of_the_job, 4, store_per_node=node_dirs(4))
