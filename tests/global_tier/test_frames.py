"""A tensor between its frame's two parts is what torch writes of it."""

from __future__ import annotations

import io
import struct
import zipfile

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from localckpt.global_tier.staging import frame_of, is_plain
from tests.global_tier.states import DTYPES, tensor_of
from tests.state_dict.states import Tagged, bits

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


@pytest.mark.filterwarnings("ignore:.*quantize")
def test_only_tensors_that_are_nothing_but_their_values_are_plain() -> None:
    tensor = torch.ones(2, 3)
    plain = [tensor, torch.nn.Parameter(tensor), tensor.t().contiguous().t(), tensor[:, :]]
    others = [
        tensor.to_sparse(),
        tensor.to("meta"),
        tensor.as_subclass(Tagged),
        tensor.double(),
        tensor.t(),
        torch.quantize_per_tensor(tensor, 1.0, 0, torch.quint8),
    ]

    assert all(is_plain(one, torch.float32, (2, 3)) for one in plain)
    assert not any(is_plain(one, torch.float32, (2, 3)) for one in others)
    assert not is_plain(others[-1], torch.quint8, (2, 3))
