"""Tensors of a state to load into are those that a save finds, in the same order.

Left out are those of device meshes, which belong to the job, of arrays, and the parts of sparse
tensors.
"""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.two_tensor import TwoTensor

import localckpt
from localckpt.state_dict.foreign_values import ArrayTensor
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.skeleton import find_tensors, take_tensors
from localckpt.state_dict.unpickler import check_skeleton
from tests.ranks import run_ranks
from tests.state_dict.states import FrozenSettings, Settings, Tagged, TaggedParameter
from tests.state_dict.zoo import Zoo

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

_ALLOWED = SafeGlobals([Settings, FrozenSettings, Tagged, TaggedParameter, TwoTensor])


def _views(tensors: list[torch.Tensor]) -> list[tuple[Any, ...]]:
    """What tells tensors apart; a subclass without inner tensors is found as a new object."""
    return [
        (t.data_ptr(), t.shape, t.stride(), t.dtype, str(t.device))
        for t in tensors
        if type(t) is not ArrayTensor
    ]


def _assert_finds_what_a_save_finds(state: Any) -> None:
    taken, found = take_tensors(state), find_tensors(state)
    contents = check_skeleton(taken.skeleton, _ALLOWED)
    left_out = contents.of_meshes | contents.composed
    saved = [tensor for number, tensor in enumerate(taken.tensors) if number not in left_out]
    assert _views(found) == _views(saved)
    assert not any(type(tensor) is ArrayTensor for tensor in found)


def test_what_is_found_in_random_states_is_what_a_save_finds() -> None:
    for seed in range(60):
        _assert_finds_what_a_save_finds(Zoo(seed).state())


def _find_in_wrappers(rank: int, world_size: int) -> None:
    flat = init_device_mesh("cpu", (world_size,))
    square = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("one", "other"))
    rows = DTensor.from_local(torch.rand(2, 3), flat, [Shard(0)])
    marked = torch.nn.Parameter(DTensor.from_local(torch.rand(4), square, [Replicate(), Shard(0)]))
    marked.partition_dim, marked.beside = 0, torch.rand(2)
    plain = torch.nn.Parameter(torch.rand(3))
    plain.partition_dim = 0
    shard = LocalShard.from_tensor_and_offsets(torch.rand(2, 2), [2 * rank, 0], rank)
    state = {
        "rows": rows,
        "again": rows,
        "local": rows.to_local(),
        "marked": marked,
        "quantized": DTensor.from_local(
            TwoTensor(torch.rand(2), torch.rand(2)), flat, [Shard(0)], run_check=False
        ),
        "two": TwoTensor(torch.rand(2), torch.rand(2)),
        "sharded": init_from_local_shards([shard], 2 * world_size, 2),
        "plain": plain,
        "array": numpy.arange(2000),
        "equal": localckpt.replicated({"w": torch.rand(2), "rows": rows}),
        "meshes": [flat, square],
    }

    _assert_finds_what_a_save_finds(state)

    found = list(map(id, find_tensors(state)))
    inner = [rows._local_tensor, marked._local_tensor, shard.tensor, plain, marked.beside]
    assert all(id(tensor) in found for tensor in (*inner, state["two"].a, state["two"].b))


def test_what_is_found_in_wrappers_is_what_a_save_finds() -> None:
    run_ranks(_find_in_wrappers, 2)
