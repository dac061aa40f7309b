"""Tensors that share memory are stored once, and share memory again after a load."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from safetensors.torch import load

from localckpt.errors import CheckpointingException
from localckpt.state_dict.image import ImagePlanner, pack, unpack
from localckpt.state_dict.marks import set_marks
from localckpt.state_dict.reader import ImageReader
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.source import read_header
from localckpt.state_dict.targets import find_targets
from tests.state_dict.states import IDENTITY, assert_same, image_of, round_trip, source_of

pytestmark = pytest.mark.fault("hard-state")


def test_disjoint_views_of_one_storage_do_not_carry_the_rest_of_it() -> None:
    storage = torch.rand(1_000_000)
    state = {"a": storage[10:20], "b": storage[500_000:500_010]}

    slots = read_header(source_of(image_of(state))).slots

    assert sum(slot.nbytes for slot in slots.values()) == 80
    assert_same(round_trip(state), state)


@pytest.mark.parametrize("name", ["__skeleton__", "__digests__", "__metadata__", "", "\ud800", '"'])
def test_a_tensor_may_have_any_name(name: str) -> None:
    state = {name: torch.rand(3)}

    image = image_of(state)

    assert_same(round_trip(state), state)
    assert any(torch.equal(t, state[name]) for t in load(bytes(image)).values())


def _marked(tensor: torch.Tensor, **marks: Any) -> torch.Tensor:
    for name, value in marks.items():
        setattr(tensor, name, value)
    return tensor


def test_attributes_that_are_no_data_are_left_out_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    weight = _marked(torch.nn.Parameter(torch.rand(2)), hook=lambda: None, shared=True)
    weight.main_grad = torch.rand(2)
    weight.itself = [weight]
    weight._private = 1
    planner = ImagePlanner()

    with caplog.at_level(logging.WARNING):
        for more in range(3):
            image = pack({"model": {"weight": weight}, "more": [weight] * more}, IDENTITY, planner)

    assert vars(unpack(image)["model"]["weight"]) == {"shared": True}
    for name in ("hook", "main_grad", "itself"):
        (told,) = [r for r in caplog.messages if f"attribute {name!r} of tensors is not saved" in r]
        assert "model.weight has one of class" in told


def test_tensors_that_are_given_keep_their_own_attributes() -> None:
    saved = _marked(torch.ones(2), shared=True, partition_dim=1)
    given = _marked(torch.zeros(2), shared=False)

    target = find_targets({"weight": given})
    source = pack({"weight": saved}, IDENTITY)
    loaded = ImageReader(source, SafeGlobals()).restore(target)

    assert loaded["weight"] is given
    assert torch.equal(given, saved)
    assert vars(given) == {"shared": False}


class _Made:
    """Pickles as a call that no state of ours has."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __reduce__(self) -> Any:
        return set_marks, self.arguments


@pytest.mark.parametrize(
    "arguments",
    [
        ([], {}),
        (torch.ones(1), {1: 2}),
        (torch.ones(1), {"_private": 2}),
        (torch.ones(1), {"a": object}),
        (torch.ones(1), []),
    ],
    ids=["no tensor", "no name", "private", "no data", "no dict"],
)
def test_attributes_are_set_on_tensors_alone_and_are_data(arguments: Any) -> None:
    allowed = SafeGlobals([object])

    with pytest.raises(CheckpointingException, match="attribute"):
        unpack(pack({"made": _Made(*arguments)}, IDENTITY, ImagePlanner(allowed)), allowed=allowed)
