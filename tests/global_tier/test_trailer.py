"""What a file or a record is not as it was written is found when it is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localckpt import CorruptShardError
from localckpt.global_tier.data_files import (
    FOOTER_NBYTES,
    Trailer,
    file_nbytes,
    read_trailer,
    verify_data_file,
    write_data_file,
)
from localckpt.global_tier.folders import RECORD_NAME, CommitRecord
from localckpt.global_tier.places import FilePlace
from localckpt.global_tier.storage_writer import FileSystemWriterAsync
from localckpt.memory.digests import BLOCK_NBYTES
from localckpt.memory.host_memory import map_memory
from localckpt.state_dict.source import ShardSource
from tests.global_tier.states import data_files, load_with_ours, save, tensor_of
from tests.state_dict.states import assert_same

quickly = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def test_a_file_of_any_number_of_bytes_is_written_whole(tmp_path: Path) -> None:
    for nbytes in (8, 4032, 4040, 4048, 4096, 8136, BLOCK_NBYTES, BLOCK_NBYTES + 4032):
        place, content = FilePlace(tmp_path, str(nbytes)), map_memory(nbytes)
        write_data_file(place, "ab" * 16, lambda content=content: [content])
        verify_data_file(place, "ab" * 16, file_nbytes(nbytes), lambda nbytes: None)


class End:
    """The end of a file of so many bytes, of which nothing else is read."""

    def __init__(self, end: bytes, nbytes: int) -> None:
        self.nbytes = nbytes
        self._end = end

    def read(self, start: int, stop: int) -> memoryview:
        before = self.nbytes - len(self._end)
        return memoryview(self._end)[start - before : stop - before]

    def trailer(self) -> Trailer | None:
        return read_trailer(cast(ShardSource, self), "here")


class Saved:
    """A checkpoint of two files, each of several blocks, that a test may damage."""

    def __init__(self, path: Path, seed: int = 0) -> None:
        self.path = path
        # Of one size in both files, so that a part of one fits into the other.
        self.state = {
            "a": tensor_of(torch.float32, (700_001,), seed),
            "b": tensor_of(torch.float32, (700_001,), seed + 1),
            "c": tensor_of(torch.int16, (5, 7), seed),
            "step": seed,
        }
        writer = FileSystemWriterAsync(path)
        save(writer, self.state)
        writer.close()
        self.save_id = writer.save_id
        self.files = data_files(path)
        self.contents = [file.read_bytes() for file in self.files]
        self.covered = [
            End(content, len(content)).trailer().covered_nbytes  # type: ignore[union-attr]
            for content in self.contents
        ]

    def put(self, number: int, content: bytes) -> None:
        """Replace one file's content; the other files are as they were."""
        for file, whole in zip(self.files, self.contents, strict=True):
            file.write_bytes(whole)
        self.files[number].write_bytes(content)

    def require_found(self, number: int) -> None:
        with pytest.raises(CorruptShardError) as error:
            load_with_ours(self.path, self.state, save_id=self.save_id)
        assert self.files[number].name in str(error.value)

    def require_found_or_right(self, number: int) -> None:
        """As :meth:`require_found`, for one who does not know which save it is."""
        try:
            found = load_with_ours(self.path, self.state)
        except CorruptShardError as error:
            named = self.files[number].name in str(error)
        else:
            named = True
            assert_same(found, self.state)
        assert named


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("checkpoint") / "here")


@given(st.binary(max_size=2 * FOOTER_NBYTES), st.integers(0, 1 << 20))
def test_a_file_that_ends_in_anything_else_has_no_trailer(end: bytes, more: int) -> None:
    assert End(end, len(end) + (more if len(end) >= FOOTER_NBYTES else 0)).trailer() is None


