"""The image is a safetensors file, and its header says where everything lies."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from localckpt.memory.copying import Copier
from localckpt.memory.digests import digests_nbytes
from localckpt.memory.gpu_copies import SideStreams
from localckpt.memory.host_memory import PAGE_NBYTES
from localckpt.state_dict.header import DIGESTS, SKELETON
from localckpt.state_dict.image import ImagePlanner, unpack, write_digests
from localckpt.state_dict.layout import ITEM_NBYTES, TensorSlot, lay_out
from localckpt.state_dict.source import MemorySource, read_header
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


@given(st.data())
def test_an_image_made_piece_by_piece_is_the_one_made_at_once(data: st.DataObject) -> None:
    sizes = st.integers(1, 3 << 18)
    kinds = {
        "run": lambda n: torch.arange(n, dtype=torch.int32),
        "columns": lambda n: torch.arange(n // 3 * 3).view(-1, 3)[:, :2],
        "conj": lambda n: torch.complex(torch.rand(n), torch.rand(n)).conj(),
    }
    drawn = data.draw(st.lists(st.tuples(st.sampled_from(sorted(kinds)), sizes), max_size=5))
    state = {f"{kind} {place}": kinds[kind](n) for place, (kind, n) in enumerate(drawn)}
    most = data.draw(st.sampled_from([1, 2, 3])) << 20
    capture, copier, made = ImagePlanner().capture(state), Copier(2), list[bytes]()
    wanted = memoryview(bytearray(capture.nbytes(IDENTITY)))
    capture.write(wanted, IDENTITY, copier, SideStreams())

    def pieces() -> Iterator[tuple[int, memoryview]]:
        for start in range(0, len(wanted), most):
            piece = memoryview(bytearray(min(most, len(wanted) - start)))
            yield start, piece
            made.append(bytes(piece))

    capture.write_pieces(pieces(), IDENTITY, copier, SideStreams())

    assert b"".join(made) == wanted


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
