"""Weights come out of a checkpoint of many ranks by themselves, as in a notebook."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from localckpt import MismatchError
from tests.managers.jobs import make_manager
from tests.ranks import node_store, run_ranks

_NOTEBOOK = """
import sys, torch, localckpt
assert "torch.distributed.tensor" not in sys.modules
model = torch.nn.Linear(4, 6)
manager = localckpt.LocalCheckpointManager(sys.argv[1], "job", elastic=True, read_only=True)
loaded, _ = manager.load(into={"model": model}, partial=True)
assert loaded["model"] is model and set(loaded) == {"model"}, loaded
print(model.weight.tolist(), model.bias.tolist())
manager.close()
"""


def _weights() -> list[Any]:
    return [torch.arange(24.0).view(6, 4).tolist(), torch.arange(6.0).tolist()]


def _job(rank: int, world_size: int, sharding: str) -> dict[str, Any]:
    model = torch.nn.Linear(4, 6)
    with torch.no_grad():
        for parameter, values in zip(model.parameters(), _weights(), strict=True):
            parameter.copy_(torch.tensor(values))
    if sharding == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    # The loaders of the ranks differ, and their positions are no part of the weights.
    return {"model": model, "optimizer": optimizer, "loader": {"position": rank}}


def _save(rank: int, world_size: int, sharding: str) -> None:
    with make_manager("disk", node_store(), "job") as manager:
        manager.save(_job(rank, world_size, sharding), 3)


@pytest.mark.parametrize("sharding", ["fsdp2", "ddp"])
def test_one_process_gets_the_weights_of_two_ranks_and_imports_nothing_for_it(
    sharding: str, tmp_path: Path
) -> None:
    run_ranks(_save, 2, sharding, store_per_node=[tmp_path])

    command = [sys.executable, "-c", _NOTEBOOK, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)

    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == f"{_weights()[0]} {_weights()[1]}"
    assert "left out, as partial=True allows: loader, optimizer" in ran.stderr


def _load(rank: int, world_size: int, sharding: str) -> list[Any]:
    state = _job(rank, world_size, sharding)
    for parameter in state["model"].parameters():
        torch.nn.init.zeros_(parameter)
    moments = [values["exp_avg"].clone() for values in state["optimizer"].state.values()]
    with make_manager("disk", node_store(), "job", elastic=True) as manager:
        manager.load(into={"model": state["model"]}, partial=True)
    for values, before in zip(state["optimizer"].state.values(), moments, strict=True):
        assert torch.equal(_whole(values["exp_avg"]), _whole(before))
    return [_whole(parameter).tolist() for parameter in state["model"].parameters()]


def _whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_any_number_of_ranks_loads_weights_alone(world_size: int, tmp_path: Path) -> None:
    run_ranks(_save, 2, "fsdp2", store_per_node=[tmp_path])

    loaded = run_ranks(_load, world_size, "fsdp2", store_per_node=[tmp_path])

    assert loaded == [_weights()] * world_size


def test_what_was_not_saved_is_an_error_also_in_part(tmp_path: Path) -> None:
    run_ranks(_save, 2, "fsdp2", store_per_node=[tmp_path])
    model = torch.nn.Linear(4, 6)
    with (
        make_manager("disk", tmp_path, "job", elastic=True, read_only=True) as manager,
        pytest.raises(MismatchError, match=r"as it is: net: given, not saved\. Make") as caught,
    ):
        manager.load(into={"net": model}, partial=True)

    assert "load() lets go of names with partial=True" in str(caught.value)
