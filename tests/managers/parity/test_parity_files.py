"""The file of a parity: readable as safetensors, told apart by its header, refused if it is odd."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from localckpt.errors import CorruptShardError, MismatchError
from localckpt.ids import Generation, Group, ShardIdentity
from localckpt.memory.digests import BlockHasher
from localckpt.parity.image import ParityFrame, ParityOf, ParityPart
from localckpt.parity.stripes import PARITY_KIND
from localckpt.state_dict.image import unpack
from localckpt.state_dict.source import ImageBytes, MemorySource, read_header, read_verified_record
from tests.cli.commands import call

_SHARD = ShardIdentity("run", Generation(1, 2), 3, 2, 4)
_OF = ParityOf(Group((0, 1, 2, 3), 2, PARITY_KIND), (5_000_000,) * 4)


_NBYTES = _OF.layout.parity_nbytes


def _parity_image() -> memoryview:
    identity = _SHARD.of_kind(PARITY_KIND)
    frame = ParityFrame.of(_SHARD, _OF)
    image = memoryview(bytearray(frame.nbytes))
    frame.put(image)[:] = b"\xab" * _NBYTES
    BlockHasher(identity).fill(image, read_header(MemorySource(image)).digests_start)
    return image


def test_a_parity_is_read_back_from_its_file(tmp_path: Path) -> None:
    image = _parity_image()
    path = tmp_path / "parity.safetensors"
    path.write_bytes(image)

    record = read_verified_record(MemorySource(image))
    part = ParityPart(MemorySource(image))

    ImageBytes(MemorySource(image), _SHARD.of_kind(PARITY_KIND)).verify()
    assert (record.identity, record.group) == (_SHARD.of_kind(PARITY_KIND), _OF.group)
    assert part.of == _OF
    assert bytes(part.read(0, part.nbytes)) == b"\xab" * _NBYTES
    assert unpack(MemorySource(image)) is None
    assert "parity      2 of ranks 0-3" in call("inspect", path).out.splitlines()
    with safe_open(path, "pt") as file:
        assert json.loads(file.metadata()["parity_of"])[:2] == [[0, 1, 2, 3], 2]
        assert file.get_tensor("parity").numel() == _NBYTES


@pytest.mark.fault("hostile-file")
@pytest.mark.parametrize(
    ("is_of_group", "text"),
    [
        *((True, text) for text in ("", "7", "[" * 100_000, "[[0,1,2,3],true,[1,1,1,1]]")),
        *((True, text) for text in ("[[0,1,1,2],1,[1,1,1,1]]", "[[0,1,2,4],2,[1,1,1,1]]")),
        *((True, text) for text in ("[[0,1,3],1,[1,1,1]]", "[[0,1,2,3],4,[1,1,1,1]]")),
        *((False, text) for text in ("[[0,1,2,3],2]", "[[0,1,2],2,[1,1,1]]", "[[1,2],1,[1,1]]")),
        *((False, f"[[0,1,2,3],2,{of}]") for of in ("[1,1,1]", "[1,1,1,-1]", f"[1,1,1,{10**16}]")),
    ],
    ids=str,
)
def test_a_header_that_says_nonsense_of_its_group_or_members_is_refused(
    is_of_group: bool, text: str
) -> None:
    image = bytes(_parity_image())
    told = json.dumps(text).encode()
    start = image.index(b'"parity_of": ') + len(b'"parity_of": ')
    stop = image.index(b'"}', start) + 1
    header = image[8:start] + told + image[stop:4096]
    nbytes = -(-(len(header) + 8) // 4096) * 4096
    spoiled = (nbytes - 8).to_bytes(8, "little") + header.ljust(nbytes - 8)
    source = MemorySource(memoryview(spoiled + image[4096:]))

    if is_of_group:
        with pytest.raises(CorruptShardError, match=r"not a shard image: .*(group|it says)"):
            read_verified_record(source)
    else:
        with pytest.raises(MismatchError, match="parit"):
            ParityPart(source)
