"""Images say which part of which global tensor each tensor is, and a load minds it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import localckpt
from localckpt import CheckpointingException, MismatchError
from localckpt.state_dict.boxes import Box, parse_boxes
from localckpt.state_dict.header import Skeleton
from tests.managers.jobs import error_of, make_manager, on_node
from tests.ranks import node_store, on_ranks

# Key to the box, and the tensor.
Told = dict[str, tuple[Box, torch.Tensor]]

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def _saved(state: Any, session: str, **options: Any) -> Told:
    """Save a state, and look at this rank's image."""
    with on_node(session, **options) as manager:
        manager.save(state, 1)
        manager.load()
        (path,) = node_store().rglob(f"session-{session}/{manager.rank}/*.safetensors")
    tensors = load_file(path)
    table, boxes, *_ = Skeleton.split(tensors["__skeleton__"].numpy().tobytes())
    rows = json.loads(table)
    shapes = [tuple(shape) for _, _, shape, *_ in rows]
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    return {
        box.key: (box, tensors[rows[number][0]].reshape(shapes[number]))
        for number, box in parse_boxes(boxes, shapes, manager.rank, world_size).items()
    }


def _assert_part(told: tuple[Box, torch.Tensor], whole: torch.Tensor) -> None:
    """The tensor is what the box says of the whole one."""
    box, tensor = told
    assert box.shape == whole.shape
    for dim, runs in enumerate(box.runs):
        indices = [i for start, count in runs for i in range(start, start + count)]
        whole = whole.index_select(dim, torch.tensor(indices, dtype=torch.int64))
    assert torch.equal(tensor.reshape(whole.shape), whole)


@on_ranks(4, nodes=1, timeout_s=150.0, group_timeout_s=120.0)
def test_each_image_tells_its_part_of_each_global_tensor(rank: int) -> None:
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    wholes = {
        "even": (torch.arange(32.0).reshape(8, 4), line, [Shard(0)]),
        "uneven": (torch.arange(30.0).reshape(3, 10), line, [Shard(1)]),
        "empty": (torch.arange(6.0).reshape(2, 3), line, [Shard(0)]),
        "replicated": (torch.arange(5.0), line, [Replicate()]),
        "hybrid": (torch.arange(21.0).reshape(7, 3), square, [Replicate(), Shard(0)]),
        "both": (torch.arange(35.0).reshape(5, 7), square, [Shard(0), Shard(1)]),
        "twice": (torch.arange(18.0).reshape(9, 2), square, [Shard(0), Shard(0)]),
        "scalar": (torch.tensor(3.0), square, [Replicate(), Replicate()]),
    }
    state: dict[str, Any] = {
        name: distribute_tensor(whole, mesh, places)
        for name, (whole, mesh, places) in wholes.items()
    }
    state["sum"] = DTensor.from_local(torch.ones(3), line, [Partial()])
    # Shards of sizes that torch would not make.
    odd = torch.ones(1 if rank else 5, 2)
    state["odd"] = DTensor.from_local(odd, line, [Shard(0)], shape=(8, 2), stride=(2, 1))
    state["own"] = torch.full((3,), float(rank))

    told = _saved(state, "tensors")

    assert told.keys() == wholes.keys()
    for name, (whole, _, _) in wholes.items():
        _assert_part(told[name], whole)
    equal = {name: sorted(box.ranks) for name, (box, _) in told.items()}
    for name in ("even", "uneven", "empty", "both", "twice"):
        assert equal[name] == [rank]
    assert equal["replicated"] == equal["scalar"] == [0, 1, 2, 3]
    assert equal["hybrid"] == [rank % 2, rank % 2 + 2]
    _tell_of_models(rank, line, square)
    _tell_of_marks(rank, line)
    _load_into_other_shardings(rank)


def _tell_of_models(rank: int, line: DeviceMesh, square: DeviceMesh) -> None:
    def make() -> torch.nn.Linear:
        torch.manual_seed(5)
        return torch.nn.Linear(6, 10, bias=False)

    whole = make().weight.detach()
    # FSDP2 over tensor parallelism shards by strides; FSDP1 makes ShardedTensors.
    crossed = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    strided = parallelize_module(make(), crossed["tensor"], ColwiseParallel())
    fully_shard(strided, mesh=crossed["data"])
    fsdp1 = FullyShardedDataParallel(make(), device_id=torch.device("cpu"))
    with FullyShardedDataParallel.state_dict_type(fsdp1, StateDictType.SHARDED_STATE_DICT):
        sharded = fsdp1.state_dict()

    told = _saved({"strided": strided.state_dict(), "sharded": sharded}, "models")

    assert told.keys() == {"strided.weight", "sharded.weight"}
    for box, tensor in told.values():
        _assert_part((box, tensor), whole)
        assert sorted(box.ranks) == [rank]


