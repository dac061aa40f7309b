"""Tensors that share memory are stored once, and share memory again after a load."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from localckpt.state_dict.source import read_header
from tests.state_dict.states import assert_same, image_of, round_trip, source_of

pytestmark = pytest.mark.fault("hard-state")


def tensor_nbytes(state: Any) -> int:
    return sum(slot.nbytes for slot in read_header(source_of(image_of(state))).slots.values())


def test_one_tensor_in_many_places_is_one_tensor_again() -> None:
    weight = torch.nn.Parameter(torch.rand(8, 8))
    state = {"embedding": weight, "head": weight, "list": [weight, (weight,)]}

    loaded = round_trip(state)

    assert loaded["head"] is loaded["embedding"]
    assert loaded["list"][0] is loaded["embedding"]
    assert loaded["list"][1][0] is loaded["embedding"]
    assert tensor_nbytes(state) == weight.nbytes


def test_views_of_a_whole_tensor_are_stored_in_its_bytes() -> None:
    whole = torch.arange(24.0).view(4, 6)
    state = {
        "row": whole[1],
        "whole": whole,
        "transposed": whole.t(),
        "column": whole[:, 2],
        "flat": whole.view(-1)[3:20:2],
        "as int": whole.view(torch.int32),
        "half": whole.view(torch.float64)[2:],
    }

    loaded = round_trip(state)

    assert tensor_nbytes(state) == whole.nbytes
    assert_same(loaded, state)
    loaded["whole"].fill_(7.0)
    assert all((loaded[name] == 7).all() for name in ("row", "transposed", "column", "flat"))
    assert [t.stride() for t in loaded.values()] == [t.stride() for t in state.values()]


def test_views_that_overlap_without_a_whole_share_bytes_again() -> None:
    storage = torch.arange(1000, dtype=torch.int32)
    left, right, sparse = storage[101:203], storage[150:290], storage[120:280:5]
    state = {"left": left, "right": right, "sparse": sparse}

    loaded = round_trip(state)

    assert_same(loaded, state)
    loaded["left"][50] = -1
    assert loaded["right"][1] == -1
    loaded["right"][10] = -2
    assert loaded["sparse"][8] == -2
    assert tensor_nbytes(state) < 1.1 * (290 - 101) * 4


def test_disjoint_views_of_one_storage_do_not_carry_the_rest_of_it() -> None:
    storage = torch.rand(1_000_000)
    state = {"a": storage[10:20], "b": storage[500_000:500_010]}

    loaded = round_trip(state)

    assert tensor_nbytes(state) == 80
    assert_same(loaded, state)


def test_an_expanded_tensor_takes_the_bytes_of_one_copy() -> None:
    row = torch.rand(1, 100)
    state = {"expanded": row.expand(1000, 100)}

    loaded = round_trip(state)["expanded"]

    assert tensor_nbytes(state) <= row.nbytes + 16
    assert loaded.stride() == (0, 1)
    assert_same(loaded, state["expanded"])


def test_arrays_of_numpy_that_share_memory_come_back() -> None:
    array = numpy.arange(20)
    state = [torch.from_numpy(array[:6])[::2], torch.from_numpy(array)[::3]]

    loaded = round_trip(state)

    assert_same(loaded, state)


def test_tensors_of_one_name_are_distinguished() -> None:
    state = {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}, 1: torch.ones(2), "1": torch.ones(3)}

    loaded = round_trip(state)

    assert_same(loaded, state)
    names = read_header(source_of(image_of(state))).slots
    assert len(names) == 4


@pytest.mark.parametrize("name", ["__skeleton__", "__digests__", "__metadata__", "", "\ud800", '"'])
def test_a_tensor_may_have_any_name(name: str) -> None:
    state = {name: torch.rand(3)}

    image = image_of(state)

    assert_same(round_trip(state), state)
    assert any(torch.equal(t, state[name]) for t in load(bytes(image)).values())


@st.composite
def _views(draw: st.DrawFn) -> list[torch.Tensor]:
    storage = torch.arange(240, dtype=torch.uint8)
    dtypes = st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.complex128])
    views = []
    for _ in range(draw(st.integers(1, 6))):
        dtype = draw(dtypes)
        room = 240 // dtype.itemsize
        rows, columns = draw(st.integers(0, 4)), draw(st.integers(0, 4))
        strides = draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
        reach = max(0, rows - 1) * strides[0] + max(0, columns - 1) * strides[1] + 1
        offset = draw(st.integers(0, max(0, room - reach)))
        if offset + reach > room:
            continue
        view = torch.empty(0, dtype=dtype)
        view.set_(storage.untyped_storage(), offset, (rows, columns), strides)
        views.append(view)
    return views


@given(_views())
def test_any_views_of_one_storage_come_back_with_the_same_overlaps(
    views: list[torch.Tensor],
) -> None:
    loaded = round_trip(views)

    assert_same(loaded, views)
    for i, one in enumerate(views):
        for j, other in enumerate(views):
            if one.numel() and other.numel() and _overlap(one, other):
                apart = other.data_ptr() - one.data_ptr()
                assert loaded[j].data_ptr() - loaded[i].data_ptr() == apart


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    (a, b), (c, d) = _reach(one), _reach(other)
    return a < d and c < b


def _reach(tensor: torch.Tensor) -> tuple[int, int]:
    steps = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (steps + 1) * tensor.itemsize
