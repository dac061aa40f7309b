"""States drawn at random: every dtype and layout, views of views, containers, framework objects.

A seed stands for a state in every process. What comes back is compared in all that is promised:
values down to the bit, types, strides of dense tensors, attributes, and who shares what with whom.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import math
import pathlib
import random
import struct
import types
import uuid
import warnings
from collections.abc import Iterator
from typing import Any

import numpy
import torch

from tests.state_dict.states import (
    FrozenSettings,
    Point,
    Settings,
    Tagged,
    TaggedParameter,
    assert_same,
)

__all__ = ["DTYPES", "PLAIN_VALUES", "Zoo", "assert_same_state", "tensors_of"]

_QUANTIZED = {torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4}
DTYPES = sorted(
    {d for d in vars(torch).values() if isinstance(d, torch.dtype)} - _QUANTIZED, key=str
)
_LEARNED = (torch.float32, torch.bfloat16, torch.float64, torch.complex64)
# What torch negates by its sign alone; it rounds the payloads of shorter NaNs, now and then.
_NEGATED = (torch.float32, torch.float64, torch.complex64, torch.complex128)
_MOST_ITEMS = 400


PLAIN_VALUES: list[Any] = [
    *(None, True, False, 0, -1, 2**64, -(10**400), 0.1, -0.0, math.inf, 1e-320),
    struct.unpack("<d", struct.pack("<Q", 0x7FF8DEAD_BEEF0001))[0],
    *(complex(1, -0.0), "", "text \x00, 漢字, 🙂", b"", b"\xff\x00", bytearray(b"a")),
    *((), [], {}, set(), frozenset({1, 2}), {1, "a", (2, b"b")}),
    *(range(1, 9, 2), slice(1, None, 3), torch.Size([2, 3])),
    *(torch.bfloat16, torch.device("cpu"), torch.device("cuda:3"), torch.strided),
    *(torch.contiguous_format, torch.channels_last, torch.sparse_csr),
    *(datetime.datetime(2026, 1, 2, 3, 4, 5, 6, datetime.timezone.utc), datetime.date(1, 1, 1)),
    *(datetime.timedelta(1, 2, 3), datetime.time(1, 2), decimal.Decimal("1.10")),
    *(uuid.UUID(int=5), pathlib.Path("/a/b"), types.SimpleNamespace(a=1, b=[2])),
    collections.OrderedDict([("z", 1), ("a", 2)]),
    collections.defaultdict(list, {"a": [1]}),
    collections.Counter("aab"),
    collections.deque([1, 2, 3], maxlen=3),
    Point(1, Point("a", None)),
    {(1, "a"): 1, 2: "b", None: 3, "k": {4.5: b"c"}},
    *(numpy.float32(0.1), numpy.int64(3), numpy.str_("a")),
    numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3)),
    numpy.array(["2020-01-01", "NaT"], dtype="datetime64[D]"),
]
"""Values that are no tensors, one of each kind."""


class Zoo:
    """Draws states; the same ones for the same seed."""

    def __init__(self, seed: object) -> None:
        self._random = random.Random(str(seed))
        self._tensors: list[torch.Tensor] = []

    def state(self) -> dict[str, Any]:
        """A state of some ten to some hundred values."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            count = self._random.randint(1, 8)
            return {f"part{number}": self._value(depth=3) for number in range(count)}

    def _value(self, depth: int) -> Any:
        draw = self._random.random()
        if depth and draw < 0.35:
            return self._container(depth - 1)
        if draw < 0.85:
            return self._tensor()
        return self._framework_object() if draw < 0.9 else self._plain_value()

    def _container(self, depth: int) -> Any:
        values = [self._value(depth) for _ in range(self._random.randint(0, 4))]
        keys = [self._key(number) for number in range(len(values))]
        made = self._random.choice(
            [
                lambda: values,
                lambda: tuple(values),
                lambda: dict(zip(keys, values, strict=True)),
                lambda: collections.OrderedDict(zip(keys, values, strict=True)),
                lambda: collections.defaultdict(list, zip(keys, values, strict=True)),
                lambda: collections.deque(values, maxlen=7),
                lambda: Point(values, self._value(depth)),
                lambda: Settings(values, "drawn"),
                lambda: FrozenSettings(tuple(values)),
            ]
        )()
        # The same container in two places.
        return [made, made] if self._random.random() < 0.1 else made

    def _key(self, number: int) -> Any:
        return self._random.choice(
            [f"k{number}", number, (number, "k"), f"a.{number}", -1.5 * number]
        )

    def _tensor(self) -> torch.Tensor:
        if self._tensors and self._random.random() < 0.1:
            return self._random.choice(self._tensors)
        if self._random.random() < 0.06:
            return self._sparse()
        if self._tensors and self._random.random() < 0.4:
            tensor = self._random.choice(self._tensors).detach().as_subclass(torch.Tensor)
        else:
            shape = [self._random.randint(0 if self._random.random() < 0.1 else 1, 6)]
            shape = [max(n, 0) for n in shape * self._random.randint(0, 4)]
            tensor = self._filled(self._random.choice(DTYPES), shape)
        for _ in range(self._random.choice([0, 0, 1, 1, 2, 4])):
            tensor = self._viewed(tensor)
        tensor = self._dressed(tensor)
        self._tensors.append(tensor)
        return tensor

    def _filled(self, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
        """Random bits, so that every NaN payload has its chance."""
        nbytes = math.prod(shape) * dtype.itemsize
        content = self._random.randbytes(nbytes)
        if dtype is torch.bool:
            content = bytes(byte & 1 for byte in content)
        raw = torch.frombuffer(bytearray(content), dtype=torch.uint8) if nbytes else torch.empty(0)
        # Its own storage, as training has it.
        return raw.to(torch.uint8).clone().view(dtype).view(shape)

    def _viewed(self, tensor: torch.Tensor) -> torch.Tensor:
        draw = self._random
        dim = draw.randrange(tensor.dim()) if tensor.dim() else 0
        size = tensor.shape[dim] if tensor.dim() else 1
        ways = [
            lambda: tensor.permute(draw.sample(range(tensor.dim()), tensor.dim())),
            lambda: tensor.narrow(
                dim, start := draw.randrange(size), draw.randint(1, size - start)
            ),
            lambda: tensor.select(dim, draw.randrange(size)),
            lambda: tensor[(slice(None),) * dim + (slice(None, None, 2),)],
            lambda: tensor.unsqueeze(dim).expand(
                *tensor.shape[:dim], draw.randint(1, 3), *tensor.shape[dim:]
            ),
            lambda: tensor.unfold(dim, draw.randint(1, size), draw.randint(1, 2)),
            lambda: tensor.diagonal(),
            lambda: tensor.unsqueeze(draw.randint(0, tensor.dim())),
            *[lambda: tensor.conj() if tensor.dtype in _NEGATED else tensor] * 2,
            lambda: tensor.imag if tensor.dtype in _NEGATED else tensor,
            lambda: tensor.real,
            lambda: torch._neg_view(tensor) if tensor.dtype in _NEGATED else tensor,
            lambda: tensor.view(torch.uint8),
            lambda: tensor.to(memory_format=torch.channels_last),
            lambda: tensor.to("meta") if draw.random() < 0.3 else tensor,
        ]
        try:
            result = draw.choice(ways)()
        # Real tensors have no imaginary part: a TypeError in torch 2.15, a RuntimeError before.
        except (RuntimeError, TypeError, ValueError, IndexError):
            return tensor
        return result if result.numel() <= _MOST_ITEMS else tensor

    def _dressed(self, tensor: torch.Tensor) -> torch.Tensor:
        draw = self._random.random()
        learned = tensor.dtype in _LEARNED and self._random.random() < 0.5
        if draw < 0.15:
            tensor = torch.nn.Parameter(tensor, requires_grad=learned)
        elif draw < 0.2:
            tensor = torch.nn.Buffer(tensor, persistent=self._random.random() < 0.5)
        elif draw < 0.25 and not (tensor.is_conj() or tensor.is_neg()):
            tensor = tensor.detach().as_subclass(Tagged)
        elif draw < 0.3 and not (tensor.is_conj() or tensor.is_neg()):
            tensor = TaggedParameter(tensor, requires_grad=learned)
        elif learned:
            tensor = tensor.detach().requires_grad_()
        if self._random.random() < 0.25:
            for name in self._random.sample(["shared", "partition_dim", "sequence_parallel"], 2):
                setattr(tensor, name, self._mark())
        return tensor

    def _mark(self) -> Any:
        return self._random.choice(
            [True, 3, 0.5, "text", (1, None), {"a": [torch.bfloat16], "b": torch.Size([2])}, {3}]
        )

    def _sparse(self) -> torch.Tensor:
        dense = torch.tensor([[0.0, self._random.random(), 0.0, 1.0]] * self._random.choice([2, 4]))
        make = self._random.choice(
            [
                lambda: dense.to_sparse(),
                lambda: dense.to_sparse_csr(),
                lambda: dense.to_sparse_csc(),
                lambda: dense.to_sparse_bsr((2, 2)),
                lambda: dense.to_sparse_bsc((1, 2)),
                lambda: torch.sparse_coo_tensor([[1, 1]], [2.0, self._random.random()], (4,)),
            ]
        )
        return make()

    def _plain_value(self) -> Any:
        numbers = self._random.randint(-9, 9), self._random.getrandbits(200), self._random.random()
        return self._random.choice([*PLAIN_VALUES, *numbers, numpy.arange(numbers[0] + 9)])

    def _framework_object(self) -> Any:
        torch_random = torch.Generator().manual_seed(self._random.getrandbits(32))
        model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 2), torch.nn.BatchNorm2d(3))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.uniform_(generator=torch_random)
        if self._random.random() < 0.5:
            model = model.to(memory_format=torch.channels_last)
        optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()
        schedule.step()
        makes = [
            lambda: model.state_dict(),
            lambda: dict(model.named_parameters()),
            lambda: optimizer.state_dict(),
            lambda: schedule.state_dict(),
            lambda: torch_random.get_state(),
            lambda: self._random.getstate(),
            lambda: numpy.random.RandomState(self._random.getrandbits(32)).get_state(),
        ]
        return self._random.choice(makes)()


