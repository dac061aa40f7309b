"""A save refuses just what a load would, all of it at once, and with its place."""

from __future__ import annotations

import collections
import functools
import io
import operator
import os
import pickle
import re
from typing import Any

import numpy
import pytest
import torch

from localckpt.errors import CheckpointingException, CorruptShardError, UnsafeGlobalError
from localckpt.state_dict.image import ImagePlanner, pack, unpack
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.skeleton import insert_tensors, take_tensors
from localckpt.state_dict.unpickler import check_skeleton
from tests.state_dict.states import ALLOWED, IDENTITY, Settings, assert_same, round_trip


class Reduced:
    """Pickles as whatever a test says."""

    def __init__(self, *reduced: Any) -> None:
        self._reduced = reduced

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduced


class Other:
    """A class that nobody allowed."""


def _name_of(value: Any) -> str:
    """The same name in every worker, so without an address."""
    return re.sub(" at 0x[0-9a-f]+", "", repr(value))[:60]


@pytest.mark.parametrize(
    "callable_",
    [
        *(getattr, setattr, type, eval, exec, compile, __import__, open),
        *(functools.partial, functools.reduce, operator.attrgetter, operator.methodcaller),
        *(os.system, os.getenv, pickle.loads, torch.load, torch.jit.load, numpy.load),
        *((eval, "my.own_name"), (Settings, "builtins.eval")),
    ],
    ids=_name_of,
)
def test_what_calls_whatever_a_file_says_cannot_be_allowed(callable_: Any) -> None:
    with pytest.raises(UnsafeGlobalError, match=r"cannot allow .* would run what the file says"):
        SafeGlobals([Settings, callable_])


def test_what_torch_allows_is_not_allowed_if_it_runs_code() -> None:
    state = {"value": Reduced(eval, ("1 + 1",))}

    with (
        torch.serialization.safe_globals([eval, Settings]),
        pytest.raises(UnsafeGlobalError, match=r"builtins\.eval cannot be allowed"),
    ):
        pack(state, IDENTITY)


@pytest.mark.parametrize(
    "value",
    [
        Reduced(dict, ([("a", 1)],)),
        Reduced(dict, ({"a": 1},)),
        Reduced(list, ((1, 2),)),
        Reduced(tuple, ([1, torch.ones(2)],)),
        Reduced(str, ("text",)),
        Reduced(int, (5,)),
        Reduced(float, (5,)),
        Reduced(bytes, (b"ab",)),
        Reduced(frozenset, ([1],)),
        Reduced(list, (range(10),)),
        Reduced(str, (5,)),
        Reduced(bytes, (5,)),
        Reduced(dict, (), None, None, iter([("a", 1)])),
        Reduced(collections.Counter, (range(3),)),
        Reduced(numpy.ndarray, ((3,),)),
        Reduced(torch.Tensor, (3,)),
        Reduced(numpy.float32, (3,)),
        collections.defaultdict(functools.partial(collections.deque, maxlen=3)),
        collections.defaultdict(functools.partial(dict)),
        collections.defaultdict(list, a=[1]),
        collections.defaultdict(Settings),
        collections.deque([1, 2], maxlen=3),
        collections.OrderedDict(a=1),
        collections.Counter("aab"),
        Settings,
        Other,
        Other(),
        operator.attrgetter("a"),
        len,
    ],
    ids=lambda value: _name_of(getattr(value, "_reduced", value)),
)
def test_what_a_save_accepts_is_loaded_and_what_it_refuses_a_load_refuses(value: Any) -> None:
    state = {"weight": torch.ones(2), "value": value}
    planner = ImagePlanner(ALLOWED)
    skeleton, tensors, *_ = take_tensors(state)
    try:
        check_skeleton(skeleton, ALLOWED)
        insert_tensors(skeleton, tensors.__getitem__, ALLOWED)
    except CheckpointingException:
        with pytest.raises(CheckpointingException, match=r"\(at 'value"):
            pack(state, IDENTITY, planner)
    else:
        loaded = unpack(pack(state, IDENTITY, planner), allowed=ALLOWED)
        assert_same(loaded["weight"], state["weight"])


def test_types_of_dtypes_and_constants_come_back() -> None:
    state = [
        *(numpy.dtype("f4"), numpy.dtype(">f8"), numpy.dtype("V3")),
        *(numpy.dtype("M8[25s]"), numpy.dtype("U7"), numpy.float32, numpy.bool_, numpy.str_),
        *(torch.dtype, torch.float32, torch.int8, Ellipsis, NotImplemented),
        *(type(None), type(Ellipsis), int, dict, torch.Tensor),
    ]

    assert round_trip(state) == state


def test_a_generator_of_torch_goes_on_where_it_was() -> None:
    generator = torch.Generator().manual_seed(5)
    torch.rand(3, generator=generator)

    loaded = round_trip({"a": generator, "b": generator})

    assert loaded["a"] is loaded["b"]
    assert_same(torch.rand(5, generator=loaded["a"]), torch.rand(5, generator=generator))


@pytest.mark.parametrize("number", [-1, 1, 2**40])
def test_a_tensor_that_the_image_does_not_have_is_refused(number: int) -> None:
    class Forging(pickle.Pickler):
        def persistent_id(self, obj: Any) -> int | None:
            return number if isinstance(obj, torch.Tensor) else None

    file = io.BytesIO()
    Forging(file, protocol=5).dump({"weight": torch.ones(2)})

    with pytest.raises(CorruptShardError, match=f"refers to tensor {number} of 1"):
        check_skeleton(file.getvalue(), ALLOWED, tensors=1)
