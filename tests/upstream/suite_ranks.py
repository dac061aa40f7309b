"""Ranks of upstream's own tests: imports once, forks the ranks, and runs pytest in each.

A program of its own, which does not import this package: upstream's tests are called ``tests``,
too. It puts the CPU in the place of CUDA and gloo in that of NCCL, beyond ``site``, and classes of
ours in the place of upstream's.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist

# Ranks wait for one that has failed for so long.
_TIMEOUT = timedelta(seconds=120)


def _module(name: str) -> Any:
    return import_module(name)


class _NoDevice(str):
    """Current device: a tensor made there is on the CPU, and ``f"cuda:{device}"`` is a device."""

    def __format__(self, spec: str) -> str:
        return "0"


def _stand_in_for_gpus() -> None:
    torch.cuda.current_device = lambda: _NoDevice("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.device_count = lambda: int(os.environ["WORLD_SIZE"])
    torch.cuda.Stream = torch.cuda.current_stream = MagicMock()  # type: ignore[assignment,misc]
    vars(torch.cuda).update(
        stream=nullcontext,
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda state, device=None: torch.set_rng_state(state),
    )
    init = dist.init_process_group
    dist.init_process_group = lambda backend=None, **options: init(
        "gloo", **options | {"device_id": None, "timeout": _TIMEOUT}
    )


def _stand_in_for_megatron() -> None:
    # Kernels of Triton, and datasets that no test of checkpoints reads.
    for name in (
        "megatron.core.transformer.custom_layers.batch_invariant_kernels",
        "tests.test_utils.python_scripts.download_unit_tests_dataset",
    ):
        sys.modules[name] = MagicMock()
    # torch's own does not take a learning rate of None.
    sys.path.append(str(Path(__file__).parent))
    sys.modules["apex.optimizers"] = _module("fused_adam")
    _module("megatron.training.checkpointing")
    # Without Transformer Engine it compares None with a version.
    _module("megatron.core.utils").is_te_min_version = lambda *_, **__: False


def _stand_in_for_torchs_ranks() -> None:
    """Fork the ranks that torch's tests spawn, and skip no test for want of GPUs."""
    torch.cuda.device_count = lambda: 4
    common = _module("torch.testing._internal.common_distributed")
    common.MultiProcessTestCase._spawn_processes = lambda test: test._start_processes(
        torch.multiprocessing.get_context("fork").Process
    )
    common.skip_if_lt_x_gpu = lambda count, **_: lambda test: test
    common.requires_accelerator_dist_backend = lambda backends=None: lambda test: test
    sharded = _module("torch.testing._internal.distributed._shard.sharded_tensor")
    with_comms = sharded.with_comms
    sharded.with_comms = lambda test=None, **options: with_comms(
        test, **options | {"backend": "gloo"}
    )


def _replicated(module: torch.nn.Module) -> torch.nn.Module:
    """Stand in for FSDP, which is for GPUs only, and whose state has all of each tensor."""
    for parameter in module.parameters():
        dist.broadcast(parameter.data, src=0)
    return module


def _equal_shards(one: Any, other: Any, shallow: bool = True) -> bool:
    """Compare the values of two files; the headers of two saves differ, and so do the digests."""
    load = _module("safetensors.torch").load_file
    a, b = load(one), load(other)
    del a["__digests__"], b["__digests__"]
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _shown_as_theirs(kind: Any) -> Any:
    """Make a manager whose files are also where NVRx's are, for tests that look for them there.

    These are copies. One that a test has taken away is taken from our store before it is searched.
    """
    names = _module("localckpt.storage.names")

    class LocalCheckpointManager(kind):  # type: ignore[misc]
        def __init__(self, root: Any, *arguments: Any, **options: Any) -> None:
            ours, self._shown = Path(root).with_name("ours"), Path(root, f"{dist.get_rank()}")
            if not self._shown.exists():
                shutil.rmtree(ours / "session-" / self._shown.name, ignore_errors=True)
            super().__init__(ours, *arguments, **options)
            self._shown.mkdir(parents=True, exist_ok=True)

        def save(self, state: Any, iteration: int, is_async: bool = False) -> Any:
            request = super().save(state, iteration, is_async)
            return request.add_finalize_fn(self._show) or request if is_async else self._show()

        def find_latest(self) -> int:
            for ours, shown in self._files():
                if not shown.exists():
                    ours.unlink()
            return super().find_latest()  # type: ignore[no-any-return]

        def _show(self) -> None:
            for path in self._shown.glob("iter_*"):
                path.unlink()
            for ours, shown in self._files():
                shown.write_bytes(ours.read_bytes())

        def _files(self) -> list[tuple[Path, Path]]:
            paths = [p for p in self.local_ckpt_dir.glob("*.safetensors") if p.stat().st_size]
            return [(p, self._local_ckpt_path_from_id(names.shard_named(p.name))) for p in paths]

        def _ckpt_id(self, iteration: int) -> tuple[int, int]:
            return iteration, self.rank

        def _local_ckpt_path_from_id(self, ckpt_id: Any) -> Path:
            return self._shown / f"iter_{ckpt_id[0]:07d}_{ckpt_id[1]}_local.pt"

        def _filename_from_template(self, iteration: Any, rank: Any, suffix: str = "") -> str:
            return f"{int(iteration):012d}.{rank}.1.1{suffix}.safetensors"

    return LocalCheckpointManager


