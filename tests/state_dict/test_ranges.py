"""Runs of an image's bytes go straight where they belong, unless several want the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from localckpt import StorageError
from localckpt.errors import CorruptShardError
from localckpt.ids import Generation, ShardIdentity
from localckpt.memory.digests import BLOCK_NBYTES
from localckpt.state_dict.boxes import Box, Rectangle, Region, rectangles_of, volume
from localckpt.state_dict.image import pack
from localckpt.state_dict.part_reads import Part, read_parts
from localckpt.state_dict.reader import OpenImages
from localckpt.state_dict.resharded import WantedTensor
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.saved_shard import SavedShard
from localckpt.state_dict.source import PIECE_NBYTES, ByteRange, ImageBytes, MemorySource
from tests.state_dict.states import runs_of

_IDENTITY = ShardIdentity("runs", Generation(1, 5), 3, 0, 1)
_NBYTES = 2 * PIECE_NBYTES + 1000
_SOURCE = pack(torch.arange(_NBYTES // 4, dtype=torch.int32), _IDENTITY)
_BYTES = bytes(_SOURCE.view)


@given(
    st.lists(st.integers(0, _NBYTES), max_size=12, unique=True),
    st.lists(st.booleans(), min_size=6, max_size=6),
    st.booleans(),
)
def test_each_run_goes_where_it_belongs(
    borders: list[int], are_direct: list[bool], is_all_verified: bool
) -> None:
    borders.sort()
    spans = list(zip(borders[::2], borders[1::2], strict=False))
    memories = [bytearray(stop - start) for start, stop in spans]
    parts: list[list[tuple[int, bytes]]] = [[] for _ in spans]

    def taking(part: list[tuple[int, bytes]]) -> Callable[[int, memoryview], None]:
        return lambda offset, data: part.append((offset, bytes(data)))

    runs = [
        ByteRange(*span, memoryview(memory) if is_direct else taking(part))
        for span, memory, part, is_direct in zip(spans, memories, parts, are_direct, strict=False)
    ]
    read: list[int] = []

    image = ImageBytes(_SOURCE, _IDENTITY, read.append)
    image.read_ranges(runs, is_all_verified=is_all_verified)

    for (start, stop), memory, part, is_direct in zip(
        spans, memories, parts, are_direct, strict=False
    ):
        found = bytes(memory) if is_direct else b"".join(data for _, data in sorted(part))
        assert found == _BYTES[start:stop]
    blocks = {n for a, b in spans for n in range(a // BLOCK_NBYTES, -(-b // BLOCK_NBYTES))}
    end = image.header.digests_start
    if is_all_verified:
        assert sum(read) == end
    else:
        assert sum(read) == sum(min(BLOCK_NBYTES, end - n * BLOCK_NBYTES) for n in blocks)


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
        part.append(runs_of(chosen))
    return tuple(part)


@given(data=st.data())
def test_a_part_comes_whole_wherever_it_is_in_the_tensors_of_both_sides(
    data: st.DataObject,
) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=0, max_size=3)))
    wide = data.draw(st.sampled_from([1, 1, 1, 60_000]))
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
    ((number, box),) = ((n, box) for n, box in shard.tensors.items() if box.key == "w")
    shard.tensors[number] = box._replace(shape=shape, runs=saved_region)
    targets = []
    for _ in range(data.draw(st.integers(1, 3))):
        region = _within(saved_region, data)
        if wide > 1 and data.draw(st.booleans()):
            region = (*region[:-1], ((1, wide - 5),))
        local = [sum(count for _, count in runs) for runs in region]
        target = torch.zeros(local, dtype=torch.int16)
        if data.draw(st.booleans()):
            target = target.mT.contiguous().mT if target.dim() > 1 else target
        targets.append((target, region))

    most = data.draw(st.sampled_from([1 << 20, 20_000]))
    shard.read_parts(
        (number, rectangle, WantedTensor(Box("w", shape, region, None), target).place_of(rectangle))
        for target, region in targets
        if target.numel()
        for rectangle in rectangles_of(region, most)
    )

    for target, region in targets:
        assert torch.equal(target, every[_indices(region)] if shape else every)
    assert volume(saved_region) == saved.numel()


@pytest.mark.parametrize("columns", [1, 2, 5])
@pytest.mark.parametrize("most_nbytes", [1 << 20, 3 << 20, 64 << 20])
def test_parts_of_the_same_rows_are_read_once_a_window_at_a_time(
    columns: int, most_nbytes: int
) -> None:
    full = torch.arange(4000 * 520, dtype=torch.int32).view(4000, 520)
    source, read = pack(full, _IDENTITY), [0]

    def count(nbytes: int) -> None:
        read[0] += nbytes

    image = ImageBytes(source, on_read=count)
    start = image.header.data_start + next(iter(image.header.slots.values())).offset
    width = full.shape[1] // columns
    outs = [torch.zeros(len(full), width, dtype=torch.int32) for _ in range(columns)]
    wanted = [Rectangle((0, i * width), (len(full), width)) for i in range(columns)]
    parts = [
        Part.contiguous(start, torch.int32, tuple(full.shape), rectangle, out)
        for rectangle, out in zip(wanted, outs, strict=True)
    ]

    read_parts(image, parts, most_nbytes)

    for i, out in enumerate(outs):
        assert out.equal(full[:, i * width : (i + 1) * width])
    # The blocks at the borders of windows twice.
    windows = 1 + image.end // most_nbytes
    assert read[0] <= image.end + windows * BLOCK_NBYTES


_GOOD, _DAMAGED, _GONE = (ShardIdentity("job", Generation(1, 1), 3, rank, 3) for rank in range(3))


def _open(identity: ShardIdentity) -> MemorySource:
    if identity == _GONE:
        raise StorageError("it is gone")
    source = pack({"w": torch.arange(1000.0)}, identity)
    if identity == _DAMAGED:
        source.view[5000] ^= 1
    return source


@pytest.fixture
def images() -> Iterator[OpenImages]:
    with closing(OpenImages(_open, SafeGlobals())) as opened:
        yield opened


def test_the_damaged_one_of_all_that_are_open_is_found(images: OpenImages) -> None:
    for identity in (_GOOD, _DAMAGED):
        images.open(identity)

    images.find_bad(CorruptShardError("a block does not match"))

    assert list(images.bad) == [_DAMAGED]
    assert isinstance(images.bad[_DAMAGED], CorruptShardError)


def test_one_that_cannot_be_opened_is_bad_and_what_was_opened_is_closed(images: OpenImages) -> None:
    good = images.source(_GOOD)

    with pytest.raises(StorageError, match="it is gone"):
        images.open(_GONE)

    assert list(images.bad) == [_GONE]
    images.close()
    assert images.bad == {}
    assert good.nbytes == 0
