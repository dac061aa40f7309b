"""Runs of an image's bytes go straight where they belong, unless several want the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from localckpt import CorruptShardError
from localckpt.ids import Generation, ShardIdentity
from localckpt.memory.digests import BLOCK_NBYTES
from localckpt.state_dict.boxes import Region, volume, whole
from localckpt.state_dict.image import pack
from localckpt.state_dict.resharded import FilledPart, WantedTensor, require_full
from localckpt.state_dict.runs import Reserved, Run, run_in, stream_runs
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.saved_shard import SavedShard, SavedTensor
from localckpt.state_dict.source import PIECE_NBYTES, ImageBytes

_IDENTITY = ShardIdentity("runs", Generation(1, 5), 3, 0, 1)
_NBYTES = 2 * PIECE_NBYTES + 1000
_SOURCE = pack(torch.arange(_NBYTES // 4, dtype=torch.int32), _IDENTITY)
_BYTES = bytes(_SOURCE.view)


class _Part:
    def __init__(self, *, is_direct: bool = True) -> None:
        self.got: list[tuple[int, bytes]] = []
        self.copied: list[tuple[int, bytes]] = []
        self._is_direct = is_direct

    def reserve(self, offset: int, nbytes: int) -> Reserved | None:
        if not self._is_direct:
            return None
        memory = memoryview(bytearray(nbytes))
        return memory, lambda: self.got.append((offset, bytes(memory)))

    def take(self, offset: int, values: torch.Tensor) -> None:
        self.copied.append((offset, values.numpy().tobytes()))

    def bytes(self) -> bytes:
        """All that it has got, in order; nothing twice, and nothing lacking between."""
        joined = b""
        for offset, data in sorted(self.got + self.copied):
            assert offset == len(joined)
            joined += data
        return joined


@given(
    st.lists(
        st.tuples(st.integers(0, _NBYTES), st.integers(0, _NBYTES), st.booleans()), max_size=6
    ),
    st.sampled_from([(), [(5, PIECE_NBYTES + 5)], None]),
)
def test_each_receiver_gets_the_bytes_of_its_run_once(
    wanted: list[tuple[int, int, bool]], also: list[tuple[int, int]] | None
) -> None:
    parts = [(min(a, b), max(a, b), _Part(is_direct=is_direct)) for a, b, is_direct in wanted]
    read: list[int] = []

    image = ImageBytes(_SOURCE, _IDENTITY, read.append)
    stream_runs(image, [Run(*part) for part in parts], also)

    for start, stop, part in parts:
        assert part.bytes() == _BYTES[start:stop]
    spans = [(a, b) for a, b, _ in parts if a < b] + list(also or ())
    blocks = {n for a, b in spans for n in range(a // BLOCK_NBYTES, -(-b // BLOCK_NBYTES))}
    end = image.header.digests_start
    if also is None:
        assert sum(read) == end
    else:
        assert sum(read) == sum(min(BLOCK_NBYTES, end - n * BLOCK_NBYTES) for n in blocks)


def test_runs_that_share_no_byte_are_not_copied_and_all_others_are() -> None:
    alone, first, second = (_Part() for _ in range(3))
    memory = bytearray(100)
    runs = [
        *(Run(0, 100, alone), Run(100, 300, first), Run(299, 400, second)),
        Run(500, 600, memoryview(memory)),
    ]

    stream_runs(ImageBytes(_SOURCE), runs)

    assert alone.got == [(0, _BYTES[:100])]
    assert not alone.copied
    assert [part.got for part in (first, second)] == [[], []]
    assert memory == _BYTES[500:600]


def test_nothing_is_taken_of_a_damaged_piece() -> None:
    damaged = pack(torch.arange(_NBYTES // 4, dtype=torch.int32), _IDENTITY)
    damaged.view[PIECE_NBYTES + BLOCK_NBYTES] ^= 1
    taken, direct = _Part(is_direct=False), _Part()

    with pytest.raises(CorruptShardError):
        stream_runs(
            ImageBytes(damaged),
            [Run(PIECE_NBYTES, PIECE_NBYTES + 10, taken), Run(PIECE_NBYTES + 10, _NBYTES, direct)],
        )

    assert not taken.copied
    assert not any(offset < PIECE_NBYTES - 10 for offset, _ in direct.got)


_SAVED: Region = (((2, 4),), ((0, 3),))


@pytest.mark.parametrize(
    ("part", "rows"),
    [
        pytest.param(_SAVED, (0, 4), id="all"),
        pytest.param((((3, 2),), ((0, 3),)), (1, 2), id="rows"),
        pytest.param((((3, 2),), ((0, 2),)), None, id="not all columns"),
        pytest.param((((3, 1), (5, 1)), ((0, 3),)), None, id="rows apart"),
    ],
)
def test_rows_are_a_run(part: Region, rows: tuple[int, int] | None) -> None:
    assert run_in(_SAVED, part) == rows


def test_a_tensor_without_a_dimension_and_one_whose_rows_lie_apart_are_runs_as_a_whole() -> None:
    apart: Region = (((0, 2), (5, 3)), ((1, 1), (4, 2)))

    assert run_in((), ()) == (0, 1)
    assert run_in(apart, apart) == (0, 5)
    assert run_in(apart, (((0, 2),), apart[1])) is None


def _flat(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int16)


def _turned(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(shape[::-1], dtype=torch.int16).permute(*range(len(shape))[::-1])


@pytest.mark.parametrize("make", [_flat, _turned])
@pytest.mark.parametrize("count", [1, 2])
@given(data=st.data())
def test_a_run_fills_the_part_of_every_tensor_however_it_is_cut(
    make: Callable[[tuple[int, ...]], torch.Tensor], count: int, data: st.DataObject
) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    first = data.draw(st.integers(0, shape[0] - 1))
    rows = data.draw(st.integers(1, shape[0] - first))
    region: Region = (((first, rows),), *whole(shape)[1:])
    tensors = [make(shape) for _ in range(count)]
    size = rows * torch.Size(shape[1:]).numel()
    part = FilledPart([WantedTensor("w", shape, whole(shape), t) for t in tensors], region)
    values = torch.arange(1, size + 1, dtype=torch.int16)
    borders = sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=3))})

    for begin, end in pairwise(borders):
        piece = values[begin:end].view(torch.uint8)
        reserved = part.reserve(2 * begin, piece.nbytes)
        assert (reserved is not None) == (count == 1 and tensors[0].is_contiguous())
        if reserved is not None:
            reserved[0][:] = piece.numpy().data
            reserved[1]()
        else:
            part.take(2 * begin, piece)

    require_full([part])
    expected = torch.zeros(shape, dtype=torch.int16)
    expected[first : first + rows] = values.view(rows, *shape[1:])
    for tensor in tensors:
        for index in product(*map(range, shape)):
            assert tensor[index] == expected[index]


def test_bytes_outside_of_a_part_are_refused() -> None:
    wanted = WantedTensor("w", (4,), ((((0, 4),)),), torch.zeros(4))
    part = FilledPart([wanted], ((((0, 2),)),))

    for offset, nbytes in ((0, 12), (8, 4), (2, 4)):
        with pytest.raises(ValueError, match="are no items of 'w'"):
            part.take(offset, torch.zeros(nbytes, dtype=torch.uint8))

    assert not wanted.tensor.any()
    assert part.lacking == 2


def _side(data: st.DataObject, count: int, runs: int) -> tuple[tuple[int, int], ...]:
    """Draw indices of a dimension of a region, as runs of its own ``count`` indices."""
    borders = st.sets(st.integers(0, count), min_size=2, max_size=2 * runs)
    chosen = sorted(data.draw(borders))
    return tuple((a, b - a) for a, b in zip(chosen[::2], chosen[1::2], strict=False))


def _indices(region: Region) -> tuple[torch.Tensor, ...]:
    sides = [torch.cat([torch.arange(a, a + n) for a, n in runs]) for runs in region]
    return torch.meshgrid(*sides, indexing="ij") if sides else ()


def _within(region: Region, data: st.DataObject) -> Region:
    """Draw a part of a region."""
    part = []
    for runs in region:
        own = [first + n for first, count in runs for n in range(count)]
        chosen = [own[n] for a, count in _side(data, len(own), 2) for n in range(a, a + count)]
        joined: list[tuple[int, int]] = []
        for index in chosen:
            if joined and sum(joined[-1]) == index:
                joined[-1] = joined[-1][0], joined[-1][1] + 1
            else:
                joined.append((index, 1))
        part.append(tuple(joined))
    return tuple(part)


@given(data=st.data())
def test_a_part_comes_whole_wherever_it_is_in_the_tensors_of_both_sides(
    data: st.DataObject,
) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=0, max_size=3)))
    wide = data.draw(st.sampled_from([1, 1, 300_000]))
    shape = (*shape, wide) if wide > 1 else shape
    every = torch.randint(-100, 100, shape, dtype=torch.int16)
    saved_region = tuple(_side(data, size, 2) for size in shape)
    if wide > 1:
        saved_region = (*saved_region[:-1], ((0, wide),))
    saved = every[_indices(saved_region)] if shape else every
    order = data.draw(st.permutations(range(len(shape))))
    stored = saved.permute(order).contiguous()
    back = [order.index(dim) for dim in range(len(order))]
    source = pack({"beside": torch.ones(3), "w": stored.permute(back)}, _IDENTITY)
    shard = SavedShard(source, SafeGlobals(), _IDENTITY)
    shard.read_values(())
    (tensor,) = (t for t in shard.tensors.values() if t.key == "w")
    number = tensor.number
    shard.tensors[number] = replace(tensor, shape=shape, region=saved_region)
    targets, parts = [], []
    for _ in range(data.draw(st.integers(1, 3))):
        region = _within(saved_region, data)
        if wide > 1 and data.draw(st.booleans()):
            region = (*region[:-1], ((1, wide - 5),))
        local = [sum(count for _, count in runs) for runs in region]
        target = torch.zeros(local, dtype=torch.int16)
        if data.draw(st.booleans()):
            target = target.mT.contiguous().mT if target.dim() > 1 else target
        targets.append((target, region))
        parts.append(FilledPart([WantedTensor("w", shape, region, target)], region))

    shard.read_parts(
        {number: [(to, region) for to, (_, region) in zip(parts, targets, strict=True)]}
    )

    require_full(parts)
    for target, region in targets:
        assert torch.equal(target, every[_indices(region)] if shape else every)
    assert volume(saved_region) == saved.numel()
    assert isinstance(shard.tensors[number], SavedTensor)


def test_items_that_are_not_where_integers_may_be_come_as_they_were_saved() -> None:
    storage = torch.arange(12, dtype=torch.uint8).untyped_storage()
    number = torch.empty(0, dtype=torch.float64).set_(storage, 0, (), ())
    beside = torch.empty(0, dtype=torch.int32).set_(storage, 1, (2,), (1,))
    state = {"a": torch.ones(1, dtype=torch.int32), "number": number, "beside": beside}
    source = pack(state, _IDENTITY)
    shard = SavedShard(source, SafeGlobals(), _IDENTITY)
    shard.read_values(())
    tensors = {tensor.key: tensor for tensor in shard.tensors.values()}
    assert tensors["number"].start % 8
    target = torch.zeros((), dtype=torch.float64)
    part = FilledPart([WantedTensor("number", (), (), target)], ())

    shard.read_parts({tensors["number"].number: [(part, ())]})

    require_full([part])
    assert target == number
