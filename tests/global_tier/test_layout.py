"""Every item of a rank has one place in one file, and the files are about equally large."""

from __future__ import annotations

import io
import math
import struct
import zipfile
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
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
    lay_out_files,
)
from tests.global_tier.states import DTYPES, tensor_of
from tests.state_dict.states import bits

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


@pytest.mark.parametrize("hint", ["../outside", ""])
def test_a_hint_that_cannot_begin_the_name_of_a_file_is_refused(hint: str) -> None:
    with pytest.raises(CheckpointingException, match="separation_hint"):
        lay_out([tensor_item("model/layers", [3])], 2, hint)


SHAPES = st.lists(st.integers(0, 9), max_size=5).map(tuple)


def saved(tensor: torch.Tensor) -> bytes:
    stream = io.BytesIO()
    torch.save(tensor, stream)
    return stream.getvalue()


def framed(tensor: torch.Tensor) -> bytes:
    frame = frame_of(tensor.dtype, tensor.shape)
    return frame.head + bits(tensor) + frame.tail


def without_checksums_of_values(archive: bytes) -> bytes:
    """A zip archive with zeros for what follows from the values' checksum: its two copies, and
    those of the archive's ID, and the ID itself.
    """
    data = bytearray(archive)
    with zipfile.ZipFile(io.BytesIO(archive)) as file:
        entry = file.start_dir
        for info in file.infolist():
            values = info.filename.endswith("/data/0")
            made_of_it = info.filename.endswith("/serialization_id")
            name, extra = struct.unpack_from("<HH", data, info.header_offset + 26)
            begin = info.header_offset + 30 + name + extra
            end = begin + info.file_size
            if made_of_it:
                data[begin:end] = bytes(info.file_size)
            if values or made_of_it:
                data[entry + 16 : entry + 20] = bytes(4)
                if data[end : end + 4] == b"PK\x07\x08":
                    data[end + 4 : end + 8] = bytes(4)
            entry += 46 + sum(struct.unpack_from("<HHH", data, entry + 28))
    return bytes(data)


@settings(max_examples=150, deadline=None)
@example(torch.float32, (), 0)
@example(torch.float32, (0,), 0)
@example(torch.complex128, (3, 0, 2), 0)
@example(torch.bool, (1,), 0)
@example(torch.bfloat16, (1 << 20, 3), 0)
@example(torch.float8_e4m3fn, (), 0)
@example(torch.uint16, (0, 4), 0)
@given(st.sampled_from(DTYPES), SHAPES, st.integers(0, 1 << 30))
def test_a_framed_tensor_is_what_torch_writes_but_for_checksums_that_torch_does_not_check(
    dtype: torch.dtype, shape: tuple[int, ...], seed: int
) -> None:
    tensor = tensor_of(dtype, shape, seed)

    found = framed(tensor)

    assert without_checksums_of_values(found) == without_checksums_of_values(saved(tensor))
