"""Replicas are kept where they are not lost with their originals, or are refused or reported."""

from __future__ import annotations

import logging
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import localckpt
from localckpt import MismatchError, SameMachineReplicationException, parse_group_sequence
from tests.managers.jobs import (
    MAX_S,
    Dirs,
    cliques,
    error_of,
    files,
    in_job,
    make_manager,
    our_threads,
    resume,
    save,
    state_of,
)
from tests.ranks import node_store, run_ranks
from tests.scenarios import Begin


def _share_a_node(rank: int, world_size: int) -> list[str]:
    # When the manager is made, not when the first checkpoint is lost.
    with cliques(1, 2) as eager:
        begin = lambda: make_manager("disk", node_store(), "job", eager)  # noqa: E731
        told = [error_of(begin, SameMachineReplicationException)]
    # A strategy that is built later says so when it is used first.
    for call in ("find_latest", "save"):
        with in_job(localckpt.LazyCliqueReplicationStrategy(1, 2, timeout_s=MAX_S)) as (manager, _):
            args = (state_of(rank, 1), 1) if call == "save" else ()
            use = partial(getattr(manager, call), *args)
            told.append(error_of(use, SameMachineReplicationException))
            assert manager.last_save is None
    assert files(node_store()) == []

    # What the message says does work, whichever kind of strategy it is told to.
    for session, across in (
        ("eager", cliques(2, 2)),
        ("lazy", localckpt.LazyCliqueReplicationStrategy(2, 2, timeout_s=MAX_S)),
        # By default as many as there are ranks on the node, as torchrun tells it.
        ("default", localckpt.LazyCliqueReplicationStrategy(timeout_s=MAX_S)),
    ):
        with across, make_manager("disk", node_store(), session, across) as manager:
            assert manager.find_latest() == -1
            manager.save(state_of(rank, 1), 1)
            assert resume(manager, rank, 1) == "own node"
        owners = [n.split(".")[1] for n in files(node_store()) if f"-{session}/{rank}/" in n]
        assert sorted(owners) == [str(rank % 2), str(rank % 2 + 2)]
    assert our_threads() == []
    return told


def test_a_clique_on_one_node_is_refused_with_a_jump_that_works(node_dirs: Dirs) -> None:
    told = run_ranks(_share_a_node, 4, store_per_node=node_dirs(2))

    for text in (text for texts in told for text in texts):
        assert "ranks [0, 1]" in text
        assert "ranks [2, 3]" in text
        assert "replication_jump=2" in text


def _in_racks(rank: int, racks: str | None) -> Any:
    options = {"failure_domain": racks[rank]} if racks else {}
    made = localckpt.CliqueReplicationStrategy.from_replication_params(timeout_s=MAX_S, **options)
    return in_job(made)


def _by_domains(rank: int, world_size: int, racks: str | None) -> list[str]:
    with _in_racks(rank, racks) as (manager, _):
        if manager.find_latest() == -1:
            manager.save(state_of(rank, 1), 1)
        else:
            resume(manager, rank, 1)
    return [n.rpartition("/")[2].split(".")[1] for n in files(node_store()) if f"/{rank}/" in n]


@pytest.mark.fault("lost-nodes", "moved-ranks")
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_uneven_nodes_form_cliques_by_themselves_and_any_one_may_be_lost(
    lost: int, node_dirs: Dirs
) -> None:
    nodes = node_dirs(3)
    # Five ranks on three nodes: two, two and one.
    run_ranks(_by_domains, 5, None, store_per_node=nodes)
    (nodes[lost],) = node_dirs(1)

    # With the nodes in another order the ranks are elsewhere, too, and find their shards.
    run_ranks(_by_domains, 5, None, store_per_node=nodes[1:] + nodes[:1])


def test_copies_are_in_other_racks_where_racks_are_given(node_dirs: Dirs) -> None:
    kept = run_ranks(_by_domains, 4, "xxyy", store_per_node=node_dirs(4))

    assert kept == [["0", "2"], ["1", "3"], ["0", "2"], ["1", "3"]]


