"""The stand-in for NVRx's modules, in programs that import those and nothing of ours."""

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

import localckpt
from localckpt import (
    AsyncCall,
    AsyncRequest,
    CheckpointingException,
    CorruptShardError,
    UnsafeGlobalError,
)
from localckpt.integrations.nvrx.changeover import find_nvrx_files, read_nvrx_file
from localckpt.integrations.nvrx.finder import VERSION
from localckpt.waiting import wait_until
from tests.cli.commands import python
from tests.managers.jobs import (
    MAX_S,
    error_of,
    make_manager,
    resume,
    save,
    state_of,
)
from tests.ranks import node_store, run_ranks
from tests.state_dict.states import Call

_ROOT = str(Path(localckpt.__file__).parents[1])


def test_every_module_is_answered_for_with_every_name_and_another_is_named() -> None:
    done = python(
        "-c",
        "import importlib, sys\n"
        "from localckpt.integrations import nvrx\n"
        "from localckpt.integrations.nvrx.finder import MODULES\n"
        "nvrx.install()\n"
        "nvrx.install()\n"
        "assert 'torch' not in sys.modules\n"
        "for name, public in MODULES.items():\n"
        "    assert public.keys() <= vars(importlib.import_module(name)).keys(), name\n"
        "import nvidia_resiliency_ext\n"
        "print(nvidia_resiliency_ext.__version__)\n"
        "import nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt\n",
    )

    assert done.out.strip() == VERSION
    missing = "ModuleNotFoundError: nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt"
    assert missing in done.err
    assert "async_ckpt.core" in done.err


def _nvrx(name: str) -> Any:
    import_module("localckpt.integrations.nvrx").install()
    return import_module(f"nvidia_resiliency_ext.checkpointing.{name}")


@pytest.mark.framework
@pytest.mark.example
def test_the_example_runs_and_resumes_with_all_processes_that_it_starts(tmp_path: Path) -> None:
    run = ("-m", "localckpt.integrations.nvrx", "run", "-m", "torch.distributed.run")
    ranks = ("--standalone", "--nproc-per-node=2", "-m", "examples.integrations.nvrx_training")
    wrong = python("-m", "localckpt.integrations.nvrx", "walk")
    assert (wrong.status, "nvrx run pretrain_gpt.py" in wrong.err) == (2, True)
    other = tmp_path / "site"
    other.mkdir()
    (other / "sitecustomize.py").write_text("print('the other runs too')")
    variables = {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join([_ROOT, str(other)])}
    printed = []
    for iterations in ("8", "12"):
        options = ("--directory", str(tmp_path), "--iterations", iterations)
        done = python(*run, *ranks, *options, env=variables)
        assert done.status == 0, done.err
        printed += done.out.splitlines()

    trained = [line for line in printed if line.startswith("trained")]
    assert trained == ["trained iteration 0 to iteration 7", "trained iteration 8 to iteration 11"]
    assert "the other runs too" in printed


def _use_a_group_of_others(rank: int, world_size: int) -> None:
    alone = _nvrx("local.replication.group_utils").GroupWrapper(dist.new_group([0]))
    assert not hasattr(alone, "no_such_name")
    if rank == 0:
        kind = _nvrx("local.replication.strategies").CliqueReplicationStrategy
        kind(alone, target_device="cpu").close()
    else:
        uses = (
            lambda: alone.ranks,
            lambda: alone.all_gather_object(rank),
            lambda: alone.all_gather_batch([]),
        )
        (told,) = {error_of(use, localckpt.MismatchError) for use in uses}
        assert "rank 1 is not a member of the process group" in told


def test_a_group_may_be_wrapped_outside_of_it_and_is_refused_when_it_is_used() -> None:
    run_ranks(_use_a_group_of_others, 2)


def _begin_anew(number: int) -> None:
    """End the process group, and make another one on the same store, as a restart in place does."""
    store, rank, world_size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert store is not None
    store = torch.distributed.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    part = dist.PrefixStore(f"life {number}", store)
    dist.init_process_group("gloo", store=part, rank=rank, world_size=world_size)


