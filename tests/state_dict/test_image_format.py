"""The image is a safetensors file, and its header says where everything lies."""

from __future__ import annotations

import json
from math import prod
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from localckpt.errors import CorruptShardError, MismatchError
from localckpt.ids import Generation, ShardIdentity
from localckpt.memory.copying import Copier
from localckpt.memory.digests import BLOCK_NBYTES, digests_nbytes
from localckpt.memory.gpu_copies import SideStreams
from localckpt.memory.host_memory import PAGE_NBYTES
from localckpt.state_dict.header import (
    DIGESTS,
    SKELETON,
    header_length,
    parse_safetensors,
    render_header,
)
from localckpt.state_dict.image import ImagePlanner, unpack, write_digests
from localckpt.state_dict.layout import ITEM_NBYTES, TensorSlot, lay_out
from localckpt.state_dict.source import MemorySource, read_header, read_verified_record
from tests.state_dict.states import IDENTITY, assert_same, bits, image_of, source_of

# What both torch and the safetensors library have a name for.
NAMED = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]
UNNAMED = [torch.complex128, torch.complex32, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]


def mixed_state() -> dict[str, Any]:
    state: dict[str, Any] = {
        f"layer.{dtype}": torch.arange(1, 8).to(dtype)
        for dtype in NAMED
        if dtype not in (torch.uint16, torch.uint32, torch.uint64)
    }
    state["unsigned"] = [
        torch.arange(7).view(torch.uint64),
        torch.arange(7, dtype=torch.int32).view(torch.uint32),
        torch.arange(7, dtype=torch.int16).view(torch.uint16),
    ]
    state["nested"] = {"list": [torch.tensor(3.0), torch.rand(2, 3).t()], "empty": torch.ones(0, 4)}
    state["other"] = {str(dtype): torch.zeros(3, dtype=dtype) for dtype in UNNAMED}
    state["step"] = 5
    return state


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
def test_the_safetensors_library_reads_every_tensor_of_an_image() -> None:
    state = mixed_state()

    read = safetensors.torch.load(bytes(image_of(state)))

    wanted = {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
    wanted |= {f"unsigned.{n}": tensor for n, tensor in enumerate(state["unsigned"])}
    wanted |= {f"nested.list.{n}": tensor for n, tensor in enumerate(state["nested"]["list"])}
    # It lies in memory, and in the file, in the order of its columns.
    wanted["nested.list.1"] = state["nested"]["list"][1].t()
    wanted["nested.empty"] = state["nested"]["empty"]
    raw = {f"other.{name}": tensor for name, tensor in state["other"].items()}
    assert set(read) == {*wanted, *raw, SKELETON, DIGESTS}
    for name, tensor in wanted.items():
        assert read[name].dtype == tensor.dtype, name
        assert read[name].shape == tensor.shape, name
        assert bits(read[name]) == bits(tensor), name
    for name, tensor in raw.items():
        assert read[name].dtype == torch.uint8, name
        assert bits(read[name]) == bits(tensor), name


def test_the_safetensors_library_reads_the_metadata_from_a_file(tmp_path: Any) -> None:
    identity = ShardIdentity("a/b \n 漢 \" '", Generation(4, 5), 10**9, 127, 128)
    file = tmp_path / "shard"
    file.write_bytes(image_of({"weight": torch.ones(2)}, identity))

    with safetensors.safe_open(file, "pt") as opened:
        metadata = opened.metadata()
        names = list(opened.keys())

    assert metadata == {
        "format": "localckpt-6",
        "session": identity.session_id,
        "epoch": "4",
        "sequence": "5",
        "iteration": "1000000000",
        "rank": "127",
        "world_size": "128",
    }
    assert set(names) == {"weight", SKELETON, DIGESTS}
    assert read_verified_record(source_of(file.read_bytes())).identity == identity


@pytest.mark.parametrize("count", [0, 1, 40, 2000])
def test_the_data_begins_on_a_page_and_the_skeleton_and_digests_follow(count: int) -> None:
    state = {f"t{n}": torch.zeros(n % 5) for n in range(count)}

    image = image_of(state)

    header = read_header(source_of(image))
    assert header.data_start % PAGE_NBYTES == 0
    assert header.nbytes == len(image)
    tensors_nbytes = sum(slot.nbytes for slot in header.slots.values())
    assert header.skeleton_start == header.data_start + tensors_nbytes
    assert header.nbytes - header.digests_start == digests_nbytes(header.digests_start)


def test_the_digests_cover_every_byte_before_them_in_blocks_of_a_mebibyte() -> None:
    image = image_of({"weight": torch.zeros(3 * BLOCK_NBYTES, dtype=torch.uint8)})

    header = read_header(source_of(image))

    assert 3 * BLOCK_NBYTES < header.digests_start < 4 * BLOCK_NBYTES
    assert header.nbytes - header.digests_start == 4 * 8


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
def test_our_parser_reads_the_header_of_a_file_that_the_library_wrote() -> None:
    tensors = {name: t for name, t in mixed_state().items() if isinstance(t, torch.Tensor)}
    written = safetensors.torch.save(tensors, metadata={"made by": "the library"})

    start = header_length(written, len(written))
    metadata, slots = parse_safetensors(written[:start])

    assert metadata == {"made by": "the library"}
    assert {slot.name for slot in slots} == set(tensors)
    assert start + sum(slot.nbytes for slot in slots) == len(written)
    for slot in slots:
        assert slot.shape == tuple(tensors[slot.name].shape)
        found = written[start + slot.offset : start + slot.offset + slot.nbytes]
        assert found == bits(tensors[slot.name])


def test_our_parser_reads_an_image_that_the_library_wrote_out_again() -> None:
    image = image_of({"weight": torch.rand(5), "bias": torch.rand(3), "mask": torch.ones(2) > 0})
    start = header_length(image, len(image))
    metadata = json.loads(image[8:start])["__metadata__"]
    tensors = safetensors.torch.load(bytes(image))
    rewritten = safetensors.torch.save(tensors, metadata=metadata)

    found, slots = parse_safetensors(rewritten[: header_length(rewritten, len(rewritten))])

    assert found == metadata
    ours = parse_safetensors(image[:start])[1]
    assert {(s.name, s.dtype, s.shape) for s in slots} == {(s.name, s.dtype, s.shape) for s in ours}
    # The library orders tensors by itself, so its file is no image, and is not taken for one.
    with pytest.raises(CorruptShardError, match="not where they belong"):
        read_header(source_of(rewritten))


def test_a_plain_safetensors_file_is_refused_with_a_reason() -> None:
    plain = safetensors.torch.save({"weight": torch.ones(3)}, metadata={"format": "pt"})

    with pytest.raises(CorruptShardError, match=r"its format is 'pt'.*localckpt-6"):
        unpack(source_of(plain))


def test_the_header_keeps_its_size_while_its_figures_grow() -> None:
    planner = ImagePlanner()
    capture = planner.capture({"weight": torch.ones(3)})
    sizes = set()
    for power in range(12):
        identity = ShardIdentity("run", Generation(10**power, 10**power), 10**power, 1, 2)

        sizes.add(capture.nbytes(identity))

    assert len(sizes) == 1


def test_a_header_that_the_library_could_not_read_is_refused_when_saving() -> None:
    with pytest.raises(MismatchError, match="fewer, larger tensors"):
        render_header(b" " * 100_000_000, 0, 0, IDENTITY)


_SLOTS = st.lists(
    st.tuples(
        st.sampled_from(sorted(ITEM_NBYTES)),
        st.lists(st.integers(0, 5) | st.sampled_from([16, 64, 1000]), max_size=3).map(tuple),
    ),
    max_size=30,
)


@given(_SLOTS)
def test_a_layout_has_no_holes_and_aligns_every_slot_as_far_as_its_size_is_round(
    wanted: list[tuple[str, Any]],
) -> None:
    slots = [
        TensorSlot(str(n), dtype, shape, prod(shape) * ITEM_NBYTES[dtype])
        for n, (dtype, shape) in enumerate(wanted)
    ]

    layout = lay_out(slots)

    assert [(s.name, s.dtype, s.shape) for s in layout.slots] == [
        (s.name, s.dtype, s.shape) for s in slots
    ]
    end = 0
    for slot in sorted(layout.slots, key=lambda slot: (slot.offset, slot.nbytes)):
        assert slot.offset == end
        assert slot.offset % ITEM_NBYTES[slot.dtype] == 0
        assert all(slot.offset % a == 0 for a in (64, PAGE_NBYTES) if slot.nbytes % a == 0)
        end += slot.nbytes
    assert end == layout.nbytes


@given(st.data())
def test_any_part_of_an_image_can_be_packed_on_the_tensors_device(data: st.DataObject) -> None:
    # Host memory plays the device; how the parts are put together is the same.
    state = {
        "a": torch.rand(70),
        "b": torch.rand(4, 6).t(),
        "c": torch.arange(9, dtype=torch.int8),
        "expanded": torch.ones(1, dtype=torch.int16).expand(1, 1),
        "one": torch.ones(1).as_strided((1, 1), (0, 0)),
    }
    image = image_of(state)
    data_start = read_header(source_of(image)).data_start
    start = data.draw(st.integers(data_start - 100, len(image) - 1))
    stop = data.draw(st.integers(start, len(image)))
    bucket = torch.zeros(stop - start, dtype=torch.uint8)

    ImagePlanner().capture(state).fill(bucket, memoryview(image), data_start, start)

    assert bytes(bucket.numpy()) == image[start:stop]


@given(
    sizes=st.lists(st.sampled_from([1, 16, 1000, 1 << 18, (1 << 20) - 1, 3 << 20]), max_size=8),
    shared=st.booleans(),
    threads=st.sampled_from([1, 2]),
)
def test_digests_of_blocks_hashed_while_they_are_copied_are_those_of_the_image(
    sizes: list[int], shared: bool, threads: int
) -> None:
    state: dict[str, Any] = {
        f"t{number}": torch.full((size,), number % 251, dtype=torch.uint8)
        for number, size in enumerate(sizes)
    }
    if shared:
        base = torch.arange(1 << 19)
        # Two that overlap, and one whose values are not what its storage holds.
        state |= {"head": base[:-1], "tail": base[1:], "turned": base.view(2, -1).t()}
    capture = ImagePlanner().capture(state)
    copier = Copier(threads)
    image = memoryview(bytearray(capture.nbytes(IDENTITY)))

    written = capture.write(image, IDENTITY, copier, SideStreams())

    assert written.has_digests
    hashed = bytes(image)
    write_digests(image, written.covered_nbytes, IDENTITY)
    assert bytes(image) == hashed
    assert_same(unpack(MemorySource(image)), state)