def _take_the_place_of_nvrx() -> None:
    _module("localckpt.integrations.nvrx").install()
    managers = _module("localckpt.integrations.nvrx.manager")
    managers.LocalCheckpointManager = _shown_as_theirs(managers.LocalCheckpointManager)
    filecmp = _module("filecmp")
    filecmp.cmp = _equal_shards
    # Our files of global checkpoints are named after their save, and end with digests.
    filecmp.dircmp = lambda *_: SimpleNamespace(left_only=[], right_only=[], diff_files=[])


def _take_the_place_of_megatron() -> None:
    _take_the_place_of_nvrx()
    ours = _module("localckpt.integrations.nvrx.global_save")
    _stand_in_for_megatron()
    strategy = _module("megatron.core.dist_checkpointing.strategies.torch")
    for name in {*ours.__all__} & {*vars(strategy)}:
        setattr(strategy, name, getattr(ours, name))
    core = _module("megatron.core.dist_checkpointing.strategies.async_utils")
    core.AsyncCallsQueue = _module("localckpt.integrations.nvrx.queue").AsyncCallsQueue


def _answer_for_torch(writer: type, reader: type) -> None:
    for module in ("torch.distributed.checkpoint", "torch.distributed.checkpoint.filesystem"):
        vars(_module(module)).update(FileSystemWriter=writer, FileSystemReader=reader)


def _take_the_place_of_torchs_files() -> None:
    localckpt = _module("localckpt")
    torchs = _module("torch.distributed.checkpoint").FileSystemWriter

    class Writer(localckpt.FileSystemWriterAsync):  # type: ignore[misc, name-defined]
        # The same on all ranks, where save_state_dict_async_plan() shares one.
        save_id = property(lambda _: "0" * 32, lambda *_: None)

        def __new__(cls, path: Any, **options: Any) -> Any:
            # Ours reads what torch has written through an extension, and writes through none.
            return torchs(path, **options) if "_extensions" in options else super().__new__(cls)

        def __init__(self, path: Any, *, overwrite: bool = True, **options: Any) -> None:
            super().__init__(path, overwrite=overwrite, **options)

        def write_data(self, plan: Any, planner: Any) -> Any:
            self.prepare_write_data(plan, planner)
            write, stage, arguments = self.get_save_function_and_args()
            if write is not None:
                write(arguments[0], stage())
            done: Any = torch.futures.Future()
            done.set_result(self.retrieve_write_results())
            return done

    _answer_for_torch(Writer, localckpt.CachedMetadataFileSystemReader)


def _storage_beneath(faulty: type, ours: type) -> type:
    """Make a class that fails as torch's ``faulty`` does, and else does what ours does."""

    def begin(self: Any, *arguments: Any) -> None:
        faulty.__init__(self, *arguments)  # type: ignore[misc]
        # A rank that fails before it has come to ours is waited for there.
        options = {"share_metadata": False} if hasattr(faulty, "read_data") else {}
        # Processes without a group are no ranks of one checkpoint.
        name = "shared" if dist.is_initialized() else f"{os.getpid()}"
        ours.__init__(self, Path(os.environ["TMPDIR"], name), **options)  # type: ignore[misc]

    def step(name: str) -> Callable[..., Any]:
        def called(self: Any, *arguments: Any, **options: Any) -> Any:
            given = options if name == "finish" else {}
            done = getattr(faulty, name)(self, *arguments, **given)
            if isinstance(done, torch.futures.Future):
                done.wait()
            return getattr(ours, name)(self, *arguments, **options)

        return called

    names = {*vars(faulty)} - {"reset", "validate_checkpoint_id"}
    steps = {name: step(name) for name in names if not name.startswith("_")}
    # torch's own sets another one.
    rank = property(lambda _: dist.get_rank() if dist.is_initialized() else 0, lambda *_: None)
    return type(faulty.__name__, (faulty, ours), {"__init__": begin, "rank": rank, **steps})


