"""What random sequences of faults have found, each in as few steps as it takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

import localckpt
from tests.faults.campaign.nodes import damage
from tests.managers.jobs import cliques, error_of, files, make_manager, resume, state_of
from tests.ranks import node_store, run_ranks

Dirs = Callable[[int], list[Path]]

_TIMEOUT_S = 4.0


def _save_where_the_directory_was_away(rank: int, world_size: int) -> None:
    repl = cliques(1, 2)
    with (
        localckpt.AsyncCallsQueue(timeout_s=_TIMEOUT_S) as queue,
        make_manager("memory", node_store(), "job", repl, timeout=_TIMEOUT_S) as manager,
    ):
        requests = [manager.save(state_of(rank, i), i, is_async=True) for i in (1, 2)]
        session = node_store() / "session-job"
        if rank == 1:
            session.rename(session.with_name("away"))
            session.write_text("in the way")
        dist.barrier()
        for request in requests:
            queue.schedule_async_request(request)
            error_of(lambda: queue.maybe_finalize_async_calls(blocking=True))
        if rank == 1:
            session.unlink()
            session.with_name("away").rename(session)
        dist.barrier()

        manager.save(state_of(rank, 3), 3)

        assert resume(manager, rank, 3) == "own node"
    repl.close()


@pytest.mark.fault("unusable-store")
def test_a_directory_that_is_back_can_be_saved_to(shm_roots: Dirs) -> None:
    """Each save has two files there, and no buffer of either may stay busy."""
    run_ranks(_save_where_the_directory_was_away, 2, store_per_node=shm_roots(2))


def _save_once(rank: int, world_size: int) -> None:
    repl = cliques(1, 2)
    with make_manager("disk", node_store(), "job", repl) as manager:
        manager.save(state_of(rank, 1), 1)
    repl.close()


def _load_and_await_copies(rank: int, world_size: int) -> None:
    repl = cliques(1, 2)
    with make_manager("disk", node_store(), "job", repl) as manager:
        resume(manager, rank, 1)
    repl.close()


@pytest.mark.fault("wrong-place")
def test_a_new_copy_does_not_overwrite_another_shard_that_has_its_name(node_dirs: Dirs) -> None:
    nodes = node_dirs(2)
    run_ranks(_save_once, 2, store_per_node=nodes)
    own, replica = sorted(nodes[0].rglob("*.safetensors"))
    aside = own.with_name("aside")
    own.rename(aside)
    replica.rename(own)
    aside.rename(replica)
    # By its name it is the own shard; the replica is what is in it.
    damage(own, "flip", 0.0)

    run_ranks(_load_and_await_copies, 2, store_per_node=nodes)

    for node in nodes:
        found = [path.read_bytes() for path in node.rglob("*.safetensors")]
        assert len(found) == len(set(found)) == 2, files(node)
