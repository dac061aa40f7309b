"""Digests of what ranks have in common depend on keys, places and bytes, and on nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from localckpt.ids import Generation, ShardIdentity
from localckpt.state_dict import image as images
from localckpt.state_dict.boxes import Box, RankSet
from localckpt.state_dict.global_view import Job
from localckpt.state_dict.image import ImagePlanner, pack
from localckpt.state_dict.replica_digests import PartDigest, replica_digests
from localckpt.state_dict.replicated import Replicated


def _digests(state: Any, rank: int = 0, world_size: int = 4) -> list[PartDigest]:
    identity = ShardIdentity("run", Generation(1, 1 + rank), 3 + rank, rank, world_size)
    planner = ImagePlanner(job=Job(rank, range(world_size)))
    return replica_digests(pack(state, identity, planner).view)


def _marked(model: Mapping[str, torch.Tensor], ranks: Sequence[int] = range(4)) -> dict[str, Any]:
    return {"model": Replicated(dict(model), tuple(ranks))}


_SHAPES = st.lists(st.integers(0, 5), max_size=3)


@st.composite
def _models(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    model = {}
    for number in range(draw(st.integers(1, 4))):
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]))
        shape = draw(_SHAPES)
        values = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(number))
        model[f"t{number}"] = values.to(dtype)
    return model


@given(_models(), st.data())
def test_order_strides_and_private_parts_count_for_nothing(
    model: dict[str, torch.Tensor], data: st.DataObject
) -> None:
    expected = _digests(_marked(model))
    other = {}
    for key in data.draw(st.permutations(sorted(model))):
        tensor = model[key]
        order = data.draw(st.permutations(range(tensor.dim())))
        # The same values, with the dimensions in another order in memory.
        moved = tensor.permute(order).contiguous()
        other[key] = moved.permute([order.index(dim) for dim in range(tensor.dim())])
        assert torch.equal(other[key], tensor)
    private = {"own": torch.randn(data.draw(st.integers(0, 999)))}

    found = _digests({**private, **_marked(other)}, rank=2)

    assert [(of.set_id, of.digest, of.tensors) for of in found] == [
        (of.set_id, of.digest, of.tensors) for of in expected
    ]
    assert [of.tensors.keys() for of in found] == [{f"model.{key}" for key in model}]


@given(_models(), st.data())
def test_any_flipped_bit_changes_the_digest_of_its_tensor_and_no_other(
    model: dict[str, torch.Tensor], data: st.DataObject
) -> None:
    full = sorted(key for key, tensor in model.items() if tensor.numel())
    if not full:
        return
    (before,) = _digests(_marked(model))
    key = data.draw(st.sampled_from(full))
    memory = torch.empty(0, dtype=torch.uint8).set_(model[key].untyped_storage())
    bit = data.draw(st.integers(0, 8 * model[key].nbytes - 1))
    memory[bit // 8] ^= 1 << (bit % 8)

    (after,) = _digests(_marked(model))

    assert after.set_id == before.set_id
    assert after.digest != before.digest
    assert {k for k in after.tensors if after.tensors[k] != before.tensors[k]} == {f"model.{key}"}


def test_a_set_of_one_rank_and_a_job_of_one_rank_have_nothing_in_common() -> None:
    model = {"a": torch.ones(3)}

    assert _digests(_marked(model, [0])) == []
    assert _digests(_marked(model, [0]), world_size=1) == []
    assert _digests({"model": model}) == []


def _boxed(boxes: Mapping[str, Box], monkeypatch: pytest.MonkeyPatch) -> list[PartDigest]:
    """What an image has in common whose tensors have these boxes, as Megatron-Core's have."""
    monkeypatch.setattr(images, "boxes_of", lambda *_: dict(enumerate(boxes.values())))
    return _digests({key: torch.ones(2, 3) for key in boxes})


def _box(key: str, offset: int, *, rows: int = 2, ranks: RankSet | None = None) -> Box:
    return Box(key, (rows, 3), (((offset, 2),), ((0, 3),)), ranks)


def test_without_sets_of_ranks_those_with_the_same_boxes_are_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Two ranks of tensor parallelism: norms are on both, weights are divided.
    first = {"n": _box("decoder.norm", 0), "w": _box("decoder.weight", 0, rows=4)}
    second = {"n": _box("decoder.norm", 0), "w": _box("decoder.weight", 2, rows=4)}
    # And the optimizer is divided further.
    first["o"] = _box("optimizer.weight", 0, rows=8)
    second["o"] = _box("optimizer.weight", 6, rows=8)

    here, there = _boxed(first, monkeypatch), _boxed(second, monkeypatch)

    in_common = {of.set_id for of in here} & {of.set_id for of in there}
    assert [list(of.tensors) for of in here if of.set_id in in_common] == [["decoder.norm"]]
    assert _boxed(first, monkeypatch) == here
    assert {len(of.tensors) for of in here} == {1}
    assert sorted(key for of in here for key in of.tensors) == [
        "decoder.norm",
        "decoder.weight [0:2, 0:3] of [4, 3]",
        "optimizer.weight [0:2, 0:3] of [8, 3]",
    ]
