"""Megatron-Core's model, optimizer and state dict on our managers and our global writer."""

from __future__ import annotations

import os
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import localckpt
from localckpt.integrations import nvrx
from localckpt.integrations.nvrx import changeover, global_save
from tests.managers.jobs import Dirs, assert_same
from tests.ranks import node_store
from tests.upstream.environment import needs_upstream, run_upstream_ranks, upstream_variables
from tests.upstream.gpt import Training
from tests.upstream.kills import END, run_both

pytestmark = [pytest.mark.framework, needs_upstream]

_STATES = "megatron.core.dist_checkpointing.tensor_aware_state_dict"


def _make_true_managers() -> tuple[Any, Any]:
    """One of ours and one of NVRx's; Megatron-Core finds NVRx."""
    theirs = import_module("nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager")
    assert not nvrx.is_installed()
    repl = localckpt.CliqueReplicationStrategy.from_replication_params(1, 2)
    ours = localckpt.LocalCheckpointManager(node_store(), repl_strategy=repl)
    return ours, theirs.LocalCheckpointManager(node_store() / "theirs")


def _make_manager() -> Any:
    """As Megatron-LM's ``training.py`` does, with the names that it imports."""
    nvrx.install()
    kept = import_module("nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt")
    assert kept.AsyncCallsQueue.__module__.startswith("localckpt.")
    local = "nvidia_resiliency_ext.checkpointing.local"
    strategies = import_module(f"{local}.replication.strategies")
    managers = import_module(f"{local}.ckpt_managers.local_manager")
    return managers.LocalCheckpointManager(
        node_store(),
        repl_strategy=strategies.CliqueReplicationStrategy.from_replication_params(1, 2),
    )


def _train_and_save(
    rank: int, world_size: int, shared: Path
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    manager, theirs = _make_true_managers()
    core = import_module("megatron.core.dist_checkpointing.strategies.async_utils")
    training = Training(seed=1)
    queue = core.AsyncCallsQueue(persistent=True)
    for iteration in (1, 2):
        training.step()
        state = training.tensor_aware(iteration)
        request = manager.save(state, iteration, is_async=True)
        request.add_finalize_fn(lambda: None)
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True, no_dist=False)
        theirs.save(state, iteration)
    saved = training.tensors()
    training.step()
    trained = training.tensors()
    forking = core.AsyncCallsQueue(persistent=False)
    for name, each in {"forking": forking, "persistent": queue}.items():
        _save_globally(training, shared / name, each)
        each.close()
    manager.close()
    return saved, trained


def _save_globally(training: Training, shared: Path, queue: Any) -> None:
    """Save through Megatron-Core's own strategy, with our writer and our planning in its place."""
    strategy = import_module("megatron.core.dist_checkpointing.strategies.torch")
    serialization = import_module("megatron.core.dist_checkpointing.serialization")
    strategy.FileSystemWriterAsync = global_save.FileSystemWriterAsync
    strategy.save_state_dict_async_plan = global_save.save_state_dict_async_plan
    strategy.save_state_dict_async_finalize = localckpt.save_state_dict_async_finalize
    how = strategy.TorchDistSaveShardedStrategy("torch_dist", 1, cached_metadata=True)
    for number in range(2):
        folder = shared / f"{number}"
        folder.mkdir(parents=True, exist_ok=True)
        state, is_async = training.sharded_state(number), number == 0
        request = serialization.save(state, folder, how, async_sharded_save=is_async)
        if is_async:
            queue.schedule_async_request(request)
            queue.maybe_finalize_async_calls(blocking=True)
        # Before 0.16 Megatron-Core does not say what torch may load of what it has saved.
        os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
        wanted = training.sharded_state(is_loading=True)
        loaded = serialization.load(wanted, folder)
        assert loaded["iteration"] == number
        for key, value in training.model.state_dict().items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(loaded["model"][key], value), key


def _resume(rank: int, world_size: int) -> tuple[str, list[torch.Tensor], list[torch.Tensor]]:
    manager = _make_manager()
    training = Training(seed=100 + rank)
    # Megatron-LM imports it where it saves only.
    assert _STATES not in sys.modules
    assert manager.find_latest() == 2
    intermediate, ckpt_id = manager.load()
    assert tuple(ckpt_id) == (2, rank, "")
    assert type(intermediate).__name__ == "MCoreTensorAwareStateDict"
    state = training.take_over(intermediate)
    assert state["iteration"] == 2
    assert state["args"].params_dtype is torch.bfloat16
    loaded = training.tensors()
    training.step()
    source = manager.last_load.source
    manager.close()
    if rank == 1:
        _read_what_nvrx_left(training, loaded)
    return source, loaded, training.tensors()


def _read_what_nvrx_left(training: Training, loaded: list[torch.Tensor]) -> None:
    files = changeover.find_nvrx_files(node_store() / "theirs", "", 1)
    assert list(files) == [2]
    left = changeover.read_nvrx_file(files[2])
    weight = "decoder.layers.0.mlp.linear_fc1.weight"
    assert type(left).__name__ == "MCoreTensorAwareStateDict"
    found = left.sharded_state_dict["model"][weight].data
    assert any(torch.equal(found, tensor) for tensor in loaded)


def test_a_gpt_that_lost_a_node_goes_on_bit_for_bit(node_dirs: Dirs, tmp_path: Path) -> None:
    nodes = node_dirs(2)
    before = run_upstream_ranks(_train_and_save, 2, tmp_path, store_per_node=nodes)
    shutil.rmtree(nodes[0])
    nodes[0].mkdir()

    after = run_upstream_ranks(_resume, 2, store_per_node=nodes)

    assert [source for source, _, _ in after] == ["peer rank 1", "own node"]
    for (saved, trained), (_, loaded, trained_on) in zip(before, after, strict=True):
        assert_same(loaded, saved)
        assert_same(trained_on, trained)


_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("algorithm", "queue"),
    [("fully_parallel", "megatron"), ("atomic", "megatron"), ("fully_parallel", "nvrx")],
)
def test_a_program_that_is_killed_ten_times_goes_on_bit_for_bit(
    algorithm: str, queue: str, tmp_path: Path
) -> None:
    program = [*_TORCHRUN, "tests.upstream.megatron_program", algorithm, queue]

    whole, killed = run_both(
        *(program, tmp_path),
        kills=10,
        steps_between=10,
        seed=len(algorithm + queue),
        variables=upstream_variables() | {"OMP_NUM_THREADS": "1"},
    )

    iterations = [*map(str, range(1, 131)), END]
    assert [list(values) for values in whole] == [iterations] * 2
    assert killed == whole
