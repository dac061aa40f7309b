"""Lost nodes, old files and other places: shards are found, and soon have all their copies."""

from __future__ import annotations

import os
import signal
import time
from contextlib import nullcontext
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import localckpt
from localckpt.availability.inventory import Inventory, ranks_by_node
from localckpt.errors import StorageError
from localckpt.ids import Checkpoint, Generation
from localckpt.replication.exchange import missing_copies
from localckpt.replication.placement import keepers_in
from tests.managers.jobs import (
    KINDS,
    MAX_S,
    before_commit,
    cliques,
    files,
    make_manager,
    reads_fail,
    resume,
)
from tests.ranks import DeadRank, node_store, run_ranks
from tests.scenarios import Begin, Job


@pytest.mark.fault("lost-nodes")
def test_nodes_can_be_lost_one_after_the_other_without_a_save_between(job: Begin) -> None:
    running = job(nodes=4, kind="memory", redundancy=(2, 2)).save(3)

    for lost in (0, 2, 1, 3, 0):
        # The lost node held its own shard and that of its partner.
        running.lose(lost).expect(3, {lost: f"peer rank {lost ^ 2}"}).lacking(2).repaired()
        assert len(running.files()) == 8


@pytest.mark.fault("moved-ranks")
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_came_back_on_other_nodes_need_no_more_copies_and_save(
    kind: str, job: Begin
) -> None:
    running = job(nodes=2, kind=kind, redundancy=(1, 2)).save(3)
    before = running.files()

    running.restart(on=[1, 0]).expect(3).lacking(0)

    assert running.files() == before
    running.expect(3).save(4).expect(4).run()


def _saved_and_lost(job: Begin) -> Job:
    """A job on two nodes that keep each other's shards, of which the first is empty now."""
    return job(nodes=2, redundancy=(1, 2)).save(3).lose(0)


_FROM_PEER = {0: "peer rank 1"}


def test_a_save_waits_until_the_copies_are_made(job: Begin) -> None:
    names = _saved_and_lost(job).expect(3, _FROM_PEER).save(4).lacking(0).files()

    names = [name.rpartition("/")[2] for name in names]
    for iteration in (3, 4):
        for owner in (0, 1):
            assert sum(n.startswith(f"{iteration:012d}.{owner}.") for n in names) == 2


def _refuse_copies(manager: Any) -> None:
    """On one rank no shard of iteration 3 can be written from here on."""

    def refuse(ckpt_id: localckpt.CkptID) -> None:
        if manager.rank == 0 and ckpt_id.iteration == 3:
            raise StorageError("this disk takes nothing")

    before_commit(manager, refuse)


def _forget(manager: Any) -> None:
    """What is found again is what was found before."""
    manager.latest_iteration = -1


@pytest.mark.fault("refused-io")
def test_a_node_that_cannot_keep_the_copies_is_logged_and_training_goes_on(job: Begin) -> None:
    running = _saved_and_lost(job).call(_refuse_copies)

    running.expect(3, _FROM_PEER).lacking(2).call(_forget).expect(3, _FROM_PEER).lacking(2)
    running.save(4).lacking(0)

    assert not [name for name in running.files() if name.endswith((".dirty", ".corrupt"))]
    assert not [name for name in files(running.nodes[0]) if "000003." in name]


def _die_while_copies_are_made(rank: int, world_size: int) -> tuple[int, float]:
    """Load, and kill rank 0 when it is to write a copy; the seconds that closing takes."""

    def die(_: localckpt.CkptID) -> None:
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    with cliques(1, 2, timeout_s=2.0) as repl:
        manager = before_commit(make_manager("disk", node_store(), "job", repl, timeout=2.0), die)
        resume(manager, rank, 3)
        began = time.monotonic()
        manager.close()
    return manager.degraded, time.monotonic() - began


