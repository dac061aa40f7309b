"""Nodes are lost, come back with older files, or in other places.

tests/faults/test_lost_nodes.py loses every set of nodes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest

from localckpt import MismatchError
from tests.scenarios import Job

Begin = Callable[..., Job]


@pytest.mark.fault("lost-nodes")
def test_a_checkpoint_survives_exactly_when_every_clique_keeps_a_member(job: Begin) -> None:
    """Two ranks a node, whose cliques are ranks 0 and 2, and 1 and 3."""
    saved = job(nodes=2, ranks=4, redundancy=(2, 2), keep_last=2).save(6, 7).keep("all")

    saved.restart().expect(7).run()
    for lost in (0, 1):
        mine = (2 * lost, 2 * lost + 1)
        saved.bring_back("all").lose(lost)
        saved.expect(7, {rank: f"peer rank {rank ^ 2}" for rank in mine})
        # Whoever was lost is replicated again from here on.
        assert sum("000008." in name for name in saved.save(8).files()) == 8
    saved.lose(0, 1).expect_none("no shard of this session was found on any node").run()


@pytest.mark.fault("lost-nodes")
def test_cliques_that_are_lost_are_named(job: Begin) -> None:
    saved = job(nodes=4, redundancy=(1, 2)).save(7).lose(2, 3)

    saved.expect_none("iteration 7", "lacks the shards of ranks 2, 3").run()


@pytest.mark.fault("lost-nodes")
def test_nodes_can_be_lost_one_after_the_other_without_end(job: Begin) -> None:
    running = job(nodes=4, kind="memory", redundancy=(1, 2)).save(0)

    for life, lost in enumerate((1, 2, 3, 0)):
        running.lose(lost).expect(life, {lost: f"peer rank {lost ^ 1}"}).save(life + 1)
    running.restart().expect(4).run()


@pytest.mark.fault("old-files")
def test_nodes_that_return_with_older_files_never_mix_with_newer_ones(job: Begin) -> None:
    saved = job(nodes=4, redundancy=(1, 2)).save(6).keep("old").expect(6).save(7).keep("new")

    for old in ((0, 3), (0, 1), (1, 2, 3), (0, 1, 2, 3)):
        saved.bring_back("new").bring_back("old", *old)
        if any({first, first + 1} <= set(old) for first in (0, 2)):
            saved.expect(6).run()
        else:
            saved.expect(7, {rank: f"peer rank {rank ^ 1}" for rank in old}).run()


@pytest.mark.fault("moved-ranks")
@pytest.mark.parametrize("nodes", [2, 3])
def test_ranks_that_come_back_on_other_nodes_get_their_own_shards(nodes: int, job: Begin) -> None:
    saved = job(nodes, keep_last=1).save(7).keep("all")

    for places in permutations(range(nodes)):
        moved = {
            rank: f"peer rank {places.index(rank)}" for rank in range(nodes) if places[rank] != rank
        }
        saved.bring_back("all").restart(on=places).expect(7, moved).run()
    # Those who now live where others wrote let the others' shards go, too.
    elsewhere = [*range(1, nodes), 0]
    saved.bring_back("all").restart(on=elsewhere).call(_load).save(8)
    assert not [name for name in saved.files() if "000007." in name]
    saved.restart(on=elsewhere).expect(8).run()


def _load(manager: Any) -> None:
    assert manager.find_latest() == 7
    manager.load()


@pytest.mark.fault("moved-ranks")
def test_cliques_that_change_places_get_their_shards_from_each_other(job: Begin) -> None:
    saved = job(nodes=4, redundancy=(1, 2)).save(7)

    saved.restart(on=(2, 3, 0, 1)).call(_load_from, {0: (2, 3), 1: (2, 3), 2: (0, 1), 3: (0, 1)})
    saved.run()


def _load_from(manager: Any, holders: dict[int, tuple[int, ...]]) -> None:
    _load(manager)
    assert manager.last_load.source in {f"peer rank {peer}" for peer in holders[manager.rank]}


@pytest.mark.fault("moved-ranks")
def test_ranks_that_are_dealt_to_nodes_in_another_order_find_each_others_shards(job: Begin) -> None:
    saved = job(nodes=2, ranks=4).save(7)

    # All four ranks on each of the two nodes in turn: no peer holds what is missing.
    saved.restart(on=[0]).expect_none("lacks the shards of ranks 2, 3")
    saved.restart(on=[1]).expect_none("lacks the shards of ranks 0, 1")
    # Node 0 holds 0 and 1, and now has ranks 0 and 2; node 1 holds 2 and 3, and has 1 and 3.
    saved.restart(on=[0, 1, 0, 1]).expect(7, {1: "peer rank 0", 2: "peer rank 1"}).run()


@pytest.mark.fault("world-size")
def test_another_number_of_ranks_is_an_error_that_says_what_to_do(job: Begin) -> None:
    saved = job(nodes=4).save(3)
    before = saved.files()

    # The ranks that are missing have left their nodes to the others.
    for number in (2, 3):
        there = saved.nodes[number - 2] / "session-job"
        shutil.copytree(saved.nodes[number] / "session-job", there, dirs_exist_ok=True)
    saved.restart(ranks=2, on=[0, 1])
    saved.expect_error(
        MismatchError,
        "iteration 3",
        "saved by 4 ranks, and this job has 2",
        "Start with 4 ranks",
    )

    assert set(before) <= set(saved.files())
