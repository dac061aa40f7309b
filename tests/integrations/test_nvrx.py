"""The stand-in for NVRx's modules, in programs that import those and nothing of ours."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import localckpt
from localckpt.integrations.nvrx.finder import MODULES, VERSION
from tests.integrations.kills import END, run_both
from tests.managers.jobs import assert_same, error_of, files, state_of
from tests.ranks import node_store, run_ranks

Dirs = Callable[[int], list[Path]]

_LOCAL = "nvidia_resiliency_ext.checkpointing.local"


def _run_python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(Path(localckpt.__file__).parents[1]), **variables},
        check=False,
    )


def test_every_module_is_answered_for_with_every_name() -> None:
    done = _run_python(
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
        "print(nvidia_resiliency_ext.__version__)\n",
    )

    assert (done.stderr, done.stdout.strip()) == ("", VERSION)


@pytest.mark.parametrize(
    "imported",
    [f"{_LOCAL}.base_state_dict", "megatron.core.dist_checkpointing.tensor_aware_state_dict"],
)
def test_it_is_refused_when_objects_of_the_true_modules_may_exist(imported: str) -> None:
    done = _run_python(
        "-c",
        f"import sys\n"
        f"from localckpt.integrations import nvrx\n"
        f"sys.modules[{imported!r}] = sys\n"
        f"try:\n"
        f"    nvrx.install()\n"
        f"except Exception as error:\n"
        f"    print(type(error).__name__, error, nvrx.is_installed())\n",
    )

    assert f"CheckpointingException {imported} is imported already" in done.stdout
    assert "python -m localckpt.integrations.nvrx run" in done.stdout
    assert done.stdout.strip().endswith("False")


def test_a_module_that_is_not_there_is_named_with_those_that_are() -> None:
    done = _run_python(
        "-c",
        "from localckpt.integrations import nvrx\n"
        "nvrx.install()\n"
        "import nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt\n",
    )

    assert (
        "ModuleNotFoundError: nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt"
        in done.stderr
    )
    assert "async_ckpt.core" in done.stderr


@pytest.mark.rows(1)
@pytest.mark.parametrize(("content", "version"), [(None, VERSION), ("__version__ = '9'", "9")])
def test_the_rest_of_the_true_package_stays(
    tmp_path: Path, content: str | None, version: str
) -> None:
    true = tmp_path / "nvidia_resiliency_ext"
    (true / "checkpointing").mkdir(parents=True)
    if content is not None:
        (true / "__init__.py").write_text(content)
    (true / "straggler.py").write_text("")
    (true / "checkpointing" / "__init__.py").write_text("raise RuntimeError('not this one')")

    done = _run_python(
        "-c",
        f"import sys\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        f"from localckpt.integrations import nvrx\n"
        f"nvrx.install()\n"
        f"import nvidia_resiliency_ext.straggler, {_LOCAL}.base_state_dict\n"
        f"print({_LOCAL}.base_state_dict.TensorAwareStateDict.__module__)\n"
        f"print(nvidia_resiliency_ext.__version__)\n",
    )

    assert (done.stderr, done.stdout.split()) == ("", ["localckpt.state_dict.basic", version])


_PROGRAM = f"""
import multiprocessing, pathlib, sys, torch
from {_LOCAL}.basic_state_dict import BasicTensorAwareStateDict
from {_LOCAL}.ckpt_managers.local_manager import LocalCheckpointManager

def look(_):
    import nvidia_resiliency_ext.checkpointing.async_ckpt.core as core
    return core.__doc__