_CLIQUES = [[2], [0, 3], [1, 4]]


def _strategy() -> Any:
    groups = {rank: dist.new_group(ranks) for ranks in _CLIQUES for rank in ranks[:1]}
    mine = next(ranks for ranks in _CLIQUES if dist.get_rank() in ranks)
    return localckpt.CliqueReplicationStrategy(groups[mine[0]], timeout_s=MAX_S)


def _save_and_lose(rank: int, world_size: int) -> dict[str, Any]:
    warned: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("localckpt").addHandler(handler)
    with in_job(_strategy(), keep_last=1) as (manager, queue):
        save(manager, state_of(rank, 1), 1)
        save(manager, state_of(rank, 2), 2, queue)
        told: dict[str, Any] = {
            "status": str(manager.status()[0]),
            "survives": manager.status()[0].survives_node_loss,
            "degraded": (manager.degraded, manager.degraded_saves),
            "breaking": manager.explain().breaking,
            "warned": [text for text in warned if "has no other member" in text],
        }
    dist.barrier()
    if rank in (0, 4):
        shutil.rmtree(node_store())
        node_store().mkdir()
    dist.barrier()
    with in_job(_strategy()) as (manager, _):
        told["loaded"] = resume(manager, rank, 2)
        manager.save(state_of(rank, 3), 3)
        assert manager.status()[0].lacking == 0
    return told


def test_a_rank_without_replicas_saves_and_all_that_is_said_of_losses_knows_it(
    node_dirs: Dirs,
) -> None:
    told = run_ranks(_save_and_lose, 5, store_per_node=node_dirs(5))

    for rank, of_rank in enumerate(told):
        assert of_rank["status"] == "iteration 2 is local"
        assert not of_rank["survives"]
        assert of_rank["degraded"] == (0, 0)
        # One node of five is enough, and of pairs those with it and the two cliques.
        assert ("the node of rank 2",) in of_rank["breaking"]
        assert len(of_rank["breaking"]) == 3
        assert len(of_rank["warned"]) == (rank == 2)
        assert of_rank["loaded"] == {0: "peer rank 3", 4: "peer rank 1"}.get(rank, "own node")


def _assert_copies(
    nodes: list[Path], world_size: int, params: tuple[int, int], iterations: set[int]
) -> None:
    """Every rank keeps, in its own folder, the shards of its clique and nothing else."""
    expected = sorted(
        (rank, owner, iteration)
        for clique in parse_group_sequence(*params, world_size)
        for rank in clique
        for owner in clique
        for iteration in iterations
    )
    found = []
    for number, node in enumerate(nodes):
        for name in files(node):
            _, rank, file = name.split("/")
            iteration, owner, *_, suffix = file.split(".")
            assert suffix == "safetensors"
            assert int(rank) * len(nodes) // world_size == number
            found.append((int(rank), int(owner), int(iteration)))
    assert sorted(found) == expected


@pytest.mark.fault("moved-ranks")
@pytest.mark.parametrize(
    ("world_size", "ranks_per_node", "params"),
    [(4, 1, (1, 3)), (8, 2, (2, 3))],
)
def test_every_rank_gets_its_own_shard_back_and_every_shard_has_its_copies(
    world_size: int, ranks_per_node: int, params: tuple[int, int], job: Begin
) -> None:
    nodes = world_size // ranks_per_node
    running = job(nodes, ranks=world_size, redundancy=params, keep_last=2).save(3, 4, 10)
    running.run()
    _assert_copies(running.nodes, world_size, params, {4, 10})

    running.restart().expect(10).save(11).expect(11).run()
    _assert_copies(running.nodes, world_size, params, {10, 11})


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
    node_dirs: Dirs,
) -> None:
    run_ranks(_work_in_half_of_the_job, 4, store_per_node=node_dirs(4))
