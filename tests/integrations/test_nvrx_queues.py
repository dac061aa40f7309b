"""NVRx's queue and global save: aborted for an in-process restart, and failing as NVRx's fail."""

from __future__ import annotations

import os
import pickle
import threading
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from localckpt import AsyncCall, AsyncRequest, CheckpointingException, CkptID, StorageError
from localckpt.waiting import wait_until
from tests.managers.jobs import MAX_S, before_commit, make_manager, resume, state_of
from tests.ranks import node_store, run_ranks


def _nvrx(name: str) -> Any:
    import_module("localckpt.integrations.nvrx").install()
    return import_module(f"nvidia_resiliency_ext.checkpointing.{name}")


def _begin_anew(number: int) -> None:
    """End the process group, and make another one on the same store, as a restart in place does."""
    store, rank, world_size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert store is not None
    store = torch.distributed.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    part = dist.PrefixStore(f"life {number}", store)
    dist.init_process_group("gloo", store=part, rank=rank, world_size=world_size)


def _abort_while_waiting(rank: int, world_size: int) -> dict[str, Any]:
    core = _nvrx("async_ckpt.core")
    queue, other = core.AsyncCallsQueue(), core.AsyncCallsQueue(persistent=False)
    failed: list[BaseException] = []
    call = AsyncCall(time.sleep, failure_fns=[failed.append])
    queue.schedule_async_request(AsyncRequest(call, (600,), []))
    other.schedule_async_request(AsyncRequest(call, (600,), []))
    children = psutil.Process().children
    assert wait_until(lambda: len(children()) == 2, MAX_S)
    workers = children()

    aborting = threading.Timer(1.0, core.abort_nvrx_checkpoint)
    aborting.start()
    began = time.monotonic()
    with pytest.raises(CheckpointingException) as raised:
        queue.maybe_finalize_async_calls(blocking=True)
    took_s = time.monotonic() - began
    aborting.join()

    told = {"took_s": took_s, "told": str(raised.value), "failed": len(failed)}
    told["alive"] = [worker.pid for worker in workers if worker.is_running()]
    told["unfinalized"] = queue.get_num_unfinalized_calls() + other.get_num_unfinalized_calls()
    _begin_anew(2)
    done: list[int] = []
    for each in (queue, other):
        each.schedule_async_request(AsyncRequest(os.getpid, (), [lambda: done.append(1)]))
        each.maybe_finalize_async_calls(blocking=True)
        each.close()
    # A queue that was closed stays closed, and one that is gone is not in the way.
    core.abort_nvrx_checkpoint()
    with pytest.raises(CheckpointingException, match="closed"):
        queue.schedule_async_request(AsyncRequest(os.getpid, (), []))
    told["done"] = len(done)
    return told


def test_an_abort_ends_workers_and_waits_and_the_queues_work_again() -> None:
    told = run_ranks(_abort_while_waiting, 2)

    for of_rank in told:
        assert of_rank["took_s"] < 10
        assert "queue was aborted" in of_rank["told"]
        assert (of_rank["failed"], of_rank["alive"], of_rank["unfinalized"]) == (2, [], 0)
        assert of_rank["done"] == 2


def _abort_a_save(rank: int, world_size: int, kind: str) -> tuple[int, int]:
    core = _nvrx("async_ckpt.core")
    queue = core.AsyncCallsQueue()
    with make_manager(kind, node_store(), "job") as manager:
        queue.schedule_async_request(manager.save(state_of(rank, 1), 1, is_async=True))
        queue.maybe_finalize_async_calls(blocking=True)
        queue.schedule_async_request(manager.save(state_of(rank, 2), 2, is_async=True))
        core.abort_nvrx_checkpoint()
        dist.barrier()
        left = queue.get_num_unfinalized_calls()
        assert resume(manager, rank, 1) == "own node"
        queue.schedule_async_request(manager.save(state_of(rank, 3), 3, is_async=True))
        queue.maybe_finalize_async_calls(blocking=True)
        queue.close()
        assert resume(manager, rank, 3) == "own node"
    return left, 3


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_a_save_that_is_aborted_leaves_the_older_checkpoint_and_the_next_is_complete(
    kind: str, node_dirs: Any, shm_roots: Any
) -> None:
    nodes = (node_dirs if kind == "disk" else shm_roots)(2)

    assert run_ranks(_abort_a_save, 2, kind, store_per_node=nodes) == [(0, 3)] * 2


