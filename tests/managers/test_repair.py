"""What is lost under a running job is made again beside its saves, without a restart."""

from __future__ import annotations

import shutil
import time
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import localckpt
from benchmarks.stores import CountingStore
from localckpt.errors import CheckpointingException, MismatchError, StorageError
from localckpt.events.stream import EventStream
from localckpt.storage.catalog import Problem
from tests.events.sinks import Kept
from tests.managers.jobs import (
    Dirs,
    assert_same,
    before_commit,
    cliques,
    error_of,
    in_job,
    iterations_on,
    our_threads,
    resume,
    save,
    state_of,
)
from tests.ranks import die, on_ranks, run_ranks
from tests.scenarios import Begin, require_whole


def _remove_folder(manager: Any) -> None:
    # At once, as nothing else is removed while a save may write there.
    gone = manager.store.folder.with_name("gone")
    manager.store.folder.rename(gone)
    shutil.rmtree(gone)


def _remove_own_shard(manager: Any) -> None:
    (path,) = manager.store.folder.glob(f"000000000002.{manager.rank}.*.safetensors")
    path.unlink()


def _quarantine_replica(manager: Any) -> None:
    (identity,) = [
        stored.record.identity
        for stored in manager.store.list_stored()
        if stored.record and stored.record.identity.iteration == 2
        if stored.record.identity.rank != manager.rank
    ]
    manager.store.quarantine(identity, Problem("damaged", "a test says so"))


_LOSSES = {
    "folder": _remove_folder,
    "own shard": _remove_own_shard,
    "replica in quarantine": _quarantine_replica,
}


def _lose(manager: Any, what: str) -> None:
    dist.barrier()
    if manager.rank == 1:
        _LOSSES[what](manager)
    dist.barrier()


@pytest.mark.fault("lost-nodes")
@pytest.mark.parametrize(
    ("what", "kind", "redundancy"),
    [
        ("folder", "disk", (1, 2)),
        ("own shard", "memory", (1, 2)),
        ("replica in quarantine", "disk", (1, 2)),
        ("folder", "disk", "parity 1 of 3"),
    ],
)
def test_what_a_node_has_lost_is_whole_again_without_a_restart(
    what: str, kind: str, redundancy: Any, job: Begin
) -> None:
    nodes = 2 if redundancy == (1, 2) else 3
    running = job(nodes=nodes, kind=kind, redundancy=redundancy, keep_last=3).save(1, 2)

    running.call(_lose, what).save(3).whole(3, 2, 1).expect(2, asked=True).expect(1, asked=True)

    # Of each checkpoint a shard and a copy, or the parity, on each node.
    kept = [name for name in running.files() if not name.endswith(".corrupt")]
    assert len(kept) == 6 * nodes


def _save_without_loss(manager: Any) -> None:
    # Then a wait is one operation, however long it takes.
    manager._ranks._part.is_large = True
    counts, before = CountingStore.count(manager._ranks), manager._ranks.rounds
    with mock.patch.object(manager.store, "list_stored") as look:
        for iteration in range(4, 14):
            manager.save(state_of(manager.rank, iteration), iteration)
    assert manager._ranks.rounds - before == 10
    assert not look.called
    assert [name for name in our_threads() if "repair" in name] == []
    # The root reads what the others report.
    assert manager.rank == 0 or sum(count.operations for count in counts) <= 120


def test_where_nothing_is_lost_no_repair_begins_and_a_save_costs_what_it_did(job: Begin) -> None:
    job(nodes=2, redundancy=(1, 2), keep_last=3).save(1, 2, 3).call(_save_without_loss).run()


_LARGE = 24 << 20


@pytest.mark.fault("lost-nodes")
@on_ranks(2, nodes=2)
def test_saves_do_not_wait_for_a_repair_which_goes_on_or_ends_with_what_is_pruned(
    rank: int,
) -> None:
    repl, kept, took = cliques(1, 2), Kept(), list[float]()
    events = EventStream([kept])
    retention = localckpt.Retention(last=2)
    with in_job(repl, events=events, retention=retention) as (manager, queue):
        save(manager, state_of(rank, 1, _LARGE), 1, queue)
        manager.mark_good("it stays beside those after it")
        for iteration in (2, 3):
            save(manager, state_of(rank, iteration, 1000), iteration, queue)
        dist.barrier()
        if rank == 1:
            _remove_folder(manager)
        dist.barrier()
        # The copies of the good one take 6 s, those of saves next to nothing.
        repl.rate_limit = 8e6
        lacked = []
        for iteration in range(4, 9):
            began = time.monotonic()
            request = manager.save(state_of(rank, iteration, 1000), iteration, is_async=True)
            queue.schedule_async_request(request)
            took.append(time.monotonic() - began)
            queue.maybe_finalize_async_calls(blocking=True)
            lacked.append(sum(standing.lacking > 0 for standing in manager.status()))
            time.sleep(0.1)
        began = time.monotonic()
        require_whole(manager, [8, 7, 1])
        waited = time.monotonic() - began
        assert_same(manager.load(iteration=1)[0], state_of(rank, 1, _LARGE))
    events.close()
    ended = kept.named("reprotected")[-1]
    # It was still under way when the last of the saves was over.
    assert lacked[-1] == 1
    assert max(took[1:]) < 1.0
    assert waited > 0.5
    assert (ended.step, ended.outcome) == (1, "ok")


