"""Whatever is saved comes back bit for bit: every dtype, every structure, every kind of value."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import math
import pathlib
import struct
import types
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import torch

from localckpt.errors import CheckpointingException, MismatchError
from localckpt.state_dict.image import ImagePlanner, pack, unpack
from localckpt.state_dict.reader import ImageReader
from localckpt.state_dict.targets import find_targets
from tests.state_dict.states import (
    ALLOWED,
    IDENTITY,
    Point,
    Settings,
    assert_same,
    round_trip,
    source_of,
    written,
)
from tests.state_dict.zoo import Zoo, assert_same_state, tensors_of

pytestmark = [pytest.mark.fault("hard-state"), pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, False, 0, -1, 2**64, -(10**400), 0.1, -0.0, math.inf, 1e-320),
        struct.unpack("<d", struct.pack("<Q", 0x7FF8DEAD_BEEF0001))[0],
        *(complex(1, -0.0), "", "text \x00, 漢字, 🙂", b"", b"\xff\x00", bytearray(b"a")),
        *((), [], {}, set(), frozenset({1, 2}), {1, "a", (2, b"b")}),
        *(range(1, 9, 2), slice(1, None, 3), torch.Size([2, 3])),
        *(torch.bfloat16, torch.device("cpu"), torch.device("cuda:3"), torch.strided),
        *(torch.contiguous_format, torch.channels_last),
        *(datetime.datetime(2026, 1, 2, 3, 4, 5, 6, datetime.timezone.utc), datetime.date(1, 1, 1)),
        *(datetime.timedelta(1, 2, 3), datetime.time(1, 2), decimal.Decimal("1.10")),
        *(uuid.UUID(int=5), pathlib.Path("/a/b")),
        types.SimpleNamespace(a=1, b=[2]),
        collections.OrderedDict([("z", 1), ("a", 2)]),
        collections.defaultdict(list, {"a": [1]}),
        collections.Counter("aab"),
        collections.deque([1, 2, 3], maxlen=3),
        Point(1, Point("a", None)),
        {(1, "a"): 1, 2: "b", None: 3, "k": {4.5: b"c"}},
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_that_are_no_tensors_come_back_equal(value: Any) -> None:
    state = {"value": value, "weight": torch.ones(2)}

    loaded = round_trip(state)

    assert_same(loaded, state)


_NESTED = r"nested tensor: save the list of tensors that its unbind\(\) gives.*\(at 'value.0'\)"


def _nested(layout: torch.layout) -> list[torch.Tensor]:
    return [torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(4, 3)], layout=layout)]


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: lambda: 1, "lambda"),
        (lambda: (n for n in range(3)), "generator"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantized"),
        (lambda: torch.ones(3).untyped_storage(), "storage"),
        (lambda: _nested(torch.strided), _NESTED),
        (lambda: _nested(torch.jagged), _NESTED),
    ],
    ids=["lambda", "generator", "quantized", "storage", "nested", "jagged"],
)
@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning", "ignore:.*quantiz:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
def test_what_cannot_be_saved_is_named_when_it_is_saved(
    make: Callable[[], Any], named: str
) -> None:
    state = {"weight": torch.ones(2), "value": make()}

    with pytest.raises(CheckpointingException, match=named):
        pack(state, IDENTITY)


def test_a_nesting_too_deep_is_an_error_and_not_a_crash() -> None:
    state: list[Any] = [torch.ones(1)]
    for _ in range(100_000):
        state = [state]

    with pytest.raises(CheckpointingException, match="recursion"):
        pack(state, IDENTITY)


def test_the_users_object_is_as_it_was_after_a_save() -> None:
    weight, shared = torch.rand(3, 4), [1, 2]
    inner = {"weight": weight, "view": weight.t(), "list": shared, "again": shared}
    state = Settings(Point(inner, torch.nn.Parameter(torch.rand(2))), "name")
    parts = [state.value, inner, weight, inner["view"], shared, state.value.y]
    before, version = weight.clone(), weight._version

    pack(state, IDENTITY, ImagePlanner(ALLOWED))

    now = [state.value, state.value.x, inner["weight"], inner["view"], inner["list"], state.value.y]
    assert [id(part) for part in now] == [id(part) for part in parts]
    assert inner["again"] is shared
    assert torch.equal(weight, before)
    assert weight._version == version
    assert weight.stride() == (4, 1)


def test_a_device_that_is_not_here_is_an_error_that_says_what_to_do() -> None:
    capture = ImagePlanner().capture({"weight": torch.rand(3)})
    elsewhere = dataclasses.replace(capture, skeleton=capture.skeleton.replace(b'"cpu"', b'"xyz"'))

    with pytest.raises(MismatchError, match="map_location='cpu'"):
        unpack(source_of(written(elsewhere)))

    for where in ("cpu", torch.device("cpu")):
        loaded = unpack(source_of(written(elsewhere)), map_location=where)
        assert torch.equal(loaded["weight"], capture.tensors[0])


_SHORT, _BLOCK, _BLOCKS = 120, 300, 10


def _wrong(seed: int, planner: ImagePlanner) -> str | None:
    """What is wrong of the state of a seed: loaded, and loaded into a state like it."""
    state = Zoo(seed).state()
    image = pack(state, IDENTITY, planner)
    try:
        assert_same_state(unpack(image, allowed=ALLOWED), state)
        given = Zoo(seed).state()
        for tensor in tensors_of(given):
            if not tensor.is_meta:
                tensor.untyped_storage().fill_(0)
        loaded = ImageReader(image, ALLOWED).restore(find_targets(given))
        assert_same_state(loaded, state)
    except AssertionError as error:
        return f"seed {seed}: {error!r}"
    return None


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "block", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(1, _BLOCKS))]
)
def test_no_random_state_that_one_planner_saves_comes_back_wrong(
    block: int, long_form: bool, record_property: Any
) -> None:
    seeds = range(block * _BLOCK, (block + 1) * _BLOCK) if long_form else range(_SHORT)

    planner = ImagePlanner(ALLOWED)
    wrong = [told for seed in seeds if (told := _wrong(seed, planner)) is not None]

    record_property("cases", len(seeds))
    assert wrong == []
