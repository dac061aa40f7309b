"""The image is a safetensors file, and its header says where everything lies.

A header that does not describe its file is refused, before anything large is allocated.
"""

from __future__ import annotations

import functools
import json
import operator
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from localckpt.errors import CorruptShardError
from localckpt.ids import Generation, ShardIdentity
from localckpt.lineage import MOST_ANCESTORS, EpochId, Lineage, Point
from localckpt.memory.copying import Copier
from localckpt.memory.digests import digests_nbytes
from localckpt.memory.gpu_copies import SideStreams
from localckpt.memory.host_memory import PAGE_NBYTES
from localckpt.state_dict.header import DIGESTS, SKELETON
from localckpt.state_dict.image import ImagePlanner, unpack, write_digests
from localckpt.state_dict.layout import ITEM_NBYTES, TensorSlot, lay_out
from localckpt.state_dict.source import MemorySource, read_header, read_verified_record
from tests.global_tier.states import tensor_of
from tests.state_dict.states import IDENTITY, assert_same, bits, image_of, source_of

# What both torch and the safetensors library have a name for.
NAMED = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]
UNNAMED = [torch.complex128, torch.complex32, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
def test_the_safetensors_library_reads_every_tensor_of_an_image() -> None:
    of_dtypes = {str(dtype): tensor_of(dtype, (7,)) for dtype in (*NAMED, *UNNAMED)}
    single, turned, empty = torch.tensor(3.0), torch.rand(2, 3).t(), torch.ones(0, 4)

    read = safetensors.torch.load(
        bytes(image_of({**of_dtypes, "nested": {"list": [single, turned], "empty": empty}}))
    )

    # A tensor lies in the file as in memory: this one in the order of its columns.
    wanted = {"nested.list.0": single, "nested.list.1": turned.t(), "nested.empty": empty}
    wanted |= of_dtypes
    assert set(read) == {*wanted, SKELETON, DIGESTS}
    for name, tensor in wanted.items():
        assert bits(read[name]) == bits(tensor), name
        if tensor.dtype in NAMED:
            assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape), name
        else:
            assert read[name].dtype == torch.uint8, name


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


STATE = {"a": torch.arange(6.0), "b": torch.arange(5, dtype=torch.int16)}


def with_header(changes: dict[str, Any] | bytes) -> bytearray:
    """An image whose header somebody edited; its size and its data stay.

    The changes are values by their paths, ``...`` for what is left out, or the whole text.
    """
    image = image_of(STATE)
    start = 8 + int.from_bytes(image[:8], "little")
    entries = json.loads(image[8:start])
    for path, value in changes.items() if isinstance(changes, dict) else ():
        *keys, last = path.split("/")
        place = functools.reduce(operator.getitem, keys, entries)
        if value is ...:
            del place[last]
        else:
            place[last] = value
    text = json.dumps(entries).encode() if isinstance(changes, dict) else changes
    assert len(text) <= start - 8
    image[8:start] = text.ljust(start - 8)
    return image


# Where the skeleton and the digests of its image begin and end, as offsets have it.
_HEADER = read_header(source_of(image_of(STATE)))
_SKELETON, _DIGESTS, _END = (
    place - _HEADER.data_start
    for place in (_HEADER.skeleton_start, _HEADER.digests_start, _HEADER.nbytes)
)