def _die_in_a_repair(manager: Any) -> None:
    if manager.rank == 1:
        before_commit(manager, lambda ckpt_id: die() if ckpt_id.iteration == 2 else None)
    _lose(manager, "folder")
    began = 0.0

    def save_on() -> None:
        nonlocal began
        for iteration in count(3):
            began = time.monotonic()
            manager.save(state_of(manager.rank, iteration), iteration)

    assert "rank 1" in error_of(save_on)
    assert time.monotonic() - began < 15.0
    manager.__exit__(CheckpointingException, CheckpointingException(), None)
    assert time.monotonic() - began < 25.0


@pytest.mark.fault("lost-during-recovery")
def test_a_rank_that_dies_in_a_repair_is_named_by_the_next_save_and_a_restart_has_all(
    job: Begin,
) -> None:
    running = job(nodes=2, redundancy=(1, 2), keep_last=100, timeout=4.0).save(1, 2)

    running.call(_die_in_a_repair).run(dead=[1])

    # The node of the rank that died may have all of the save that failed, which rank 0 removed.
    newest = max(iterations_on(running.nodes[0]))
    again = run_ranks(_resume, 2, newest, newest + 1, store_per_node=running.nodes)
    assert again in (["own node"] * 2, ["peer rank 1", "own node"])


def _resume(rank: int, world_size: int, *expected: int) -> str:
    with in_job(cliques(world_size // 2, 2)) as (manager, _):
        found = manager.find_latest()
        assert found in expected, (found, expected)
        return resume(manager, rank, found)


@pytest.mark.fault("lost-nodes")
def test_after_a_restart_a_save_waits_for_copies_and_older_checkpoints_are_made_whole_too(
    job: Begin,
) -> None:
    lost = job(nodes=2, redundancy=(1, 2), keep_last=3).save(1, 2, 3).lose(0)

    lost.expect(3, {0: "peer rank 1"}).lacking(2).save(4).lacking(0).whole(4, 3, 2)

    # Of each checkpoint a shard of each rank, on each node.
    assert len(lost.files()) == 12


def _replace(rank: int, world_size: int, fresh: Path) -> list[str]:
    """Try in vain to replace stores, and then replace that of the second node."""
    with in_job(cliques(2, 2), keep_last=3) as (manager, queue):
        save(manager, state_of(rank, 1), 1, queue)
        queue.schedule_async_request(manager.save(state_of(rank, 2), 2, is_async=True))
        told = [error_of(lambda: manager.replace_store(fresh))]
        queue.maybe_finalize_async_calls(blocking=True)
        node, old = rank // 2, manager.store.folder
        (fresh / "file").write_text("in the way")
        told += [
            error_of(lambda: manager.replace_store(None)),
            error_of(lambda: manager.replace_store(fresh / str(rank)), MismatchError),
            error_of(lambda: manager.replace_store(fresh), MismatchError),
            error_of(lambda: manager.replace_store(fresh / "file" if node else None), StorageError),
            error_of(lambda: manager.replace_store(f"s3://{node}"), StorageError),
        ]
        assert manager.store.folder == old

        manager.replace_store(fresh / "store" if node else None)

        if node:
            assert manager.store.root == fresh / "store"
            assert not (old / ".owner").exists()
            # Whoever removes the old one changes nothing.
            shutil.rmtree(old)
        require_whole(manager, [2, 1])
        dist.barrier()
        for iteration in (3, 4):
            save(manager, state_of(rank, iteration), iteration, queue)
        assert resume(manager, rank, 4) == "own node"
        save(manager, state_of(rank, 5), 5, queue)
        dist.barrier()
        assert len(list(manager.store.root.rglob("*.safetensors"))) == 12
        return told


@pytest.mark.fault("lost-nodes")
def test_a_store_that_is_replaced_is_filled_and_used_or_all_ranks_are_told_why_not(
    node_dirs: Dirs,
) -> None:
    first, second, fresh = node_dirs(3)

    told = run_ranks(_replace, 4, fresh, store_per_node=[first, second])

    assert told == [told[0]] * 4
    in_flight, nobody, apart, shared, file, url = told[0]
    assert "cannot replace a store while the saves of iterations [2] are in flight" in in_flight
    assert "no rank gives a directory" in nobody
    assert "rank 0 would have one store" in apart
    assert "ranks 0 to 3 would have one store" in shared
    assert str(fresh / "file") in file
    assert "is a URL" in url
    again = run_ranks(_resume, 4, 5, store_per_node=[first, fresh / "store"])
    assert again == ["own node"] * 4
