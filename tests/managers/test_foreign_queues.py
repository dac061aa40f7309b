"""A request can be carried out by any queue that knows what an AsyncRequest is."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from localckpt import AsyncRequest, SaveFailedError
from tests.managers.jobs import KINDS, cliques, error_of, files, make_manager, resume, state_of
from tests.ranks import node_store, run_ranks

Dirs = Callable[[int], list[Path]]


def _in_a_thread(request: AsyncRequest) -> None:
    assert request.async_fn is not None
    thread = threading.Thread(
        target=request.async_fn, args=request.async_fn_args, kwargs=dict(request.async_fn_kwargs)
    )
    thread.start()
    thread.join()


def _in_a_forked_process(request: AsyncRequest) -> None:
    assert request.async_fn is not None
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            request.async_fn(*request.async_fn_args, **request.async_fn_kwargs)
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


def _nowhere(request: AsyncRequest) -> None:
    return


def _finalize(request: AsyncRequest) -> None:
    for finalize in request.finalize_fns:
        finalize()


def _with_a_foreign_queue(rank: int, world_size: int, kind: str) -> None:
    repl = cliques(1, 2)
    for worker, carry_out in (
        ("thread", _in_a_thread),
        ("process", _in_a_thread),
        ("process", _in_a_forked_process),
    ):
        session = f"{worker}{carry_out.__name__}"
        options = {"async_worker": worker, "keep_last": 2}
        with make_manager(kind, node_store(), session, repl, **options) as manager:
            for iteration in range(4):
                request = manager.save(state_of(rank, iteration), iteration, is_async=True)
                assert isinstance(request, tuple)
                carry_out(request)
                _finalize(request)
                assert resume(manager, rank, iteration) == "own node"

            # A queue that does not know of failures finds out when it finalizes.
            request = manager.save(state_of(rank, 4), 4, is_async=True)
            (carry_out if rank == 0 else _nowhere)(request)
            told = error_of(lambda r=request: _finalize(r), SaveFailedError)
            assert "rank 1 was to keep" in told
            here = [n for n in files(node_store()) if session in n and "000004." in n]
            assert all(name.endswith(".spare") for name in here)
            manager.save(state_of(rank, 5), 5)
            assert resume(manager, rank, 5) == "own node"
    repl.close()


@pytest.mark.parametrize("kind", KINDS)
def test_requests_work_in_a_thread_and_in_a_fork_of_a_queue_that_is_not_ours(
    kind: str, node_dirs: Dirs, shm_roots: Dirs
) -> None:
    nodes = (node_dirs if kind == "disk" else shm_roots)(2)

    run_ranks(_with_a_foreign_queue, 2, kind, store_per_node=nodes)