BAD: dict[str, dict[str, Any] | bytes] = {
    "overlap": {"a/data_offsets": [-4, 20]},
    "hole": {"a/data_offsets": [4, 28]},
    "outside": {"b/data_offsets": [24, 10**15], "b/shape": [(10**15 - 24) // 2]},
    "negative begin": {"a/data_offsets": [-24, 0]},
    "end before begin": {"a/data_offsets": [24, 0]},
    "negative shape": {"a/shape": [-6]},
    "two negatives": {"a/shape": [-2, -3]},
    "bool in shape": {"a/shape": [True, 6]},
    "bool as offset": {"a/data_offsets": [False, 24]},
    "float as offset": {"a/data_offsets": [0.0, 24.0]},
    "text as offset": {"a/data_offsets": ["0", "24"]},
    "three offsets": {"a/data_offsets": [0, 24, 24]},
    "no offsets": {"a/data_offsets": ...},
    "no shape": {"a/shape": ...},
    "wrong nbytes": {"a/shape": [7]},
    "huge shape": {"a/shape": [2**62, 2**62]},
    "unknown dtype": {"a/dtype": "F128"},
    "dtype is no text": {"a/dtype": 4},
    "entry is a list": {"a": []},
    "missing digests": {DIGESTS: ...},
    "missing skeleton": {SKELETON: ...},
    "skeleton behind digests": {
        f"{SKELETON}/data_offsets": [_SKELETON + _END - _DIGESTS, _END],
        f"{DIGESTS}/data_offsets": [_SKELETON, _SKELETON + _END - _DIGESTS],
    },
    "too many digests": {
        f"{SKELETON}/shape": [_DIGESTS - _SKELETON - 8],
        f"{SKELETON}/data_offsets": [_SKELETON, _DIGESTS - 8],
        f"{DIGESTS}/shape": [_END - _DIGESTS + 8],
        f"{DIGESTS}/data_offsets": [_DIGESTS - 8, _END],
    },
    "a tensor behind the digests": {
        "empty": {"dtype": "U8", "shape": [0], "data_offsets": [_END, _END]},
        "more": {"dtype": "U8", "shape": [1], "data_offsets": [_END, _END + 1]},
    },
    "no metadata": {"__metadata__": ...},
    "metadata is a list": {"__metadata__": []},
    "metadata is null": {"__metadata__": None},
    "another version": {"__metadata__/format": "localckpt-9"},
    "version is a number": {"__metadata__/format": 1},
    "no version": {"__metadata__/format": ...},
    "no session": {"__metadata__/session": ...},
    "session is a number": {"__metadata__/session": 5},
    "no iteration": {"__metadata__/iteration": ...},
    "iteration is a number": {"__metadata__/iteration": 40},
    "negative iteration": {"__metadata__/iteration": "-40"},
    "iteration with a blank": {"__metadata__/iteration": " 40"},
    "iteration in other digits": {"__metadata__/iteration": "٤"},
    "iteration is a power": {"__metadata__/iteration": "²"},
    "endless rank": {"__metadata__/rank": "9" * 400},
    "empty epoch": {"__metadata__/epoch": ""},
    "not JSON": b"{",
    "only spaces": b"",
    "not text": b'{"\xff\xfe": 1}',
    "deep nesting": b"[" * 2000,
    "two values": b"{}{}",
    "an endless number": b'{"a":' + b"9" * 3000 + b"}",
}


@pytest.mark.fault("hostile-file")
@pytest.mark.parametrize("changes", BAD.values(), ids=BAD.keys())
def test_a_header_that_contradicts_itself_is_refused(changes: dict[str, Any] | bytes) -> None:
    image = with_header(changes)

    for read in (read_header, read_verified_record, unpack):
        with pytest.raises(CorruptShardError):
            read(source_of(image))


@pytest.mark.fault("hostile-file")
@pytest.mark.parametrize("claimed", [10 * 10**9, 2**63, 2**64 - 1, 5000])
def test_a_header_longer_than_the_file_is_refused_and_nothing_is_allocated(claimed: int) -> None:
    image = image_of(STATE)[:4200]
    image[:8] = claimed.to_bytes(8, "little")
    source = source_of(image)
    tracemalloc.start()

    with pytest.raises(CorruptShardError, match="its header would take"):
        unpack(source)

    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


_PLACES = st.integers(1, 1 << 20).flatmap(
    lambda ranks: st.tuples(st.integers(0, ranks - 1), st.just(ranks))
)


@given(st.text(max_size=30), st.tuples(*[st.integers(0, 10**18)] * 3), _PLACES)
def test_every_identity_comes_back_from_a_header(
    session: str, numbers: tuple[int, ...], place: tuple[int, int]
) -> None:
    epoch, sequence, iteration = numbers
    identity = ShardIdentity(session, Generation(epoch, sequence), iteration, *place)

    image = image_of({"a": torch.ones(1)}, identity)

    assert read_verified_record(source_of(image)).identity == identity


@pytest.mark.fault("wrong-place")
def test_a_shard_that_is_not_the_one_expected_is_refused() -> None:
    other = ShardIdentity("a session", Generation(2, 7), 41, 3, 8)

    with pytest.raises(CorruptShardError, match=r"expected iteration 41 .* found iteration 40"):
        unpack(source_of(image_of(STATE)), expect=other)


_LINEAGE = Lineage(
    IDENTITY.generation.epoch_id, "shared", 39, (Point(EpochId(1, 5), 39),), (), is_cut=True
)


def test_the_lineage_is_read_as_it_was_written_and_moves_no_tensor() -> None:
    longest = Point(EpochId(10**19 - 1, 10**19 - 1), 10**19 - 1)
    lineages = [
        _LINEAGE,
        replace(_LINEAGE, ancestors=(longest,) * MOST_ANCESTORS, given_up=(longest,) * 8),
    ]
    without = image_of(STATE)

    for lineage in lineages:
        image = image_of(STATE, replace(IDENTITY, lineage=lineage))

        identity = read_header(source_of(image)).identity
        assert identity.lineage == lineage
        assert identity == IDENTITY
        record = read_verified_record(source_of(image))
        assert record.identity.lineage == lineage
        assert unpack(source_of(image), expect=IDENTITY)["a"].tolist() == STATE["a"].tolist()
        assert len(image) - len(without) in (0, 4096)
    assert len(image_of(STATE, replace(IDENTITY, lineage=_LINEAGE))) == len(without)
    assert read_header(source_of(without)).identity.lineage is None


@pytest.mark.parametrize(
    "lineage",
    [
        *(None, 7, "", "no JSON", "{}", "[]", "[2, 0]", "[" * 2000),
        json.dumps(replace(_LINEAGE, epoch=EpochId(3, 0)).to_json()),
        json.dumps([*_LINEAGE.to_json(), 0]),
    ],
    ids=lambda lineage: f"{lineage!s:.20}",
)
def test_a_lineage_that_cannot_be_read_or_is_of_another_epoch_is_refused(lineage: Any) -> None:
    with pytest.raises(CorruptShardError, match="lineage"):
        read_header(source_of(with_header({"__metadata__/lineage": lineage})))


@pytest.mark.fault("torn-file")
@pytest.mark.parametrize("extra", [b"\0", b"\0" * 4096, b"garbage"])
def test_bytes_behind_the_end_are_refused(extra: bytes) -> None:
    with pytest.raises(CorruptShardError, match="its header describes"):
        unpack(source_of(image_of(STATE) + extra))
