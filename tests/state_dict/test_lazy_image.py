"""An image is read part by part: places of tensors, states around them, and verified bytes."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy
import pytest
import torch

from localckpt import CorruptShardError, RestoreError
from localckpt.ids import Generation, ShardIdentity
from localckpt.memory.digests import BLOCK_NBYTES
from localckpt.state_dict.image import pack
from localckpt.state_dict.reader import ImageReader
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.source import MemorySource
from tests.state_dict.states import assert_same

_IDENTITY = ShardIdentity("lazy", Generation(1, 5), 3, 0, 1)


def _image(state: Any) -> tuple[ImageReader, MemorySource]:
    source = pack(state, _IDENTITY)
    return ImageReader(source, SafeGlobals(()), _IDENTITY), source


def test_tensors_are_read_where_they_lie() -> None:
    base = torch.arange(24.0).reshape(2, 3, 4)
    state = {
        "whole": base,
        "turned": base.transpose(0, 1),
        "row": base[1],
        "last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(7.0),
    }
    image, _ = _image(state)
    found, tensors = image.rebuild(())
    numbers = {id(tensor): number for number, tensor in enumerate(tensors)}

    for key, value in state.items():
        number = numbers[id(found[key])]
        assert found[key].is_meta
        assert found[key].shape == value.shape
        assert_same(image.tensor(number), value)
        run = image.run_of(number)
        assert (run is not None) == value.is_contiguous()
        if run is not None:
            content = b"".join(map(bytes, image.pieces(*run)))
            assert content == value.numpy().tobytes()


def test_only_what_is_asked_for_has_values() -> None:
    state = OrderedDict(array=numpy.arange(2000.0), tensor=torch.ones(5), other=torch.ones(6))
    image, _ = _image(state)

    found, tensors = image.rebuild(image.arrays | {2})

    assert type(found) is OrderedDict
    assert numpy.array_equal(found["array"], state["array"])
    assert [tensor.is_meta for tensor in tensors] == [False, True, False]


def test_an_object_that_needs_values_says_so() -> None:
    sparse = torch.eye(3).to_sparse()
    image, _ = _image({"sparse": sparse})

    try:
        found, _ = image.rebuild(())
    except RestoreError:
        found, _ = image.rebuild(range(len(image.entries)))
        assert torch.equal(found["sparse"].to_dense(), torch.eye(3))
    else:
        assert found["sparse"].is_meta


@pytest.mark.parametrize("block", [0, 1, 2])
def test_no_byte_of_a_damaged_block_is_given(block: int) -> None:
    image, source = _image({"weight": torch.arange(900_000, dtype=torch.float32)})
    run = image.run_of(0)
    assert run is not None
    source.view[block * BLOCK_NBYTES + 5000] ^= 1
    given: list[int] = []

    with pytest.raises(CorruptShardError, match=f"from {block * BLOCK_NBYTES} on"):
        given.extend(len(part) for part in image.pieces(*run))

    assert sum(given) <= max(0, block * BLOCK_NBYTES - run[0])