def assert_same_state(found: Any, wanted: Any) -> None:
    """All that is promised of a state that was saved and loaded."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same(found, wanted)
        pairs = list(zip(tensors_of(found), tensors_of(wanted), strict=True))
        numbers: tuple[dict[int, int], dict[int, int]] = ({}, {})
        for pair in pairs:
            # The same object stands in the same places.
            firsts = [n.setdefault(id(t), len(n)) for n, t in zip(numbers, pair, strict=True)]
            assert firsts[0] == firsts[1]
            _assert_same_shape_in_memory(*pair)
        _assert_same_aliases(pairs)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The strided tensors of a state, as often as they stand in it."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, list | tuple | collections.deque):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, Settings | FrozenSettings):
        yield from tensors_of(value.value)


def _assert_same_shape_in_memory(found: torch.Tensor, wanted: torch.Tensor) -> None:
    public = {name: value for name, value in vars(wanted).items() if name[:1] != "_"}
    assert {name: value for name, value in vars(found).items() if name[:1] != "_"} == public
    assert isinstance(found, torch.nn.Buffer) == isinstance(wanted, torch.nn.Buffer)
    if wanted.is_meta or _is_dense(wanted):
        assert found.stride() == wanted.stride()


def _is_dense(tensor: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return tensor.numel() > 0


def _assert_same_aliases(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Who shares bytes shares the same ones; lazy views come back as values of their own."""
    spans = sorted(
        (wanted.data_ptr(), wanted.data_ptr() + _reach_nbytes(wanted), number)
        for number, (_, wanted) in enumerate(pairs)
        if wanted.numel() and not (wanted.is_meta or wanted.is_conj() or wanted.is_neg())
    )
    for at, (start, stop, number) in enumerate(spans):
        for other_start, _, other in spans[at + 1 :]:
            if other_start >= stop:
                break
            apart = pairs[other][0].data_ptr() - pairs[number][0].data_ptr()
            assert apart == other_start - start


def _reach_nbytes(tensor: torch.Tensor) -> int:
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.itemsize
