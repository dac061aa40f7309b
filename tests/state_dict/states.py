"""What the tests of this room share: shards in memory, and a comparison down to the bit."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import struct
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy
import torch
from torch.distributed.tensor import Shard

from localckpt.ids import Generation, ShardIdentity
from localckpt.memory.copying import Copier
from localckpt.memory.gpu_copies import SideStreams
from localckpt.state_dict.boxes import NO_BOXES, Region
from localckpt.state_dict.header import NO_PARTS, Skeleton
from localckpt.state_dict.image import Capture, ImagePlanner, pack, unpack
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.source import MemorySource

IDENTITY = ShardIdentity("a session", Generation(2, 7), 40, 3, 8)


class Point(NamedTuple):
    """A named tuple that whoever loads has imported."""

    x: Any
    y: Any


@dataclasses.dataclass
class Settings:
    value: Any
    name: str = "settings"


@dataclasses.dataclass(frozen=True)
class FrozenSettings:
    value: Any


class Call:
    """Pickles as a call of a function, and as what is done with its result."""

    def __init__(
        self, function: Any, *args: Any, state: Any = None, items: Iterator[Any] | None = None
    ) -> None:
        self._reduced = function, args, state, None, items

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduced


class Tagged(torch.Tensor):
    """A tensor subclass without behaviour of its own."""


class TaggedParameter(torch.nn.Parameter):
    """A parameter subclass without behaviour of its own."""


class Rows(Shard):
    """A placement that is equal to a ``Shard`` for Python."""


ALLOWED = SafeGlobals([Settings, FrozenSettings, Tagged, TaggedParameter])


def round_trip(state: Any, **options: Any) -> Any:
    """Save a state to an image in memory, and load it."""
    planner = ImagePlanner(ALLOWED)
    return unpack(pack(state, IDENTITY, planner), expect=IDENTITY, allowed=ALLOWED, **options)


def image_of(state: Any, identity: ShardIdentity = IDENTITY) -> bytearray:
    return bytearray(pack(state, identity, ImagePlanner(ALLOWED)).view)


def source_of(image: bytes | bytearray) -> MemorySource:
    return MemorySource(memoryview(bytearray(image)))


def written(capture: Capture, identity: ShardIdentity = IDENTITY) -> bytearray:
    """The complete image of a capture, which a test may have tampered with."""
    image = bytearray(capture.nbytes(identity))
    view = memoryview(image)
    assert capture.write(view, identity, Copier(1), SideStreams()).has_digests
    return image


def with_pickle(pickled: bytes, identity: ShardIdentity = IDENTITY) -> bytearray:
    """An image that is intact, and whose skeleton is whatever somebody made up."""
    capture = ImagePlanner().capture({})
    framed = Skeleton(b"[]", NO_BOXES, NO_PARTS, pickled).join()
    return written(dataclasses.replace(capture, skeleton=framed), identity)


def elements_of(region: Region) -> set[tuple[int, ...]]:
    sides = [[i for start, count in runs for i in range(start, start + count)] for runs in region]
    return set(itertools.product(*sides))


def runs_of(indices: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Runs of sorted indices; of none an empty run."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and sum(runs[-1]) == index:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((index, 1))
    return tuple(runs) or ((0, 0),)


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().resolve_neg()
    if flat.itemsize in (1, 2, 4, 8):
        widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        flat = flat.view(widths[flat.itemsize])
    # A clone, because a dimension of 1 may have any stride and still count as contiguous.
    flat = flat.clone(memory_format=torch.contiguous_format).reshape(-1)
    return bytes(flat.as_strided((flat.numel(),), (1,)).view(torch.uint8).numpy())


def assert_same(found: Any, wanted: Any) -> None:
    """Types, order, bits and attributes of containers are the same, all the way down."""
    assert type(found) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        _assert_same_tensor(found, wanted)
    elif isinstance(wanted, numpy.ndarray):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        assert found.tobytes() == wanted.tobytes()
        assert found.flags.writeable == wanted.flags.writeable
        assert found.flags.f_contiguous >= wanted.flags.fnc
    elif isinstance(wanted, float):
        assert struct.pack("<d", found) == struct.pack("<d", wanted)
    elif isinstance(wanted, complex):
        assert_same((found.real, found.imag), (wanted.real, wanted.imag))
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for name in ("default_factory", "_metadata"):
            assert getattr(found, name, None) == getattr(wanted, name, None)
        for key, value in wanted.items():
            assert_same(found[key], value)
    elif isinstance(wanted, list | tuple | collections.deque):
        assert len(found) == len(wanted)
        assert getattr(found, "maxlen", None) == getattr(wanted, "maxlen", None)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    elif dataclasses.is_dataclass(wanted):
        assert_same(vars(found), vars(wanted))
    else:
        assert found == wanted


def _assert_same_tensor(found: torch.Tensor, wanted: torch.Tensor) -> None:
    for name in ("dtype", "shape", "device", "requires_grad", "layout"):
        assert getattr(found, name) == getattr(wanted, name), name
    if wanted.layout is not torch.strided:
        assert_same(list(_parts(found)), list(_parts(wanted)))
    elif not wanted.is_meta:
        assert bits(found) == bits(wanted)


def _parts(sparse: torch.Tensor) -> Iterator[torch.Tensor]:
    if sparse.layout is torch.sparse_coo:
        yield from (sparse._indices(), sparse._values(), torch.tensor(sparse.is_coalesced()))
        return
    by_rows = sparse.layout in (torch.sparse_csr, torch.sparse_bsr)
    yield from (
        (sparse.crow_indices(), sparse.col_indices())
        if by_rows
        else (sparse.ccol_indices(), sparse.row_indices())
    )
    yield sparse.values()