def _abort_while_waiting(rank: int, world_size: int) -> None:
    core = _nvrx("async_ckpt.core")
    queue, other = core.AsyncCallsQueue(), core.AsyncCallsQueue(persistent=False)
    failed: list[BaseException] = []
    call = AsyncCall(time.sleep, failure_fns=[failed.append])
    for each in (queue, other):
        each.schedule_async_request(AsyncRequest(call, (600,), []))
    children = psutil.Process().children
    assert wait_until(lambda: len(children()) == 2, MAX_S)
    workers = children()

    aborting = threading.Timer(1.0, core.abort_nvrx_checkpoint)
    aborting.start()
    began = time.monotonic()
    with pytest.raises(CheckpointingException, match="queue was aborted"):
        queue.maybe_finalize_async_calls(blocking=True)
    assert time.monotonic() - began < 10
    aborting.join()

    assert len(failed) == 2
    assert not any(worker.is_running() for worker in workers)
    assert queue.get_num_unfinalized_calls() + other.get_num_unfinalized_calls() == 0
    _begin_anew(2)
    done: list[int] = []
    for each in (queue, other):
        each.schedule_async_request(AsyncRequest(os.getpid, (), [lambda: done.append(1)]))
        each.maybe_finalize_async_calls(blocking=True)
        each.close()
    assert len(done) == 2
    # A queue that was closed stays closed, and one that is gone is not in the way.
    core.abort_nvrx_checkpoint()
    with pytest.raises(CheckpointingException, match="closed"):
        queue.schedule_async_request(AsyncRequest(os.getpid, (), []))


def test_an_abort_ends_workers_and_waits_and_the_queues_work_again() -> None:
    run_ranks(_abort_while_waiting, 2)


def _abort_a_save(rank: int, world_size: int, kind: str) -> None:
    core = _nvrx("async_ckpt.core")
    queue = core.AsyncCallsQueue()
    with make_manager(kind, node_store(), "job") as manager:
        save(manager, state_of(rank, 1), 1, queue)
        queue.schedule_async_request(manager.save(state_of(rank, 2), 2, is_async=True))
        core.abort_nvrx_checkpoint()
        dist.barrier()
        assert queue.get_num_unfinalized_calls() == 0
        assert resume(manager, rank, 1) == "own node"
        save(manager, state_of(rank, 3), 3, queue)
        queue.close()
        assert resume(manager, rank, 3) == "own node"


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_a_save_that_is_aborted_leaves_the_older_checkpoint_and_the_next_is_complete(
    kind: str, node_dirs: Any, shm_roots: Any
) -> None:
    nodes = (node_dirs if kind == "disk" else shm_roots)(2)

    run_ranks(_abort_a_save, 2, kind, store_per_node=nodes)


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


class _Own:
    def __init__(self) -> None:
        self.values = [1, 2]


def test_a_file_that_names_code_is_refused_and_runs_nothing_and_a_class_must_be_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(
        {"weight": torch.ones(2), "hook": Call(os.mkdir, "made by a file")}, tmp_path / "file.pt"
    )
    torch.save({"own": _Own()}, tmp_path / "own.pt")

    with pytest.raises(UnsafeGlobalError, match="mkdir"):
        read_nvrx_file(tmp_path / "file.pt")
    with pytest.raises(UnsafeGlobalError, match="_Own"):
        read_nvrx_file(tmp_path / "own.pt")

    assert not (tmp_path / "made by a file").exists()
    assert read_nvrx_file(tmp_path / "own.pt", safe_globals=[_Own])["own"].values == [1, 2]


@pytest.mark.parametrize("content", [b"", b"not a zip file", b"PK\x03\x04" + bytes(100)])
def test_a_file_that_is_none_of_theirs_is_corrupt(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file.pt").write_bytes(content)

    with pytest.raises(CorruptShardError, match="left as it is"):
        read_nvrx_file(tmp_path / "file.pt")


def test_files_are_found_by_rank_the_own_folder_first(tmp_path: Path) -> None:
    for name in (
        *("0/iter_0000005_0_local.pt", "1/iter_0000005_0_local.pt", "1/iter_0000004_0_local.pt"),
        *(
            "0/iter_0000006_0_local.dirty.pt",
            "0/iter_0000007_1_local.pt",
            "x/iter_0000008_0_local.pt",
        ),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    assert find_nvrx_files(tmp_path, "", 0) == {
        4: tmp_path / "1/iter_0000004_0_local.pt",
        5: tmp_path / "0/iter_0000005_0_local.pt",
    }
    assert find_nvrx_files(tmp_path / "missing", "", 0) == {}
