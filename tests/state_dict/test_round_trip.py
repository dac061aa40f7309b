"""Whatever is saved comes back bit for bit: every dtype, every structure, every kind of value."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import math
import pathlib
import random
import struct
import types
import uuid
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_values

from localckpt.errors import CheckpointingException, MismatchError
from localckpt.state_dict.image import ImagePlanner, pack, unpack
from localckpt.state_dict.safe_globals import SafeGlobals
from tests.state_dict.states import (
    ALLOWED,
    IDENTITY,
    FrozenSettings,
    Point,
    Settings,
    Tagged,
    TaggedParameter,
    assert_same,
    bits,
    round_trip,
    source_of,
    written,
)

pytestmark = pytest.mark.fault("hard-state")


def _dtypes() -> list[torch.dtype]:
    named = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    quantized = {torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4}
    return sorted(named - quantized, key=str)


DTYPES = _dtypes()


def filled(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """A tensor of random bits, so that every NaN payload and every denormal has its chance."""
    generator = torch.Generator().manual_seed(seed)
    nbytes = math.prod(shape) * dtype.itemsize
    high = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, high, (nbytes,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def test_the_dtypes_under_test_include_all_that_training_uses() -> None:
    assert {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.complex32, torch.complex64, torch.complex128),
        *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
    } <= set(DTYPES)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
def test_every_dtype_comes_back_bit_for_bit(dtype: torch.dtype) -> None:
    state = {
        "whole": filled(dtype, (3, 5), seed=1),
        "0-dim": filled(dtype, (1,), seed=2)[0],
        "empty": filled(dtype, (0, 3)),
        "transposed": filled(dtype, (4, 3), seed=3).t(),
        "strided": filled(dtype, (12,), seed=4)[1::3],
        "odd": filled(dtype, (7,), seed=5)[1:],
    }

    loaded = round_trip(state)

    assert_same(loaded, state)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_nan_payloads_and_signs_of_zero_survive(dtype: torch.dtype) -> None:
    width = dtype.itemsize
    exponent = {2: 0x7C00 if dtype is torch.float16 else 0x7F80, 4: 0x7F800000, 8: 0x7FF << 52}
    patterns = [exponent[width] | 1, exponent[width] | 0x5, 1 << (8 * width - 1), exponent[width]]
    raw = b"".join(pattern.to_bytes(width, "little") for pattern in patterns)
    tensor = torch.frombuffer(bytearray(raw), dtype=dtype)

    loaded = round_trip([tensor, tensor[::2].clone(), tensor.view(2, 2).t().clone().t()])

    assert bits(loaded[0]) == raw
    assert bits(loaded[1]) == bits(tensor[::2])
    assert bits(loaded[2]) == raw


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, False, 0, -1, 2**64, -(10**400), 0.1, -0.0, math.inf, 1e-320),
        struct.unpack("<d", struct.pack("<Q", 0x7FF8DEAD_BEEF0001))[0],
        *(
            complex(1, -0.0),
            "",
            "text \x00, 漢字, 🙂",
            b"",
            b"\xff\x00",
            bytearray(b"a"),
        ),
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


def test_the_random_states_of_python_numpy_and_torch_go_on_where_they_were() -> None:
    source, legacy = random.Random(3), numpy.random.RandomState(4)
    torch_source = torch.Generator().manual_seed(5)
    source.gauss(0, 1), legacy.randn(3), torch.rand(3, generator=torch_source)
    state = {
        "python": source.getstate(),
        "numpy": legacy.get_state(),
        "numpy object": legacy,
        "torch": torch_source.get_state(),
        "torch default": torch.get_rng_state(),
    }

    loaded = round_trip(state)

    other, other_torch = random.Random(), torch.Generator()
    other.setstate(loaded["python"])
    other_torch.set_state(loaded["torch"])
    assert other.gauss(0, 1) == source.gauss(0, 1)
    assert loaded["numpy object"].randn() == legacy.randn()
    assert_same(loaded["numpy"][1], state["numpy"][1])
    assert torch.equal(torch.rand(4, generator=other_torch), torch.rand(4, generator=torch_source))
    assert_same(loaded["torch default"], state["torch default"])


def _tensors() -> st.SearchStrategy[torch.Tensor]:
    shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
    plain = st.builds(filled, st.sampled_from(DTYPES), shapes, st.integers(0, 99))
    shaped = st.tuples(plain, st.sampled_from(["", "transposed", "strided", "expanded"]))
    return shaped.map(lambda pair: _reshaped(*pair))


def _reshaped(tensor: torch.Tensor, how: str) -> torch.Tensor:
    if how == "expanded":
        return tensor.unsqueeze(0).expand(3, *tensor.shape)
    if tensor.dim() < 2:
        return tensor
    return tensor.transpose(0, 1) if how == "transposed" else tensor[:, ::2] if how else tensor


_KEYS = st.text(max_size=6) | st.integers() | st.tuples(st.integers(0, 3), st.text(max_size=2))
_LEAVES = (
    _tensors()
    | st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text(max_size=10)
    | st.binary(max_size=10)
    | st.sets(st.integers() | st.text(max_size=3), max_size=4)
    | numpy_values.arrays(
        numpy_values.integer_dtypes() | numpy_values.floating_dtypes(),
        numpy_values.array_shapes(min_dims=0, max_side=3),
    )
)
_STATES = st.recursive(
    _LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(_KEYS, inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(_KEYS, inner, max_size=3).map(collections.OrderedDict)
        | st.lists(inner, max_size=3).map(collections.deque)
        | st.builds(Point, inner, inner)
        | st.builds(Settings, inner, st.text(max_size=3))
        | st.builds(FrozenSettings, inner)
    ),
    max_leaves=12,
)


@given(_STATES)
def test_any_nesting_of_anything_comes_back_bit_for_bit(state: Any) -> None:
    loaded = round_trip(state)

    assert_same(loaded, state)


@given(st.lists(_STATES, min_size=2, max_size=4))
def test_one_planner_saves_any_sequence_of_states(states: list[Any]) -> None:
    planner = ImagePlanner(ALLOWED)
    sequence = [*states, states[0]]

    loaded = [unpack(pack(state, IDENTITY, planner), allowed=ALLOWED) for state in sequence]

    assert_same(loaded, sequence)


def test_a_state_without_tensors_comes_back() -> None:
    for state in (None, {}, [], 5, {"iteration": 3}, "text"):
        assert_same(round_trip(state), state)


def test_a_bare_tensor_is_a_state() -> None:
    tensor = filled(torch.float32, (3, 4))

    loaded = round_trip(tensor)

    assert_same(loaded, tensor)


def test_parameters_stay_parameters_and_requires_grad_is_kept() -> None:
    leaf = torch.ones(2, requires_grad=True)
    state = {
        "parameter": torch.nn.Parameter(torch.rand(3)),
        "frozen": torch.nn.Parameter(torch.rand(3), requires_grad=False),
        "buffer": torch.nn.Buffer(torch.rand(3)),
        "leaf": leaf,
        "not a leaf": leaf * 2,
        "plain": torch.rand(3),
    }

    loaded = round_trip(state)

    assert_same(loaded, state)
    assert isinstance(loaded["buffer"], torch.nn.Buffer)
    assert not isinstance(loaded["plain"], torch.nn.Buffer)
    assert all(tensor.is_leaf for tensor in loaded.values())


def test_tensor_subclasses_come_back_with_their_class_and_attributes() -> None:
    tagged = torch.rand(2, 3).as_subclass(Tagged)
    tagged.note = ["kept"]
    learned = torch.rand(2).as_subclass(Tagged).requires_grad_()
    parameter = TaggedParameter(torch.rand(4))
    parameter.partition_dim = 1

    loaded = round_trip([tagged, learned, parameter, tagged])

    assert_same(loaded, [tagged, learned, parameter, tagged])
    assert loaded[0].note == ["kept"]
    assert loaded[0] is loaded[3]
    assert loaded[2].partition_dim == 1


def test_tensors_on_the_meta_device_come_back_without_data() -> None:
    state = {
        "tensor": torch.empty(3, 2, device="meta").t(),
        "parameter": torch.nn.Parameter(torch.empty(10**12, device="meta")),
    }

    loaded = round_trip(state)

    assert_same(loaded, state)
    assert loaded["tensor"].stride() == (1, 2)


@pytest.mark.parametrize("convert", ["to_sparse", "to_sparse_csr", "to_sparse_csc"])
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_sparse_tensors_come_back(convert: str) -> None:
    dense = torch.tensor([[0.0, 2.0, 0.0], [3.0, 0.0, 4.0]])
    sparse = getattr(dense, convert)()

    loaded = round_trip({"sparse": sparse})["sparse"]

    assert loaded.layout == sparse.layout
    assert_same(loaded.to_dense(), dense)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_a_sparse_tensor_with_an_index_twice_keeps_both() -> None:
    sparse = torch.sparse_coo_tensor([[1, 1]], [2.0, 3.0], (4,))

    loaded = round_trip(sparse)

    assert not loaded.is_coalesced()
    assert_same(loaded._indices(), sparse._indices())
    assert_same(loaded._values(), sparse._values())


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
def test_nested_tensors_are_refused_by_a_save_that_says_what_to_save(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(4, 3)], layout=layout)

    with pytest.raises(CheckpointingException) as refused:
        pack({"a": [nested]}, IDENTITY)

    assert "it is a nested tensor: save the list of tensors that its unbind() gives" in str(
        refused.value
    )
    assert "(at 'a.0')" in str(refused.value)


def test_views_that_are_conjugated_or_negated_come_back_with_their_value() -> None:
    base = torch.tensor([1 + 2j, -3 - 4j])
    state = {"base": base, "conj": base.conj(), "neg": base.conj().imag, "real": base.real}

    loaded = round_trip(state)

    for name, tensor in state.items():
        assert bits(loaded[name]) == bits(tensor), name


def test_a_module_s_and_an_optimizer_s_state_dict_come_back() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(3, 4)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    loaded = round_trip(state)

    assert_same(loaded["optimizer"], state["optimizer"])
    assert_same(dict(loaded["model"]), dict(state["model"]))
    assert loaded["model"]._metadata == state["model"]._metadata


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: lambda: 1, "lambda"),
        (lambda: (n for n in range(3)), "generator"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantized"),
        (lambda: torch.ones(3).untyped_storage(), "storage"),
    ],
    ids=["lambda", "generator", "quantized", "storage"],
)
@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning", "ignore:.*quantiz:DeprecationWarning")
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


def test_a_container_that_holds_itself_comes_back_so() -> None:
    state: dict[str, Any] = {"weight": torch.ones(2)}
    state["self"] = state
    state["list"] = [state]

    loaded = round_trip(state)

    assert loaded["self"] is loaded
    assert loaded["list"][0] is loaded
    assert_same(loaded["weight"], state["weight"])


def test_a_class_may_look_at_its_tensors_while_it_is_rebuilt() -> None:
    counts = _Counts(torch.tensor([3, 4]))

    allowed = SafeGlobals([_Counts])

    loaded = unpack(pack(counts, IDENTITY, ImagePlanner(allowed)), allowed=allowed)

    assert loaded.total == 7


class _Counts:
    def __init__(self, counts: torch.Tensor) -> None:
        self.__setstate__(counts)

    def __getstate__(self) -> torch.Tensor:
        return self.counts

    def __setstate__(self, counts: torch.Tensor) -> None:
        self.counts = counts
        self.total = int(counts.sum())


def test_thousands_of_tiny_tensors_come_back() -> None:
    values = torch.arange(5_000 * 3).view(5_000, 3)
    state = {f"layer.{n}": row.clone() for n, row in enumerate(values)}

    loaded = round_trip(state)

    assert list(loaded) == list(state)
    assert torch.equal(torch.stack(list(loaded.values())), values)


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


def test_the_value_at_the_save_is_kept_when_the_tensors_change_afterwards() -> None:
    step, weight = torch.tensor(5.0), torch.arange(4.0)
    image = pack({"step": step, "weight": weight, "view": weight[1:3]}, IDENTITY)

    step.add_(1)
    weight.zero_()
    loaded = unpack(image)

    assert loaded["step"] == 5
    assert loaded["weight"].tolist() == [0, 1, 2, 3]
    assert loaded["view"].tolist() == [1, 2]


def test_map_location_says_where_new_tensors_are_made() -> None:
    state = {"weight": torch.rand(3), "parameter": torch.nn.Parameter(torch.rand(2))}

    loaded = round_trip(state, map_location=torch.device("cpu"))

    assert_same(loaded, state)


def test_a_device_that_is_not_here_is_an_error_that_says_what_to_do() -> None:
    capture = ImagePlanner().capture({"weight": torch.rand(3)})
    elsewhere = dataclasses.replace(capture, skeleton=capture.skeleton.replace(b'"cpu"', b'"xyz"'))

    with pytest.raises(MismatchError, match="map_location='cpu'"):
        unpack(source_of(written(elsewhere)))

    loaded = unpack(source_of(written(elsewhere)), map_location="cpu")
    assert torch.equal(loaded["weight"], capture.tensors[0])
