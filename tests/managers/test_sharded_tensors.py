"""FSDP1's sharded and local state dicts, whose values are ShardedTensors, are saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, init_from_local_shards
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

import localckpt
from localckpt import RestoreError
from localckpt.state_dict.image import pack, unpack
from localckpt.state_dict.reader import ImageReader
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.targets import find_targets
from tests.managers.jobs import make_manager
from tests.ranks import node_store, run_ranks
from tests.state_dict.states import IDENTITY, assert_same

pytestmark = [
    pytest.mark.fault("hard-state"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
]


def _assert_same(found: Any, wanted: Any) -> None:
    if isinstance(wanted, ShardedTensor):
        assert type(found) is ShardedTensor
        assert found.metadata() == wanted.metadata()
        assert found.sharding_spec() == wanted.sharding_spec()
        assert found.shape == wanted.shape
        shards, others = found.local_shards(), wanted.local_shards()
        assert [shard.metadata for shard in shards] == [shard.metadata for shard in others]
        assert_same([s.tensor for s in shards], [s.tensor for s in others])
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key, value in wanted.items():
            _assert_same(found[key], value)
    else:
        assert_same(found, wanted)


def _wrapped(seed: int) -> tuple[FullyShardedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=0.1)


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    batch = torch.rand(2, 4, generator=torch.Generator().manual_seed(seed))
    model(batch).square().sum().backward()
    optimizer.step()


def _state(model: Any, optimizer: torch.optim.Optimizer, kind: StateDictType) -> dict[str, Any]:
    with FullyShardedDataParallel.state_dict_type(model, kind):
        state = {"model": model.state_dict()}
        if kind is StateDictType.SHARDED_STATE_DICT:
            state["optimizer"] = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    return state


def _train_on(rank: int, world_size: int, kind_name: str) -> None:
    kind = StateDictType[kind_name]
    model, optimizer = _wrapped(1)
    _step(model, optimizer, rank)
    state = _state(model, optimizer, kind)
    with make_manager("memory", node_store(), "job") as manager:
        manager.save(state, 1)
        assert manager.find_latest() == 1
        loaded, _ = manager.load()
    _assert_same(loaded, state)

    other, other_optimizer = _wrapped(2)
    with FullyShardedDataParallel.state_dict_type(other, kind):
        other.load_state_dict(loaded["model"])
        if "optimizer" in loaded:
            flat = FullyShardedDataParallel.optim_state_dict_to_load(
                other, other_optimizer, loaded["optimizer"]
            )
            other_optimizer.load_state_dict(flat)
            for each in ((model, optimizer), (other, other_optimizer)):
                _step(*each, 10 + rank)
    _assert_same(_state(other, other_optimizer, kind), _state(model, optimizer, kind))


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "LOCAL_STATE_DICT"])
def test_a_job_of_fsdp1_goes_on_bit_for_bit(kind: str, shm_roots: Any) -> None:
    run_ranks(_train_on, 2, kind, store_per_node=shm_roots(1))


def _divided_by_rows(rank: int, world_size: int, values: torch.Tensor) -> ShardedTensor:
    """As FSDP1 divides a tensor: the last ranks may have no row of it."""
    count = -(-len(values) // world_size)
    rows = values[rank * count : (rank + 1) * count].clone()
    shards = []
    if len(rows):
        shards = [Shard.from_tensor_and_offsets(rows, [rank * count, 0], rank)]
    return init_from_local_shards(shards, *values.shape)


def _save_several_shards(rank: int, world_size: int) -> None:
    """Rank 0 has the first and the last row of three, rank 1 the one between."""

    def sharded(values: torch.Tensor) -> ShardedTensor:
        rows = ([0, 2], [1])[rank]
        parts = [values[row : row + 1].clone() for row in rows]
        shards = [
            Shard.from_tensor_and_offsets(part, [row, 0], rank)
            for part, row in zip(parts, rows, strict=True)
        ]
        return init_from_local_shards(shards, 3, 4)

    values = torch.arange(12.0).view(3, 4)
    state = {"sharded": sharded(values), "half": sharded(values.to(torch.bfloat16))}
    state["again"] = state["sharded"]

    image = pack(state, IDENTITY)
    loaded = unpack(image)

    _assert_same(loaded, state)
    assert loaded["again"] is loaded["sharded"]
    given = {"sharded": sharded(values * 0), "half": sharded(values.to(torch.bfloat16) * 0)}
    given["again"] = given["sharded"]
    ImageReader(image, SafeGlobals()).restore(find_targets(given))
    _assert_same(given, state)
    for shard in unpack(image, map_location="meta")["sharded"].local_shards():
        assert shard.tensor.is_meta
        assert str(shard.metadata.placement) == f"rank:{rank}/meta"
    torch.distributed.destroy_process_group()
    with pytest.raises(RestoreError, match="at 'sharded' raised"):
        unpack(image)


def test_a_rank_may_have_several_shards_of_a_tensor() -> None:
    run_ranks(_save_several_shards, 2)


def _save_rows(rank: int, world_size: int, root: Path) -> None:
    values = torch.arange(15.0).view(5, 3)
    with (
        make_manager("disk", node_store()) as nodes,
        localckpt.GlobalCheckpointManager(root, local=nodes) as shared,
        localckpt.AsyncCallsQueue() as queue,
    ):
        nodes.save({"w": _divided_by_rows(rank, world_size, values), "step": 3}, 1)
        queue.schedule_async_request(nodes.promote(1, to=shared))
        queue.wait_until_finished()


def _load_rows(rank: int, world_size: int) -> None:
    values = torch.arange(15.0).view(5, 3)
    given = _divided_by_rows(rank, world_size, torch.full_like(values, -1.0))
    with make_manager("disk", node_store(), elastic=True) as manager:
        loaded, _ = manager.load(into={"w": given, "step": 0})
    _assert_same(loaded, {"w": _divided_by_rows(rank, world_size, values), "step": 3})


def test_a_rank_may_have_no_shard_of_a_tensor_before_and_after(tmp_path: Path) -> None:
    nodes = [tmp_path / "node"]
    run_ranks(_save_rows, 4, tmp_path / "shared", store_per_node=nodes)

    run_ranks(_load_rows, 6, store_per_node=nodes)

    (folder,) = (tmp_path / "shared").glob("iteration_*")
    drained = {"w": torch.zeros(5, 3)}
    dcp.load(drained, checkpoint_id=folder, no_dist=True)
    assert torch.equal(drained["w"], torch.arange(15.0).view(5, 3))
