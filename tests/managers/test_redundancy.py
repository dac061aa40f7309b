"""After a restart the loaded checkpoint is soon on as many nodes again as it was meant to be."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
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
    MAX_S,
    before_commit,
    cliques,
    damage,
    files,
    make_manager,
    reads_fail,
    resume,
    state_of,
)
from tests.ranks import DeadRank, node_store, run_ranks
from tests.scenarios import Job

Begin = Callable[..., Job]
Dirs = Callable[[int], list[Path]]


@pytest.mark.fault("lost-nodes")
def test_nodes_can_be_lost_one_after_the_other_without_a_save_between(job: Begin) -> None:
    running = job(nodes=4, kind="memory", redundancy=(2, 2)).save(3)

    for lost in (0, 2, 1, 3, 0):
        # The lost node held its own shard and that of its partner.
        running.lose(lost).expect(3, {lost: f"peer rank {lost ^ 2}"}).lacking(2).repaired()
        assert len(running.files()) == 8


@pytest.mark.fault("moved-ranks")
def test_ranks_that_came_back_on_other_nodes_need_no_more_copies(job: Begin) -> None:
    running = job(nodes=2, redundancy=(1, 2)).save(3)
    before = running.files()

    running.restart(on=[1, 0]).expect(3).lacking(0)

    assert running.files() == before


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


def _dying(repl: Any, timeout_s: float) -> Any:
    """Make a manager that is killed on one rank when it is to write a copy."""
    manager = make_manager("disk", node_store(), "job", repl, timeout=timeout_s)

    def die(ckpt_id: localckpt.CkptID) -> None:
        if manager.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return before_commit(manager, die)


def _restart_and_die(rank: int, world_size: int) -> tuple[int, float]:
    repl = cliques(1, 2, timeout_s=2.0)
    manager = _dying(repl, 2.0)
    resume(manager, rank, 3)
    began = time.monotonic()
    manager.close()
    repl.close()
    return manager.degraded, time.monotonic() - began


@pytest.mark.fault("lost-during-recovery")
def test_a_rank_that_dies_meanwhile_holds_nobody_up_past_the_deadline(job: Begin) -> None:
    running = _saved_and_lost(job)

    dead, (degraded, seconds) = run_ranks(
        _restart_and_die, 2, store_per_node=running.nodes, expect_dead=[0]
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


def _note_inodes(manager: Any, noted: str) -> None:
    """Write down which files hold the shards; what was written down before must still hold."""
    inodes = sorted(path.stat().st_ino for path in node_store().rglob("*.safetensors"))
    assert len(inodes) == 2
    note = node_store() / noted
    if note.exists():
        assert note.read_text() == str(inodes)
    note.write_text(str(inodes))


def test_a_second_load_makes_no_copy_that_is_there(job: Begin) -> None:
    running = _saved_and_lost(job).expect(3, _FROM_PEER).repaired().call(_note_inodes, "inodes")

    running.expect(3).repaired().call(_note_inodes, "inodes").run()


def _damage_the_other_copy(manager: Any, folder: Path) -> None:
    if manager.rank == 3:
        (own,) = folder.rglob("000000000003.3.*")
        damage(own)


@pytest.mark.fault("bad-copies")
def test_every_rank_of_a_node_can_send_a_copy_that_another_one_made(job: Begin) -> None:
    running = job(nodes=2, ranks=4, redundancy=(2, 2)).save(3).lose(0)

    running.expect(3, {0: "peer rank 2", 1: "peer rank 3"}).repaired()
    # The only other copy was written on node 0 by rank 1, whatever rank 0 is asked for.
    running.call(_damage_the_other_copy, running.nodes[1])
    running.expect(3, {3: "peer rank 0"}).run()


def _await_copies(manager: Any) -> None:
    deadline = time.monotonic() + MAX_S
    while manager.degraded and time.monotonic() < deadline:
        time.sleep(0.01)


def _empty(node: Path) -> None:
    shutil.rmtree(node)
    node.mkdir()


def _two_tiers(rank: int, world_size: int, memory: list[Path]) -> list[int]:
    with (
        cliques(1, 2) as repl,
        make_manager("disk", node_store(), "job", repl) as on_disk,
        make_manager("memory", memory[rank], "job", repl) as in_memory,
    ):
        for manager in (on_disk, in_memory):
            if manager.find_latest() == -1:
                manager.save(state_of(rank, 3), 3)
            else:
                manager.load()
        for manager in (on_disk, in_memory):
            _await_copies(manager)
        return [on_disk.degraded, in_memory.degraded]


def test_two_managers_that_share_a_strategy_make_their_copies_at_once(
    node_dirs: Dirs, shm_roots: Dirs
) -> None:
    nodes, memory = node_dirs(2), shm_roots(2)
    run_ranks(_two_tiers, 2, memory, store_per_node=nodes)
    _empty(nodes[0])
    _empty(memory[0])

    told = run_ranks(_two_tiers, 2, memory, store_per_node=nodes)

    assert told == [[0, 0]] * 2
    assert len(files(*nodes)) == len(files(*memory)) == 4


def _leave_with_an_error(rank: int, world_size: int) -> float:
    repl = cliques(1, 2, timeout_s=60.0)
    manager = _dying(repl, 60.0)
    resume(manager, rank, 3)
    began = time.monotonic()
    try:
        with manager:
            # The other rank is dead by then.
            time.sleep(2.0)
            raise ValueError("the training failed")
    except ValueError:
        repl.close()
    return time.monotonic() - began


@pytest.mark.fault("interrupted")
def test_an_error_of_the_training_is_not_held_up_by_copies_that_wait_for_a_peer(
    job: Begin,
) -> None:
    running = _saved_and_lost(job)
    running.run()

    _, seconds = run_ranks(_leave_with_an_error, 2, store_per_node=running.nodes, expect_dead=[0])

    assert seconds < 20.0


def _leave_without_close(rank: int, world_size: int) -> None:
    repl = cliques(1, 2)
    manager = make_manager("disk", node_store(), "job", repl)
    assert manager.find_latest() == 3
    manager.load()


def _save_large(rank: int, world_size: int) -> None:
    with cliques(1, 2) as repl, make_manager("disk", node_store(), "job", repl) as manager:
        manager.save(state_of(rank, 3, 64 << 20), 3)


@pytest.mark.fault("interrupted")
def test_a_process_that_ends_meanwhile_ends_well_and_leaves_whole_copies_or_none(
    node_dirs: Dirs,
) -> None:
    nodes = node_dirs(2)
    run_ranks(_save_large, 2, store_per_node=nodes)
    _empty(nodes[0])

    # A rank that ends by a signal fails this.
    run_ranks(_leave_without_close, 2, store_per_node=nodes)

    assert not [name for name in files(*nodes) if name.endswith((".dirty", ".corrupt"))]
    for path in nodes[0].rglob("*.safetensors"):
        assert path.read_bytes() == next(nodes[1].rglob(path.name)).read_bytes()