def _fail_in_ours(module: Any) -> None:
    """Put our storage beneath that of torch's failure matrix, which neither writes nor reads."""
    dcp = _module("torch.distributed.checkpoint")
    described = module._create_default_local_metadata
    for name in ("Writer", "Reader"):
        faulty, ours = getattr(module, f"FaultyStorage{name}"), getattr(dcp, f"FileSystem{name}")
        setattr(module, f"FaultyStorage{name}", _storage_beneath(faulty, ours))

    def save_and_describe(state: Any) -> Any:
        writer = module.FaultyStorageWriter({})
        dcp.state_dict_saver.save_state_dict(state, writer, no_dist=not dist.is_initialized())
        return described(state)

    module._create_default_local_metadata = save_and_describe


def _take_the_place_of_torchs_storage() -> None:
    localckpt, dcp = _module("localckpt"), _module("localckpt.dcp")

    @cache
    def manager_of(path: Any, pid: int) -> Any:
        return localckpt.LocalCheckpointManager(path, elastic=True)

    class Writer(dcp.NodeStorageWriter):  # type: ignore[misc, name-defined]
        _iteration = property(lambda self: self.manager.latest_iteration + 1, lambda *_: None)

        def __init__(self, path: Any, thread_count: int = 1) -> None:
            super().__init__(manager_of(path, os.getpid()))

    class Reader(dcp.NodeStorageReader):  # type: ignore[misc, name-defined]
        def __init__(self, path: Any) -> None:
            super().__init__(manager_of(path, os.getpid()))

    _answer_for_torch(Writer, Reader)


_OURS: dict[str, Callable[[], None]] = {
    "nvrx": _take_the_place_of_nvrx,
    "megatron": _take_the_place_of_megatron,
    "files": _take_the_place_of_torchs_files,
    "nodes": _take_the_place_of_torchs_storage,
    "theirs": lambda: None,
}


class _Outcomes:
    """Plugin that records the outcome of each case."""

    def __init__(self, file: Path, fails_in_ours: bool) -> None:
        self._file, self._fails_in_ours = file, fails_in_ours

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        module = items[0].module
        if hasattr(module, "FaultyStorageWriter"):
            sharded = module.ChunkShardingSpec
            # A rank's part is on "cpu", and not on "cpu:1".
            module.ChunkShardingSpec = lambda dim, placements: sharded(
                dim, [placement.partition("/")[0] for placement in placements]
            )
            if self._fails_in_ours:
                _fail_in_ours(module)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self) -> None:
        # Each group of gloo has threads, and a case of Megatron-LM makes dozens of groups.
        for group in [*dist.distributed_c10d._world.pg_map]:
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        gc.collect()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            with self._file.open("a") as file:
                _, _, case = report.nodeid.partition("::")
                file.write(json.dumps([case, report.outcome]) + "\n")


def _run_rank(rank: int, suite: dict[str, Any], folder: Path) -> int:
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    plugin = _Outcomes(folder / f"{rank}.jsonl", suite["ours"] == "files")
    options = f"-c {os.devnull} --rootdir . -p no:cacheprovider -p no:xdist --basetemp"
    return int(pytest.main([suite["file"], *options.split(), f"{folder}/basis/{rank}"], [plugin]))


def main() -> int:
    """Run the suite that the first argument describes, with results in the folder of the second."""
    suite, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    # Whatever other package is called so.
    tests = sys.modules["tests"] = ModuleType("tests")
    tests.__path__ = [str(Path("tests").absolute())]
    _stand_in_for_gpus()
    _OURS[suite["ours"]]()
    if suite["checkout"] == "Megatron-LM":
        _stand_in_for_megatron()
    elif suite["checkout"] == "nvidia-resiliency-ext":
        _module("torch.distributed.fsdp").FullyShardedDataParallel = _replicated
    else:
        _stand_in_for_torchs_ranks()
    (folder / "basis").mkdir()
    pids = []
    for rank in range(suite["ranks"]):
        if (pid := os.fork()) == 0:
            sys.exit(_run_rank(rank, suite, folder))
        pids.append(pid)
    return max(abs(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) for pid in pids)


if __name__ == "__main__":
    sys.exit(main())
