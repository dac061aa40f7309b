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
    KINDS,
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

Dirs = Callable[[int], list[Path]]


def _save(rank: int, world_size: int, kind: str, jump: int, factor: int) -> None:
    with cliques(jump, factor) as repl, make_manager(kind, node_store(), "job", repl) as manager:
        manager.save(state_of(rank, 3), 3)


def _restart(rank: int, world_size: int, kind: str, jump: int, factor: int) -> tuple[str, int, int]:
    """Load, and wait for the copies.

    Returns:
        Where the shard came from, and how many shards were degraded before and after.
    """
    with cliques(jump, factor) as repl, make_manager(kind, node_store(), "job", repl) as manager:
        came_from = resume(manager, rank, 3)
        before = manager.degraded
        _await_copies(manager)
        return came_from, before, manager.degraded


def _await_copies(manager: Any) -> None:
    deadline = time.monotonic() + MAX_S
    while manager.degraded and time.monotonic() < deadline:
        time.sleep(0.01)


def _empty(node: Path) -> None:
    shutil.rmtree(node)
    node.mkdir()


@pytest.mark.fault("lost-nodes")
@pytest.mark.parametrize("kind", KINDS)
def test_nodes_can_be_lost_one_after_the_other_without_a_save_between(
    kind: str, node_dirs: Dirs, shm_roots: Dirs
) -> None:
    nodes = (node_dirs if kind == "disk" else shm_roots)(4)
    run_ranks(_save, 4, kind, 2, 2, store_per_node=nodes)

    for lost in (0, 2, 1, 3, 0):
        _empty(nodes[lost])
        told = run_ranks(_restart, 4, kind, 2, 2, store_per_node=nodes)

        # The lost node held its own shard and that of its partner.
        assert told == [
            (f"peer rank {lost ^ 2}" if rank == lost else "own node", 2, 0) for rank in range(4)
        ]
        assert len(files(*nodes)) == 8


@pytest.mark.fault("moved-ranks")
def test_ranks_that_came_back_on_other_nodes_need_no_more_copies(node_dirs: Dirs) -> None:
    nodes = node_dirs(2)
    run_ranks(_save, 2, "disk", 1, 2, store_per_node=nodes)
    before = files(*nodes)

    told = run_ranks(_restart, 2, "disk", 1, 2, store_per_node=nodes[::-1])

    assert told == [("own node", 0, 0)] * 2
    assert files(*nodes) == before


def _restart_and_save(rank: int, world_size: int) -> int:
    with cliques(1, 2) as repl, make_manager("disk", node_store(), "job", repl) as manager:
        resume(manager, rank, 3)
        manager.save(state_of(rank, 4), 4)
        return int(manager.degraded)


def test_a_save_waits_until_the_copies_are_made(node_dirs: Dirs) -> None:
    nodes = node_dirs(2)
    run_ranks(_save, 2, "disk", 1, 2, store_per_node=nodes)
    _empty(nodes[0])

    told = run_ranks(_restart_and_save, 2, store_per_node=nodes)

    assert told == [0, 0]
    names = [name.rpartition("/")[2] for name in files(*nodes)]
    for iteration in (3, 4):
        for owner in (0, 1):
            assert sum(n.startswith(f"{iteration:012d}.{owner}.") for n in names) == 2


def _refusing(repl: Any) -> Any:
    """Make a manager that on one rank can write no shard of iteration 3."""
    manager = make_manager("disk", node_store(), "job", repl)

    def refuse(ckpt_id: localckpt.CkptID) -> None:
        if manager.rank == 0 and ckpt_id.iteration == 3:
            raise StorageError("this disk takes nothing")

    return before_commit(manager, refuse)


def _restart_on_a_disk_that_refuses(rank: int, world_size: int) -> list[int]:
    told = []
    with cliques(1, 2) as repl, _refusing(repl) as manager:
        resume(manager, rank, 3)
        told.append(manager.degraded)
        # What is found again is what was found before.
        manager.latest_iteration = -1
        resume(manager, rank, 3)
        told.append(manager.degraded)
        manager.save(state_of(rank, 4), 4)
        told.append(manager.degraded)
    return told