@pytest.mark.fault("lost-during-recovery")
def test_a_rank_that_dies_meanwhile_holds_nobody_up_past_the_deadline(job: Begin) -> None:
    running = _saved_and_lost(job)

    dead, (degraded, seconds) = run_ranks(
        _die_while_copies_are_made, 2, store_per_node=running.nodes, expect_dead=[0]
    )

    assert isinstance(dead, DeadRank)
    assert degraded == 2
    assert seconds < MAX_S
    running.expect(3, _FROM_PEER).repaired().run()


_WORLDS = st.integers(1, 6).flatmap(
    lambda world: st.tuples(
        st.lists(
            st.sets(st.integers(0, world - 1), max_size=world), min_size=world, max_size=world
        ),
        st.integers(1, world),
        st.integers(1, world),
    )
)


@given(_WORLDS)
def test_the_copies_that_are_asked_for_are_those_that_are_missing(
    world: tuple[list[set[int]], int, int],
) -> None:
    """``held[rank]``: owners of the shards on a rank's node; ranks share nodes in turn."""
    held, nodes, members = world
    size = len(held)
    domains = [str(rank % nodes) for rank in range(size)]
    groups = [list(range(first, min(first + members, size))) for first in range(0, size, members)]
    groups = [group for group in groups if len({domains[rank] for rank in group}) == len(group)]
    checkpoint, older = (Checkpoint(Generation(1, n), n, size) for n in (9, 8))
    # Ranks of one node see the same files.
    shards = [set().union(*(held[r] for r in range(size) if r % nodes == n)) for n in range(nodes)]
    inventory = Inventory(ranks_by_node(domains))
    for node in set(domains):
        for owner in shards[int(node)]:
            inventory.add(checkpoint, owner, node, 1)
        for owner in range(size):
            inventory.add(older, owner, node, 1)

    keepers = {
        owner: others for group in groups for owner, others in keepers_in(group, domains).items()
    }
    missing = missing_copies(checkpoint, inventory, keepers)

    for group in groups:
        for owner in group:
            have = {str(n) for n in range(nodes) if owner in shards[n]}
            receivers = missing.get(owner, [])
            assert set(receivers) <= set(group)
            assert not have & {domains[rank] for rank in receivers}
            after = have | {domains[rank] for rank in receivers}
            assert len(after) == max(len(have), len(group))
            if receivers and domains[owner] not in have:
                assert receivers[0] == owner
    assert set(missing) <= {rank for group in groups for rank in group}


def _read_fails_once(manager: Any) -> None:
    _refuse_copies(manager)
    assert manager.find_latest() == 3
    own = next(node_store().rglob(f"000000000003.{manager.rank}.*"))
    before = files(node_store())
    with reads_fail(own) if manager.rank == 0 else nullcontext():
        manager.load()
        manager.close()

    assert files(node_store()) == before
    assert manager.degraded == 1


@pytest.mark.fault("refused-io")
def test_a_good_copy_that_could_not_be_read_once_stays_when_making_it_again_fails(
    can_attach: None, job: Begin
) -> None:
    running = job(nodes=2, redundancy=(1, 2)).save(3).restart().call(_read_fails_once)

    running.restart().expect(3).lacking(0).run()


@pytest.mark.fault("moved-ranks")
def test_ranks_that_come_back_on_other_nodes_get_their_own_shards(job: Begin) -> None:
    saved = job(nodes=3, keep_last=1).save(7).keep("all")

    for places in permutations(range(3)):
        moved = {r: f"peer rank {places.index(r)}" for r in range(3) if places[r] != r}
        saved.bring_back("all").restart(on=places).expect(7, moved).run()
    # Those who now live where others wrote let the others' shards go, too.
    elsewhere = [1, 2, 0]
    saved.bring_back("all").restart(on=elsewhere).call(_load).save(8)
    assert not [name for name in saved.files() if "000007." in name]
    saved.restart(on=elsewhere).expect(8).run()


def _load(manager: Any) -> None:
    assert manager.find_latest() == 7
    manager.load()