def _fail_to_save(rank: int, world_size: int, shared: Path) -> list[str]:
    core, saver = _nvrx("async_ckpt.core"), _nvrx("async_ckpt.state_dict_saver")
    writers = _nvrx("async_ckpt.filesystem_async")
    state, told = {f"of rank {rank}": torch.ones(1000)}, []

    # In the worker, where the queue raises it.
    writer = writers.FileSystemWriterAsync(shared / "written")
    planned = saver.save_state_dict_async_plan(state, writer, timeout_s=MAX_S)
    function, preload, args = writer.get_save_function_and_args()
    finalize = [lambda: saver.save_state_dict_async_finalize(*planned)]

    def stage() -> Any:
        writes = preload()
        if rank == 1:
            writes[0].path.mkdir()
        return writes

    request = AsyncRequest(function, tuple(args), finalize, preload_fn=stage)
    queue = core.AsyncCallsQueue(timeout_s=MAX_S)
    queue.schedule_async_request(request)
    told.append(_told(lambda: queue.maybe_finalize_async_calls(blocking=True)))
    planned[-1].close()
    queue.close()
    writer.close()

    # When it is finalized.
    writer = writers.FileSystemWriterAsync(shared / "finalized")
    planned = saver.save_state_dict_async_plan(state, writer, timeout_s=MAX_S)
    function, preload, args = writer.get_save_function_and_args()
    writes = preload()
    if rank == 0:
        function(args[0], writes)
    else:
        writer.give_up(OSError("the disk is gone"))
    told.append(_told(lambda: saver.save_state_dict_async_finalize(*planned)))
    writer.close()

    # When it is planned.
    writer = writers.FileSystemWriterAsync(shared / "planned")
    refused = {"x": _Unplannable() if rank == 1 else torch.ones(2)}
    told.append(_told(lambda: saver.save_state_dict_async_plan(refused, writer)))
    writer.close()
    return told


class _Unplannable:
    def state_dict(self) -> Any:
        raise RuntimeError("no state")

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError


def _told(call: Any) -> str:
    with pytest.raises(CheckpointException) as raised:
        call()
    error: Any = raised.value
    assert isinstance(error, CheckpointingException)
    assert error.failures[dist.get_rank()][0] is error
    again = pickle.loads(pickle.dumps(error))
    assert (type(again).__name__, str(again)) == (type(error).__name__, str(error))
    return str(error)


def test_a_global_save_that_fails_is_torchs_error_too_and_names_the_rank(tmp_path: Path) -> None:
    told = run_ranks(_fail_to_save, 2, tmp_path)

    assert told[0] == told[1]
    written, finalized, planned = told[0]
    assert "rank 1" in written
    assert "rank 1" in finalized
    assert "the disk is gone" in finalized
    assert "no state" in planned


def _refuse(_: CkptID) -> None:
    raise StorageError("the disk is gone")


def _save_locally(rank: int, world_size: int) -> str:
    core = _nvrx("async_ckpt.core")
    queue = core.AsyncCallsQueue()
    with make_manager("disk", node_store(), "job") as manager:
        if rank == 1:
            before_commit(manager, _refuse)
        request = manager.save(state_of(rank, 1), 1, is_async=True)
        queue.schedule_async_request(request)
        with pytest.raises(StorageError) as raised:
            queue.maybe_finalize_async_calls(blocking=True)
        assert isinstance(raised.value, CheckpointException)
        queue.close()
    return str(raised.value)


def test_a_local_save_that_fails_keeps_its_own_class(node_dirs: Any) -> None:
    told = run_ranks(_save_locally, 2, store_per_node=node_dirs(2))

    assert told[0] == told[1]
    assert "rank 1" in told[0]
