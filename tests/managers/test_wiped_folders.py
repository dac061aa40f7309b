"""Folders that are removed, or emptied, under an open manager, as by a disk mounted anew."""

from __future__ import annotations

import shutil
from typing import Any

import torch.distributed as dist

import localckpt
from localckpt import StorageError
from tests.managers.jobs import (
    cliques,
    error_of,
    make_manager,
    resume,
    save,
    state_of,
)
from tests.ranks import node_store, on_ranks, same_on_all

_WIPES = ("rank", "rank emptied", "session", "session emptied", "store", "store emptied")


def _wipe(manager: Any, what: str) -> None:
    """Remove the rank's folder, that of its session, or the store; or leave it there, empty."""
    level, _, how = what.partition(" ")
    folder = manager.store.folder
    path = {"rank": folder, "session": folder.parent, "store": folder.parents[1]}[level]
    # At once, though a save may be making files there.
    gone = path.with_name(f"{path.name}.gone")
    path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)
    if how == "emptied":
        # A save may have made it meanwhile.
        path.mkdir(exist_ok=True)


@on_ranks(4, nodes=2, timeout_s=120.0)
def test_a_node_that_is_wiped_holds_nothing_and_is_loaded_from_its_peers(rank: int) -> None:
    """Rank 1 is wiped, and so is rank 0 of its node where the wipe is of more than its folder."""
    number = 0
    repl, queue = cliques(2, 2), localckpt.AsyncCallsQueue()
    for what in _WIPES:
        is_wiped = rank == 1 or (rank == 0 and not what.startswith("rank"))
        came_from = "peer" if is_wiped else "own node"
        with make_manager("disk", node_store(), what, repl, keep_last=2) as manager:
            for when in ("before a look", "after a look", "between saves", "before a load"):
                number += 1
                save(manager, state_of(rank, number), number, queue)
                if when == "after a look":
                    assert manager.find_latest() == number
                dist.barrier()
                if rank == 1:
                    _wipe(manager, what)
                dist.barrier()
                if when == "between saves":
                    number += 1
                    save(manager, state_of(rank, number), number, queue)
                    assert resume(manager, rank, number) == "own node"
                    continue
                if when == "before a look":
                    manager.find_latest()
                manager.load(iteration=number if when == "before a load" else None)
                source = manager.last_load.source
                assert source.startswith(came_from), (what, when, source)
                # Copies are made again, and what is saved next is complete on all nodes.
                assert resume(manager, rank, number) == "own node", (what, when)
                assert manager.degraded == 0
            number += 1
            save(manager, state_of(rank, number), number)
        with make_manager("disk", node_store(), what, repl) as manager:
            assert resume(manager, rank, number) == "own node"
    queue.close()
    repl.close()


@on_ranks(2, nodes=2)
def test_the_store_of_another_node_in_the_place_of_a_store_is_refused(rank: int) -> None:
    with make_manager("disk", node_store() / "mine", "job") as manager:
        save(manager, state_of(rank, 1), 1)
        make_manager("disk", node_store() / "other", "job").close()
        dist.barrier()
        mine, other = node_store() / "mine", node_store() / "other"
        if rank == 1:
            mine.rename(node_store() / "away")
            other.rename(mine)
        told = error_of(manager.find_latest, StorageError)
        if rank == 1:
            mine.rename(other)
            (node_store() / "away").rename(mine)
        assert resume(manager, rank, 1) == "own node"
    assert "rank 1: " in same_on_all(told)
    assert "is the store of another node now" in told