@quickly
@given(st.data())
def test_a_flipped_bit_is_found_but_for_some_of_a_trailer_by_who_knows_no_save(
    saved: Saved, data: st.DataObject
) -> None:
    number, is_covered = data.draw(st.integers(0, 1)), data.draw(st.booleans())
    covered, size = saved.covered[number], len(saved.contents[number])
    first, last = (0, covered - 1) if is_covered else (covered, size - 1)
    bit = data.draw(st.integers(8 * first, 8 * last + 7))

    content = bytearray(saved.contents[number])
    content[bit // 8] ^= 1 << bit % 8
    saved.put(number, content)

    saved.require_found(number)
    saved.require_found_or_right(number)
    if is_covered:
        with pytest.raises(CorruptShardError, match=saved.files[number].name):
            load_with_ours(saved.path, saved.state)


def _block(index: int) -> slice:
    return slice(index * BLOCK_NBYTES, (index + 1) * BLOCK_NBYTES)


def test_a_block_or_a_file_from_elsewhere_and_one_that_goes_on_are_found(
    saved: Saved, tmp_path: Path
) -> None:
    own, other = saved.contents, Saved(tmp_path / "other", seed=7).contents
    for block in (other[0][_block(1)], own[1][_block(1)], own[0][_block(0)]):
        content = bytearray(own[0])
        content[_block(1)] = block
        saved.put(0, content)

        saved.require_found(0)
        with pytest.raises(CorruptShardError, match=saved.files[0].name):
            load_with_ours(saved.path, saved.state)
    saved.put(0, other[0])
    with pytest.raises(CorruptShardError, match="another save"):
        load_with_ours(saved.path, saved.state, save_id=saved.save_id)
    saved.put(1, own[1] + bytes(1))
    saved.require_found(1)
    saved.require_found_or_right(1)


RECORD = CommitRecord(
    "my run", 7, 2, "0123456789abcdef" * 2, 4, {"__0_0.distcp": 123, "__3_1.distcp": 0}, 2**64 - 1
)


@pytest.mark.fault("flipped-bit", "torn-file")
def test_damage_to_any_byte_of_a_record_is_seen(tmp_path: Path) -> None:
    path = tmp_path / RECORD_NAME
    data = RECORD.to_bytes()
    assert CommitRecord.read(FilePlace(path)) is None

    for i in range(len(data)):
        changed = data[:i] + bytes([data[i] ^ 0x10]) + data[i + 1 :]
        for damaged in (changed, data[:i] + data[i + 1 :], data[:i]):
            path.write_bytes(damaged)
            try:
                found = CommitRecord.read(FilePlace(path))
            except CorruptShardError:
                continue
            # Only the line's end may be missing.
            assert found in (None, RECORD)


@pytest.mark.fault("hostile-file")
@pytest.mark.parametrize(
    "forged",
    [
        pytest.param(b"[" * 100_000, id="nested without end"),
        pytest.param(b"{", id="no JSON"),
        pytest.param(b"null", id="null"),
        pytest.param(b"{}", id="empty"),
        {"iteration": "7"},
        {"epoch": -1},
        {"world_size": None},
        {"files": ["__0_0.distcp"]},
        {"files": {"../../etc/passwd": 5}},
        {"files": {"..": 5}},
        {"files": {"__0_0.distcp": "5"}},
        {"save_id": "../x"},
        {"metadata_digest": 1.5},
        {"metrics": [1]},
        {"metrics": {"loss": "low"}},
        {"retention": 3},
        {"retention": {"last": 0, "every": None, "best": None}},
        {"retention": {"last": 1, "every": None, "best": {"name": "loss"}}},
        {"unequal": 5},
        {"lineage": [1, 2]},
        {"more": 1},
    ],
    ids=str,
)
def test_a_record_that_somebody_made_up_is_damaged(
    forged: bytes | dict[str, object], tmp_path: Path
) -> None:
    text = forged
    if isinstance(text, dict):
        whole = json.loads(RECORD.to_bytes().splitlines()[0])
        text = json.dumps(whole | text).encode()
    digest = xxhash.xxh3_64_intdigest(text)
    (tmp_path / RECORD_NAME).write_bytes(b"%s\n%016x\n" % (text, digest))

    with pytest.raises(CorruptShardError):
        CommitRecord.read(FilePlace(tmp_path, RECORD_NAME))
