"""What random sequences of faults have found, each in as few steps as it takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

import localckpt
from tests.managers.jobs import cliques, error_of, make_manager, resume, state_of
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