@pytest.mark.fault("refused-io")
def test_a_node_that_cannot_keep_the_copies_is_logged_and_training_goes_on(node_dirs: Dirs) -> None:
    nodes = node_dirs(2)
    run_ranks(_save, 2, "disk", 1, 2, store_per_node=nodes)
    _empty(nodes[0])

    told = run_ranks(_restart_on_a_disk_that_refuses, 2, store_per_node=nodes)

    assert told == [[2, 2, 0]] * 2
    assert not [name for name in files(*nodes) if name.endswith((".dirty", ".corrupt"))]
    assert not [name for name in files(nodes[0]) if "000003." in name]


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
def test_a_rank_that_dies_meanwhile_holds_nobody_up_past_the_deadline(node_dirs: Dirs) -> None:
    nodes = node_dirs(2)
    run_ranks(_save, 2, "disk", 1, 2, store_per_node=nodes)
    _empty(nodes[0])

    dead, (degraded, seconds) = run_ranks(
        _restart_and_die, 2, store_per_node=nodes, expect_dead=[0]
    )

    assert isinstance(dead, DeadRank)
    assert degraded == 2
    assert seconds < MAX_S
    told = run_ranks(_restart, 2, "disk", 1, 2, store_per_node=nodes)
    assert [after for _, _, after in told] == [0, 0]


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


def _read_fails_once(rank: int, world_size: int) -> tuple[list[str], list[str], int]:
    with cliques(1, 2) as repl, _refusing(repl) as manager:
        assert manager.find_latest() == 3
        own = next(Path(node_store()).rglob(f"000000000003.{rank}.*"))
        before = files(node_store())
        with reads_fail(own) if rank == 0 else nullcontext():
            manager.load()
            manager.close()
        return before, files(node_store()), manager.degraded


@pytest.mark.fault("refused-io")
def test_a_good_copy_that_could_not_be_read_once_stays_when_making_it_again_fails(
    can_attach: None, node_dirs: Dirs
) -> None:
    nodes = node_dirs(2)
    run_ranks(_save, 2, "disk", 1, 2, store_per_node=nodes)

    told = run_ranks(_read_fails_once, 2, store_per_node=nodes)

    for before, after, degraded in told:
        assert after == before
        assert degraded == 1
    told = run_ranks(_restart, 2, "disk", 1, 2, store_per_node=nodes)
    assert told == [("own node", 0, 0)] * 2


def _load_twice(rank: int, world_size: int) -> tuple[list[int], list[int]]:
    with cliques(1, 2) as repl, make_manager("disk", node_store(), "job", repl) as manager:
        inodes = []
        for _ in range(2):
            resume(manager, rank, 3)
            _await_copies(manager)
            shards = sorted(Path(node_store()).rglob("*.safetensors"))
            inodes.append([path.stat().st_ino for path in shards])
    return inodes[0], inodes[1]


def test_a_second_load_makes_no_copy_that_is_there(node_dirs: Dirs) -> None:
    nodes = node_dirs(2)
    run_ranks(_save, 2, "disk", 1, 2, store_per_node=nodes)
    _empty(nodes[0])

    told = run_ranks(_load_twice, 2, store_per_node=nodes)

    for first, second in told:
        assert len(first) == 2
        assert second == first


def _lose_what_is_left_beside_a_copy(rank: int, world_size: int, nodes: list[Path]) -> str:
    with cliques(2, 2) as repl, make_manager("disk", node_store(), "job", repl) as manager:
        resume(manager, rank, 3)
        _await_copies(manager)
        if rank == 3:
            # The only other copy was written on node 0 by rank 1, whatever rank 0 is asked for.
            (own,) = nodes[1].rglob("000000000003.3.*")
            damage(own)
        return resume(manager, rank, 3)


@pytest.mark.fault("bad-copies")
def test_every_rank_of_a_node_can_send_a_copy_that_another_one_made(node_dirs: Dirs) -> None:
    nodes = node_dirs(2)
    run_ranks(_save, 4, "disk", 2, 2, store_per_node=nodes)
    _empty(nodes[0])

    told = run_ranks(_lose_what_is_left_beside_a_copy, 4, nodes, store_per_node=nodes)

    assert told == ["own node", "own node", "own node", "peer rank 0"]


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
    node_dirs: Dirs,
) -> None:
    nodes = node_dirs(2)
    run_ranks(_save, 2, "disk", 1, 2, store_per_node=nodes)
    _empty(nodes[0])

    _, seconds = run_ranks(_leave_with_an_error, 2, store_per_node=nodes, expect_dead=[0])

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
