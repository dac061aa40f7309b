"""DTensors come back as they were, and what is equal in several of them is written once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.two_tensor import TwoTensor

from localckpt.errors import CheckpointingException
from localckpt.state_dict.image import ImagePlanner, pack, unpack
from localckpt.state_dict.safe_globals import SafeGlobals
from tests.global_tier.models import MISDESCRIBED, misdescribed
from tests.ranks import run_ranks
from tests.state_dict.states import IDENTITY, Rows, bits

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


_ALLOWED = SafeGlobals([Rows, TwoTensor])


def _zoo(flat: DeviceMesh, square: DeviceMesh) -> dict[str, DTensor]:
    def made(*placements: Any, mesh: DeviceMesh = flat, size: tuple[int, ...] = (4, 6)) -> DTensor:
        return DTensor.from_local(torch.rand(size), mesh, placements, run_check=False)

    learned = torch.nn.Parameter(made(Shard(0)))
    learned.partition_dim, learned.tags = 1, ["a", (2, 3)]  # type: ignore[attr-defined]
    shared = made(Shard(0))
    meta = shared._spec.tensor_meta
    assert meta is not None
    # As a program may make it: equal to a torch.Size, but a plain tuple.
    plain = DTensorSpec(flat, (Shard(0),), meta._replace(shape=tuple(meta.shape)))  # type: ignore[arg-type]
    halves = TwoTensor(torch.rand(4, 6), torch.rand(4, 6))
    return {
        "rows": made(Shard(0)),
        "same rows": made(Shard(0)),
        "rows of a class": made(Rows(0)),
        "columns": made(Shard(1)),
        "turned": DTensor.from_local(torch.rand(6, 4).t(), flat, [Shard(0)], run_check=False),
        "replicated": made(Replicate()),
        "sum": made(Partial()),
        "mean": made(Partial("avg")),
        "both": made(Shard(0), Shard(1), mesh=square),
        "strided": made(_StridedShard(0, split_factor=2), Shard(0), mesh=square),
        "integers": DTensor.from_local(torch.arange(24).view(4, 6), flat, [Shard(0)]),
        "scalar": made(Replicate(), size=()),
        "learned": learned,
        "frozen": torch.nn.Parameter(made(Shard(0)), requires_grad=False),
        "leaf": made(Shard(0)).requires_grad_(),
        "spec of another": DTensor(torch.rand(4, 6), shared._spec, requires_grad=False),
        "shared": shared,
        "plain": DTensor(torch.rand(4, 6), plain, requires_grad=False),
        "halves": DTensor.from_local(halves, flat, [Shard(0)], run_check=False),
        **{kind: misdescribed(kind, square) for kind in MISDESCRIBED},
    }


def _assert_same(found: DTensor, wanted: DTensor) -> None:
    for name in ("dtype", "shape", "device", "layout", "requires_grad", "is_leaf"):
        assert getattr(found, name) == getattr(wanted, name), name
    assert type(found) is type(wanted)
    assert found.stride() == wanted.stride()
    assert repr(vars(found)) == repr(vars(wanted))
    local, saved = found._local_tensor, wanted._local_tensor
    assert type(local) is type(saved)
    inner = ("a", "b") if isinstance(saved, TwoTensor) else ()
    pairs = [(getattr(local, name), getattr(saved, name)) for name in inner] or [(local, saved)]
    for one, other in pairs:
        assert bits(one) == bits(other)
        assert one.stride() == other.stride()
        assert one.requires_grad == other.requires_grad
    about, saved_about = vars(found._spec), vars(wanted._spec)
    assert list(about) == list(saved_about)
    for name, value in saved_about.items():
        assert _described(about[name]) == _described(value), name


def _described(value: Any) -> Any:
    """A value with the classes in it, which the operator == ignores."""
    if isinstance(value, DeviceMesh):
        return value.mesh.tolist(), value.mesh_dim_names, value.device_type
    if isinstance(value, tuple):
        return type(value), [_described(part) for part in value]
    return type(value), repr(value)


def _bring_back(rank: int, world_size: int) -> None:
    state = _zoo(*_meshes(world_size))

    loaded = unpack(pack(state, IDENTITY, ImagePlanner(_ALLOWED)), allowed=_ALLOWED)

    for name, wanted in state.items():
        _assert_same(loaded[name], wanted)
    assert len({id(tensor.device_mesh) for tensor in loaded.values()}) == 2
    assert loaded["rows"]._spec is not loaded["same rows"]._spec
    assert loaded["shared"]._spec is loaded["spec of another"]._spec


def test_dtensors_come_back_with_all_that_torch_pickles() -> None:
    run_ranks(_bring_back, 4)


def _refuse_a_view(rank: int, world_size: int) -> None:
    line, _ = _meshes(world_size)
    whole = torch.arange(12.0).reshape(6, 2)

    for placement in (Shard(0), Replicate()):
        view = DTensor.from_local(whole[2:4], line, [placement])
        with pytest.raises(CheckpointingException, match=r"local\.clone\(\) \(at 'model\.w'\)"):
            pack({"model": {"w": view}}, IDENTITY, ImagePlanner(_ALLOWED))
        # One at the beginning is as any other.
        pack({"w": DTensor.from_local(whole[:2], line, [placement])}, IDENTITY)


def test_a_dtensor_that_is_a_view_at_an_offset_is_refused_by_name() -> None:
    run_ranks(_refuse_a_view, 2)


def _meshes(world_size: int) -> tuple[DeviceMesh, DeviceMesh]:
    square = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("one", "other"))
    return init_device_mesh("cpu", (world_size,)), square
