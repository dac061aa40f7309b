"""Images that are read together, and the search for the one that is damaged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from localckpt import RestoreError, StorageError
from localckpt.errors import CorruptShardError
from localckpt.ids import Generation, ShardIdentity
from localckpt.state_dict.image import pack
from localckpt.state_dict.reader import OpenImages
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.source import MemorySource

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


def test_one_that_is_suspected_alone_is_read_alone(images: OpenImages) -> None:
    for identity in (_GOOD, _DAMAGED):
        images.open(identity)

    with pytest.raises(RestoreError, match="it contradicts itself, though every byte"):
        images.find_bad(CorruptShardError("it contradicts itself"), _GOOD)

    assert images.bad == {}


def test_one_that_cannot_be_opened_is_bad_and_what_was_opened_is_closed(
    images: OpenImages,
) -> None:
    good = images.source(_GOOD)

    with pytest.raises(StorageError, match="it is gone"):
        images.open(_GONE)

    assert list(images.bad) == [_GONE]
    images.close()
    assert images.bad == {}
    assert good.nbytes == 0


def test_an_error_of_storage_is_that_of_the_first_where_none_is_damaged(
    images: OpenImages,
) -> None:
    images.open(_GOOD)

    images.find_bad(refused := StorageError("it did not answer"))

    assert images.bad == {_GOOD: refused}
