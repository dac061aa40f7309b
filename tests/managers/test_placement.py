"""Replicas are kept where they are not lost with their originals, or are refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

import localckpt
from localckpt import SameMachineReplicationException
from tests.managers.jobs import (
    KINDS,
    MAX_S,
    cliques,
    error_of,
    files,
    make_manager,
    our_threads,
    resume,
    state_of,
)
from tests.ranks import node_store, run_ranks

Dirs = Callable[[int], list[Path]]


def _share_a_strategy(rank: int, world_size: int, one_store: Path) -> str:
    """Cliques that were formed for one manager's stores, with another's in one place."""
    replicas = localckpt.CliqueReplicationStrategy.from_replication_params(
        replication_factor=2, timeout_s=MAX_S
    )
    with replicas, make_manager("disk", node_store(), "job", replicas) as manager:
        told = error_of(
            lambda: make_manager("disk", one_store, "job", replicas),
            SameMachineReplicationException,
        )
        manager.save(state_of(rank, 1), 1)
        assert resume(manager, rank, 1) == "own node"
    return told


def test_cliques_are_checked_for_every_manager_that_uses_them(node_dirs: Dirs) -> None:
    *stores, one_store = node_dirs(3)

    told = run_ranks(_share_a_strategy, 2, one_store, store_per_node=stores)

    assert told[0] == told[1]
    assert "ranks [0, 1] of clique [0, 1]" in told[0]


def _share_a_node(rank: int, world_size: int, kind: str) -> list[str]:
    told = []
    node_ranks = cliques(1, 2)
    # When the manager is made, not when the first checkpoint is lost.
    told.append(
        error_of(
            lambda: make_manager(kind, node_store(), "job", node_ranks),
            SameMachineReplicationException,
        )
    )
    node_ranks.close()

    # A strategy that is built later says so when it is used first.
    lazy = localckpt.LazyCliqueReplicationStrategy(1, 2, timeout_s=MAX_S)
    with make_manager(kind, node_store(), "job", lazy) as manager:
        told.append(error_of(manager.find_latest, SameMachineReplicationException))
    lazy.close()
    lazy = localckpt.LazyCliqueReplicationStrategy(1, 2, timeout_s=MAX_S)
    with make_manager(kind, node_store(), "job", lazy) as manager:
        told.append(
            error_of(lambda: manager.save(state_of(rank, 1), 1), SameMachineReplicationException)
        )
        assert manager.last_save is None
    lazy.close()
    assert files(node_store()) == []

    # What the message says does work, whichever kind of strategy it is told to.
    for session, across in (
        ("eager", cliques(2, 2)),
        ("lazy", localckpt.LazyCliqueReplicationStrategy(2, 2, timeout_s=MAX_S)),
        # By default as many as there are ranks on the node, as torchrun tells it.
        ("default", localckpt.LazyCliqueReplicationStrategy(timeout_s=MAX_S)),
    ):
        with make_manager(kind, node_store(), session, across) as manager:
            assert manager.find_latest() == -1
            manager.save(state_of(rank, 1), 1)
            assert resume(manager, rank, 1) == "own node"
        across.close()
        owners = [n.split(".")[1] for n in files(node_store()) if f"-{session}/{rank}/" in n]
        assert sorted(owners) == [str(rank % 2), str(rank % 2 + 2)]
    assert our_threads() == []
    return told


@pytest.mark.parametrize("kind", KINDS)
def test_a_clique_on_one_node_is_refused_with_a_jump_that_works(
    kind: str, node_dirs: Dirs, shm_roots: Dirs
) -> None:
    nodes = (node_dirs if kind == "disk" else shm_roots)(2)

    told = run_ranks(_share_a_node, 4, kind, store_per_node=nodes)

    for text in (text for texts in told for text in texts):
        assert "ranks [0, 1]" in text
        assert "ranks [2, 3]" in text
        assert "replication_jump=2" in text


def _one_store_for_all(rank: int, world_size: int) -> str:
    strategy = cliques(1, 2)
    told = error_of(
        lambda: make_manager("disk", node_store(), "job", strategy), SameMachineReplicationException
    )
    strategy.close()
    return told


def test_one_store_for_all_ranks_is_refused_whatever_the_jump(node_dirs: Dirs) -> None:
    told = run_ranks(_one_store_for_all, 2, store_per_node=node_dirs(1))

    assert len(set(told)) == 1
    assert "repl_strategy=None" in told[0]


def _explicit_groups(rank: int, world_size: int) -> tuple[str, str]:
    same = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    across = [dist.new_group([0, 3]), dist.new_group([1, 2])][rank in (1, 2)]
    refused = localckpt.CliqueReplicationStrategy(same, timeout_s=MAX_S)
    told = error_of(
        lambda: make_manager("disk", node_store(), "job", refused), SameMachineReplicationException
    )
    refused.close()
    strategy = localckpt.CliqueReplicationStrategy(across, timeout_s=MAX_S)
    with make_manager("disk", node_store(), "job", strategy) as manager:
        manager.save(state_of(rank, 1), 1)
        assert resume(manager, rank, 1) == "own node"
    strategy.close()
    return told, " ".join(n.rpartition("/")[2] for n in files(node_store()) if f"/{rank}/" in n)


def test_groups_of_ones_own_are_checked_and_used_as_they_are(node_dirs: Dirs) -> None:
    told = run_ranks(_explicit_groups, 4, store_per_node=node_dirs(2))

    for rank, (text, names) in enumerate(told):
        assert "ranks [0, 1]" in text
        assert sorted(name.split(".")[1] for name in names.split()) == sorted(
            [str(rank), str(3 - rank)]
        )


def _by_domains(rank: int, world_size: int, racks: str | None) -> list[str]:
    options = {"failure_domain": racks[rank]} if racks else {}
    made = localckpt.CliqueReplicationStrategy.from_replication_params(timeout_s=MAX_S, **options)
    with made, make_manager("disk", node_store(), "job", made) as manager:
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


def _stands(rank: int, world_size: int, racks: str) -> tuple[str, str, int, list[str]]:
    made = localckpt.CliqueReplicationStrategy.from_replication_params(
        timeout_s=MAX_S, failure_domain=racks[rank]
    )
    with made, make_manager("disk", node_store(), "job", made) as manager:
        manager.save(state_of(rank, 1), 1)
        saved = str(manager.status()[0])
        # The third keeps the copies of both others, and is lost with one or the other.
        assert {len(lost) for lost in manager.explain().breaking} == {2}
        assert len(manager.explain().breaking) == 2
    again = localckpt.CliqueReplicationStrategy.from_replication_params(
        timeout_s=MAX_S, failure_domain=racks[rank]
    )
    with again, make_manager("disk", node_store(), "job", again) as manager:
        assert resume(manager, rank, 1) == "own node"
        found = str(manager.status()[0])
    return saved, found, manager.degraded, files(node_store())


def test_what_is_found_after_a_restart_stands_where_the_save_left_it(node_dirs: Dirs) -> None:
    # The first two share a rack, so neither keeps a copy for the other.
    told = run_ranks(_stands, 3, "aab", store_per_node=node_dirs(3))

    assert {t[:3] for t in told} == {
        ("iteration 1 is replicated, 2 of 2", "iteration 1 is replicated, 2 of 2", 0)
    }
    owners = [sorted(name.rpartition("/")[2].split(".")[1] for name in t[3]) for t in told]
    assert owners == [["0", "2"], ["1"], ["0", "1", "2"]]


def test_copies_are_in_other_racks_where_racks_are_given(node_dirs: Dirs) -> None:
    kept = run_ranks(_by_domains, 4, "xxyy", store_per_node=node_dirs(4))

    assert kept == [["0", "2"], ["1", "3"], ["0", "2"], ["1", "3"]]


def _named_rack(rank: int, world_size: int) -> str:
    os.environ["LOCALCKPT_FAILURE_DOMAIN"] = "x"
    lazy = localckpt.LazyCliqueReplicationStrategy(timeout_s=MAX_S)
    with lazy, make_manager("disk", node_store(), "job", lazy) as manager:
        told = error_of(manager.find_latest, SameMachineReplicationException)
    return told.partition(",")[0]


def test_one_rack_for_all_is_refused(node_dirs: Dirs) -> None:
    told = run_ranks(_named_rack, 2, store_per_node=node_dirs(2))

    assert (
        told == ["SameMachineReplicationException: all 2 ranks are in one outer failure domain"] * 2
    )