def _tell_of_marks(rank: int, line: DeviceMesh) -> None:
    pair = dist.new_group([0, 2])
    other = dist.new_group([1, 3])
    group = (pair, other)[rank % 2]
    model = torch.nn.Linear(3, 2)
    told = _saved({"model": localckpt.replicated(model), "own": torch.ones(2)}, "all")
    assert told.keys() == {"model.weight", "model.bias"}
    assert {tuple(sorted(box.ranks)) for box, _ in told.values()} == {(0, 1, 2, 3)}
    _assert_part(told["model.weight"], model.weight.detach())

    # In a job of two of the ranks these have numbers of their own.
    told = _saved(
        {"model": localckpt.replicated(model, group)}, f"job-{rank % 2}", process_group=group
    )
    assert {tuple(sorted(box.ranks)) for box, _ in told.values()} == {(0, 1)}

    sharded = distribute_tensor(torch.rand(8), line, [Shard(0)], src_data_rank=None)
    with on_node("refused") as manager:
        text = error_of(lambda: manager.save({"model": localckpt.replicated({"w": sharded})}, 1))
        assert "'model.w' is marked by replicated()" in text
        assert manager.find_latest() == -1
        inner = {"w": localckpt.replicated({"v": torch.ones(2)})}
        text = error_of(lambda: manager.save({"model": localckpt.replicated(inner)}, 1))
        assert "'model.w' is marked by replicated() inside of a part that is marked" in text
    with pytest.raises(CheckpointingException, match="given a part that is marked by replicated"):
        localckpt.replicated(localckpt.replicated(model))
    with pytest.raises(CheckpointingException, match=f"rank {rank} with a group that it is not in"):
        localckpt.replicated(model, (other, pair)[rank % 2])


def _load_into_other_shardings(rank: int) -> None:
    """Each target has the shape of what was saved, and is another part of the tensor."""
    whole = torch.arange(16.0).reshape(8, 2)
    line = init_device_mesh("cpu", (4,))
    state = {"weight": distribute_tensor(whole, line, [Shard(0)])}
    turned = DeviceMesh("cpu", [3, 2, 1, 0])
    targets = {
        "given as [": {"weight": distribute_tensor(torch.zeros(8, 2), turned, [Shard(0)])},
        "of [7, 2]": {"weight": DTensor.from_local(
            torch.zeros(2 if rank < 3 else 1, 2), line, [Shard(0)], shape=(7, 2), stride=(2, 1)
        )},
    }  # fmt: skip
    with on_node("loaded") as manager:
        manager.save(state, 1)
        for difference, target in targets.items():
            text = error_of(lambda target=target: manager.load(into=target), MismatchError)
            assert "weight: saved as [" in text
            assert difference in text
            assert not target["weight"].to_local().any()
        same = {"weight": distribute_tensor(torch.zeros(8, 2), line, [Shard(0)])}
        manager.load(into=same)
        assert torch.equal(same["weight"].full_tensor(), whole)


@on_ranks(2, nodes=1, timeout_s=150.0)
def test_a_load_into_dtensors_fills_parts_of_a_state_and_leaves_meshes_alone(rank: int) -> None:
    """Meshes are pickled with the tensors of their ranks, which have no path in the state."""
    line, turned = init_device_mesh("cpu", (2,)), DeviceMesh("cpu", [1, 0])

    def rows(value: float) -> DTensor:
        return distribute_tensor(torch.full((4, 3), value), line, [Shard(0)], src_data_rank=None)

    with on_node("meshes") as manager:
        whole = {"optimizer": {"step": torch.ones(1), "m": rows(2.0)}, "model": {"w": rows(1.0)}}
        manager.save(whole, 1)
        # Where the mesh is the second tensor, and was the third.
        part = {"model": {"w": rows(0.0)}}
        loaded, _ = manager.load(into=part, partial=True)
        assert torch.equal(part["model"]["w"].to_local(), torch.ones(2, 3))
        assert torch.equal(loaded["optimizer"]["m"].to_local(), torch.full((2, 3), 2.0))

        same = distribute_tensor(torch.ones(3), line, [Replicate()], src_data_rank=None)
        manager.save({"w": same}, 2)
        given = DTensor.from_local(torch.zeros(3), turned, [Replicate()], run_check=False)
        manager.load(into={"w": given})
        assert torch.equal(given.to_local(), torch.ones(3))
        assert turned.mesh.tolist() == [1, 0]

        # What is not given follows those that are to their mesh, if all have one.
        square = init_device_mesh("cpu", (1, 2))
        manager.save({key: rows(1.0) for key in "abc"}, 4)
        for both_on_square in (True, False):
            on_square = DTensor.from_local(
                torch.zeros(2, 3), square, [Replicate(), Shard(0)], run_check=False
            )
            into = {"a": on_square, "b": on_square.clone() if both_on_square else rows(0.0)}
            loaded, _ = manager.load(into=into, partial=True)
            assert loaded["c"].device_mesh == (square if both_on_square else line)
            assert torch.equal(loaded["c"].full_tensor(), torch.ones(4, 3))


class Holder:
    """Object with a tensor that has no path in a state."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_a_tensor_without_a_path_never_takes_another_ones_values(tmp_path: Path) -> None:
    def holder(value: float) -> Holder:
        return Holder(torch.full((5,), value))

    with make_manager("disk", tmp_path, "paths", safe_globals=[Holder]) as manager:
        manager.save({"a": holder(1.0), "b": holder(2.0), "w": torch.ones(2), "x": "y"}, 1)
        one = holder(0.0)
        with pytest.raises(MismatchError, match="given, not saved"):
            manager.load(into={"b": one}, partial=True)
        both = holder(0.0), holder(0.0)
        manager.load(into={"a": both[0], "b": both[1]}, partial=True)

    assert not one.tensor.any()
    assert [held.tensor[0].item() for held in both] == [1.0, 2.0]
