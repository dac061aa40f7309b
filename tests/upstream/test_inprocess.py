"""NVRx's in-process restart around a job that saves with ours in the place of NVRx's queues."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from importlib import import_module
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from localckpt.integrations import nvrx
from localckpt.waiting import wait_until
from tests.managers.jobs import assert_same, state_of
from tests.ranks import node_store
from tests.upstream.environment import needs, run_upstream_ranks, unused_port


def _workers() -> list[int]:
    children = psutil.Process().children()
    return [child.pid for child in children if "localckpt.async_save" in str(child.cmdline())]


pytestmark = [
    pytest.mark.framework,
    needs("nvidia_resiliency_ext.inprocess", "defusedxml"),
]

_NVRX = "nvidia_resiliency_ext"


def _restart_in_place(rank: int, world_size: int, port: int) -> dict[str, Any]:
    nvrx.install()
    inprocess = import_module(f"{_NVRX}.inprocess")
    core = import_module(f"{_NVRX}.checkpointing.async_ckpt.core")
    managers = import_module(f"{_NVRX}.checkpointing.local.ckpt_managers.local_manager")
    queue, told = core.AsyncCallsQueue(), dict[str, Any]()
    jobs = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)

    class AbortCheckpoints(inprocess.abort.Abort):  # type: ignore[misc]
        # As the class that NVRx has for it since 0.6.
        def __call__(self, state: Any) -> Any:
            core.abort_nvrx_checkpoint()
            return state

    class AbortGroups(inprocess.abort.Abort):  # type: ignore[misc]
        def __call__(self, state: Any) -> Any:
            if dist.is_initialized():
                dist.destroy_process_group()
            return state

    def train(call_wrapper: Any = None) -> str:
        life = call_wrapper.iteration
        store = dist.PrefixStore(f"life {life}", jobs)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        manager = managers.LocalCheckpointManager(node_store(), timeout=30.0)
        if life == 0:
            manager.save(state_of(rank, 1), 1)
            queue.schedule_async_request(core.AsyncRequest(time.sleep, (600,), []))
            assert wait_until(lambda: _workers(), 20.0)
            told["workers"] = _workers()
            if rank == 1:
                raise RuntimeError("the first life ends")
            queue.maybe_finalize_async_calls(blocking=True)
        told["alive"] = [pid for pid in told["workers"] if psutil.pid_exists(pid)]
        assert manager.find_latest() == 1
        assert_same(manager.load()[0], state_of(rank, 1))
        queue.schedule_async_request(manager.save(state_of(rank, 2), 2, is_async=True))
        queue.maybe_finalize_async_calls(blocking=True)
        told["found"] = manager.find_latest()
        manager.close()
        return f"life {life}"

    train.__annotations__["call_wrapper"] = inprocess.CallWrapper
    wrapped = inprocess.Wrapper(
        store_kwargs={"timeout": timedelta(seconds=60), "port": port},
        initialize=inprocess.initialize.RetryController(max_iterations=3),
        abort=inprocess.Compose(AbortGroups(), AbortCheckpoints()),
        soft_timeout=timedelta(seconds=40),
        hard_timeout=timedelta(seconds=50),
        barrier_timeout=timedelta(seconds=60),
        completion_timeout=timedelta(seconds=60),
    )(train)
    told["ended"] = wrapped()
    queue.close()
    dist.destroy_process_group()
    return told


def test_a_job_restarts_in_its_processes_and_its_queue_saves_again(node_dirs: Any) -> None:
    told = run_upstream_ranks(
        _restart_in_place, 2, unused_port(), store_per_node=node_dirs(2), init_group=False
    )

    for of_rank in told:
        assert of_rank["ended"] == "life 1"
        assert len(of_rank["workers"]) == 1
        assert of_rank["alive"] == []
        assert of_rank["found"] == 2
