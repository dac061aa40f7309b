"""Saves of our managers in the queues of NVRx and Megatron-Core."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any

import pytest

import localckpt
from localckpt import AsyncRequest, SaveFailedError
from localckpt.waiting import wait_until
from tests.managers.jobs import (
    Dirs,
    cliques,
    error_of,
    files,
    make_manager,
    put_back,
    resume,
    state_of,
    take_away,
)
from tests.ranks import node_store
from tests.upstream.environment import needs_upstream, run_upstream_ranks

pytestmark = needs_upstream

_MODULES = {
    "nvrx": "nvidia_resiliency_ext.checkpointing.async_ckpt.core",
    "megatron": "megatron.core.dist_checkpointing.strategies.async_utils",
}


def _upstream(library: str) -> Any:
    return import_module(_MODULES[library])


def _is_finalized(queue: Any) -> bool:
    queue.maybe_finalize_async_calls(blocking=False)
    return not queue.get_num_unfinalized_calls()


def _drive(rank: int, world_size: int, library: str, kind: str) -> dict[tuple[str, bool], str]:
    upstream = _upstream(library)
    assert AsyncRequest._fields == upstream.AsyncRequest._fields
    repl = cliques(1, 2)
    told = {}
    for persistent in (False, True):
        queue = upstream.AsyncCallsQueue(persistent=persistent)
        options = {"keep_last": 2, "timeout": 60.0}
        session = f"{persistent}"
        with make_manager(kind, node_store(), session, repl, **options) as manager:
            for iteration in range(2):
                state = state_of(rank, iteration)
                queue.schedule_async_request(manager.save(state, iteration, is_async=True))
                if iteration:
                    assert wait_until(lambda q=queue: _is_finalized(q), 60.0)
                else:
                    queue.maybe_finalize_async_calls(blocking=True)
                assert resume(manager, rank, iteration) == "own node"
                assert len([n for n in files(node_store()) if session in n]) >= 2

            state = state_of(rank, 2)
            request = manager.save(state, 2, is_async=True)
            with _without_folder(session, rank) if rank == 1 else nullcontext():
                queue.schedule_async_request(request)
                told[persistent] = error_of(
                    lambda q=queue: q.maybe_finalize_async_calls(True), SaveFailedError
                )
            assert resume(manager, rank, 1) == "own node"
        queue.close()
    repl.close()
    return told


@contextmanager
def _without_folder(session: str, rank: int) -> Iterator[None]:
    """Inside, nothing can be written where a rank keeps its shards."""
    folder = node_store() / f"session-{session}" / f"{rank}"
    take_away(folder)
    yield
    put_back(folder)


@pytest.mark.parametrize(
    ("library", "kind"),
    [
        ("megatron", "disk"),
        pytest.param("nvrx", "disk", marks=pytest.mark.long),
        pytest.param("nvrx", "memory", marks=pytest.mark.long),
    ],
)
def test_both_queues_of_both_libraries_save_replicate_and_say_what_failed(
    library: str, kind: str, node_dirs: Dirs, shm_roots: Dirs
) -> None:
    nodes = (node_dirs if kind == "disk" else shm_roots)(2)

    told, also_told = run_upstream_ranks(_drive, 2, library, kind, store_per_node=nodes)

    assert told == also_told
    assert len(told) == 2
    for persistent, text in told.items():
        assert "rank 1" in text, persistent
        assert "Not a directory" in text, persistent


def _take_theirs(rank: int, world_size: int) -> str:
    request = _upstream("nvrx").AsyncRequest
    done: list[str] = []
    with localckpt.AsyncCallsQueue(timeout_s=120.0) as queue:
        queue.schedule_async_request(request(done.append, ("ran",), [partial(done.append, "end")]))
        queue.maybe_finalize_async_calls(blocking=True)
        assert done in (["ran", "end"], ["end"])
        queue.schedule_async_request(request(_fail, (rank,), []))
        return error_of(lambda: queue.maybe_finalize_async_calls(blocking=True))


def _fail(rank: int) -> None:
    if rank == 1:
        raise ValueError("its own error")


def test_a_request_of_another_library_in_our_queue_shows_its_first_error() -> None:
    told, also_told = run_upstream_ranks(_take_theirs, 2)

    assert told == also_told
    assert "rank 1: ValueError: its own error" in told
