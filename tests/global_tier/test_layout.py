"""Every item of a rank has one place in one file, and the files are about equally large."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from localckpt import CheckpointingException
from localckpt.global_tier.staging import (
    FileLayout,
    frame_of,
    item_nbytes,
    lay_out_files,
    split_by_size_and_type,
)

PAGE_ALIGNED_NBYTES = 256 << 10
NAMES = st.sampled_from(["model", "model.a", "modest", "optimizer", "step", "a/b", ""])
DTYPE_LIST = [torch.uint8, torch.bfloat16, torch.float32, torch.complex128]
CHUNKS = st.one_of(
    st.lists(st.integers(0, 12), max_size=3),
    st.tuples(st.sampled_from([(256 << 10) - 1, 256 << 10, 1 << 21])).map(list),
)


def tensor_item(
    name: str,
    chunk: Sequence[int],
    dtype: torch.dtype = torch.float32,
) -> WriteItem:
    offsets = torch.Size([0] * len(chunk))
    return WriteItem(
        MetadataIndex(name, offsets),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            ChunkStorageMetadata(offsets, torch.Size(chunk)),
            TensorProperties(dtype=dtype),
            torch.Size(2 * size for size in chunk),
        ),
    )


def byte_item(name: str) -> WriteItem:
    return WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)


def lay_out(items: list[WriteItem], bins: int, hint: str | None = None) -> tuple[FileLayout, ...]:
    plan = SavePlan(items)
    others = {number for number, item in enumerate(items) if item.tensor_data is None}
    return lay_out_files(plan, others, prefix="__3_", bins=bins, separation_hint=hint)


@st.composite
def items_of_a_rank(draw: st.DrawFn) -> list[WriteItem]:
    tensors = draw(st.lists(st.tuples(NAMES, CHUNKS, st.sampled_from(DTYPE_LIST)), max_size=24))
    objects = draw(st.lists(NAMES, max_size=12))
    # Names need not differ: chunks of one tensor have the same.
    items = [tensor_item(*one) for one in tensors] + [byte_item(name) for name in objects]
    return draw(st.permutations(items))


@settings(max_examples=100, deadline=None)
@given(items_of_a_rank(), st.integers(1, 5), st.sampled_from([None, "model", "x"]))
def test_every_item_has_one_place_of_its_own_with_its_values_aligned(
    items: list[WriteItem], bins: int, hint: str | None
) -> None:
    files = lay_out(items, bins, hint)

    placed = [slot.number for file in files for slot in file.slots]
    others = [number for file in files for number in file.others]
    assert sorted(placed + others) == list(range(len(items)))
    assert all(items[number].type == WriteItemType.BYTE_IO for number in others)
    assert len({file.name for file in files}) == len(files)
    for file in files:
        assert file.slots or file.others
        assert all(one.end <= other.offset for one, other in pairwise(file.slots))
        assert file.nbytes == (file.slots[-1].end if file.slots else 0)
        for slot in file.slots:
            assert slot.offset >= 0
            assert slot.data == slot.offset + len(slot.frame.head)
            assert slot.end == slot.data + slot.nbytes + len(slot.frame.tail)
            data = items[slot.number].tensor_data
            assert data is not None
            assert slot.nbytes == math.prod(data.chunk.sizes) * data.properties.dtype.itemsize
            assert slot.frame == frame_of(data.properties.dtype, data.chunk.sizes)
            assert slot.data % (4096 if slot.nbytes >= PAGE_ALIGNED_NBYTES else 64) == 0


@settings(max_examples=100, deadline=None)
@given(items_of_a_rank(), st.integers(1, 5))
def test_no_file_holds_more_than_another_by_more_than_the_largest_item(
    items: list[WriteItem], bins: int
) -> None:
    buckets = split_by_size_and_type(bins, items)

    tensors = [[item for item in b if item.tensor_data is not None] for b in buckets]
    sizes = [sum(map(item_nbytes, bucket)) for bucket in tensors]
    largest = max((item_nbytes(item) for bucket in tensors for item in bucket), default=0)
    assert len(buckets) == bins
    assert max(sizes) - min(sizes) <= largest


@given(st.integers(0, 40), st.integers(1, 6), st.integers(0, 5))
def test_objects_go_to_the_files_in_turn(objects: int, bins: int, tensors: int) -> None:
    items = [byte_item(str(number)) for number in range(objects)]
    items += [tensor_item("t", [10 * number]) for number in range(tensors)]

    buckets = split_by_size_and_type(bins, items)

    for turn, bucket in enumerate(buckets):
        names = [item.index.fqn for item in bucket if item.type == WriteItemType.BYTE_IO]
        assert names == [str(number) for number in range(turn, objects, bins)]


@settings(deadline=None)
@given(items_of_a_rank(), st.integers(1, 4), st.sampled_from(["model", "mod", "optimizer", "step"]))
def test_what_begins_with_the_hint_is_alone_in_files_that_begin_with_it(
    items: list[WriteItem], bins: int, hint: str
) -> None:
    files = lay_out(items, bins, hint)

    for file in files:
        numbers = [slot.number for slot in file.slots] + list(file.others)
        apart = {items[number].index.fqn.startswith(hint) for number in numbers}
        assert apart == {file.name.startswith(f"{hint}__3_")}
        assert file.name.startswith(f"{hint}__3_") or file.name.startswith("__3_")
        assert file.name.endswith(".distcp")
    for group in (hint, ""):
        assert sum(file.name.startswith(f"{group}__3_") for file in files) <= bins


@pytest.mark.parametrize("hint", ["../outside", ""])
def test_a_hint_that_cannot_begin_the_name_of_a_file_is_refused(hint: str) -> None:
    with pytest.raises(CheckpointingException, match="separation_hint"):
        lay_out([tensor_item("model/layers", [3])], 2, hint)