if __name__ == "__main__":
    manager = LocalCheckpointManager(sys.argv[1])
    for iteration in (1, 2):
        manager.save(BasicTensorAwareStateDict({{"a": torch.full((2,), iteration)}}), iteration)
    assert manager.find_latest() == 2
    state, (iteration, rank, session) = manager.load()
    assert state.state_dict["a"].tolist() == [2, 2]
    assert len(list(manager.local_ckpt_dir.glob("*.safetensors"))) == 1
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(iteration, rank, *pool.map(look, [0]))
"""


def test_a_program_that_is_not_changed_runs_with_all_processes_it_starts(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(_PROGRAM)
    other = tmp_path / "site"
    other.mkdir()
    (other / "sitecustomize.py").write_text("print('the other runs too')")
    path = os.pathsep.join([str(Path(localckpt.__file__).parents[1]), str(other)])

    done = _run_python(
        *("-m", "localckpt.integrations.nvrx", "run", str(tmp_path / "program.py")),
        str(tmp_path / "checkpoints"),
        PYTHONPATH=path,
    )

    assert done.returncode == 0, done.stderr
    assert "the other runs too" in done.stdout
    assert "2 0 localckpt in place of NVRx's nvidia_resiliency_ext" in done.stdout


def test_a_wrong_command_says_what_there_is() -> None:
    done = _run_python("-m", "localckpt.integrations.nvrx", "walk")

    assert done.returncode == 2
    assert "nvrx run pretrain_gpt.py" in done.stderr


def _nvrx(name: str) -> Any:
    import_module("localckpt.integrations.nvrx").install()
    return import_module(f"nvidia_resiliency_ext.checkpointing.{name}")


def _train(rank: int, world_size: int) -> None:
    managers = _nvrx("local.ckpt_managers.local_manager")
    strategies = _nvrx("local.replication.strategies")
    states = _nvrx("local.basic_state_dict")
    core = _nvrx("async_ckpt.core")
    core.AsyncCallsQueue.warmup_persistent_caller(rank, cpu_priority=10, io_priority=3)
    queue = core.AsyncCallsQueue(persistent=True, cpu_priority=5, io_priority=2)
    repl = strategies.CliqueReplicationStrategy.from_replication_params(1, 2)
    manager = managers.LocalCheckpointManager(node_store(), repl_strategy=repl)
    assert manager.local_ckpt_dir.is_relative_to(node_store())

    for iteration in (1, 2):
        state = states.BasicTensorAwareStateDict(state_of(rank, iteration))
        queue.schedule_async_request(manager.save(state, iteration, is_async=True))
        queue.maybe_finalize_async_calls(blocking=True, no_dist=False)
    assert len([name for name in files(node_store()) if name.endswith(".safetensors")]) == 2

    # Files that somebody removes are found to be gone, and the job begins anew.
    torch.distributed.barrier()
    for path in node_store().rglob("*.safetensors"):
        path.unlink(missing_ok=True)
    torch.distributed.barrier()
    manager.latest_iteration = -1
    assert manager.find_latest() == -1
    manager.save(states.BasicTensorAwareStateDict(state_of(rank, 1)), 1)
    assert manager.find_latest() == 1
    state, ckpt_id = manager.load()
    assert_same(state.state_dict, state_of(rank, 1))
    assert tuple(ckpt_id) == (1, rank, "")
    queue.close()
    manager.close()
    repl.close()


def test_a_job_with_their_names_keeps_one_checkpoint_and_saves_again_what_was_removed(
    node_dirs: Dirs,
) -> None:
    run_ranks(_train, 2, store_per_node=node_dirs(2))


@pytest.mark.framework
def test_the_example_resumes(tmp_path: Path) -> None:
    run = ("-m", "localckpt.integrations.nvrx", "run", "-m", "torch.distributed.run")
    ranks = ("--standalone", "--nproc-per-node=2", "-m", "examples.integrations.nvrx_training")
    printed = []
    for iterations in ("8", "12"):
        options = ("--directory", str(tmp_path), "--iterations", iterations)
        done = _run_python(*run, *ranks, *options, TMPDIR=str(tmp_path))
        assert done.returncode == 0, done.stderr
        printed += done.stdout.splitlines()

    assert printed == ["trained iteration 0 to iteration 7", "trained iteration 8 to iteration 11"]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_program_of_theirs_that_is_killed_ten_times_goes_on_bit_for_bit(tmp_path: Path) -> None:
    program = ["-m", "localckpt.integrations.nvrx", "run", "-m", "torch.distributed.run"]
    program += ["--standalone", "--nproc-per-node=2", "-m", "tests.integrations.nvrx_program"]

    whole, killed = run_both(program, tmp_path, kills=10, steps_between=7, seed=1)

    assert [len(values) for values in whole] == [81, 81]
    assert all(END in values for values in whole)
    assert killed == whole


def _gather(rank: int, world_size: int) -> list[list[torch.Tensor]]:
    groups = _nvrx("local.replication.group_utils")
    group = groups.GroupWrapper.from_list_of_groups([torch.distributed.new_group([0, 1])])
    assert group.all_gather_object(rank) == [0, 1]
    mine = [torch.full((2, rank + 1), float(rank)), torch.arange(3, dtype=torch.bfloat16)]
    gathered: list[list[torch.Tensor]] = group.all_gather_batch(mine[: rank + 1], "cpu")
    return gathered


def test_tensors_of_all_members_are_gathered_whatever_each_has() -> None:
    gathered, also_gathered = run_ranks(_gather, 2)

    assert [[t.tolist() for t in part] for part in gathered] == [
        [[[0.0], [0.0]]],
        [[[1.0, 1.0], [1.0, 1.0]], [0.0, 1.0, 2.0]],
    ]
    assert_same(gathered, also_gathered)


def _wrap_a_group_of_others(rank: int, world_size: int) -> str:
    groups = _nvrx("local.replication.group_utils")
    strategies = _nvrx("local.replication.strategies")
    group = groups.GroupWrapper(torch.distributed.new_group([0]))
    assert not hasattr(group, "no_such_name")
    if rank == 0:
        return f"{group.my_group_rank} of {group.world_size}"
    uses = (
        lambda: group.my_group_rank,
        lambda: group.world_size,
        lambda: group.ranks,
        lambda: group.all_gather_object(rank),
        lambda: group.all_gather_batch([]),
        # The other rank, which could make one, does not, and is waited for.
        lambda: strategies.CliqueReplicationStrategy(group, timeout_s=0.5),
    )
    (told,) = {error_of(use, localckpt.MismatchError) for use in uses}
    return told


def test_a_rank_outside_of_a_group_may_wrap_it_and_not_use_it() -> None:
    inside, outside = run_ranks(_wrap_a_group_of_others, 2)

    assert inside == "0 of 1"
    assert "rank 1 is not a member of the process group" in outside


def test_a_state_of_their_class_has_its_values() -> None:
    name = f"{_LOCAL}.base_state_dict"
    base = import_module(MODULES[name]["TensorAwareStateDict"]).TensorAwareStateDict
    methods = dict.fromkeys(base.__abstractmethods__, lambda self: None)
    state = type("State", (base,), methods)()
    state.a, state.b = torch.ones(1), "b"

    assert list(state.values()) == [state.a, "b"]


def test_every_module_has_a_package_above_it() -> None:
    for name in MODULES:
        above = name.rpartition(".")[0]
        assert above in MODULES or above == "nvidia_resiliency_ext"
