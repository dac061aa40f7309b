"""What a file is not as it was written is found when it is read."""

from __future__ import annotations

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
    FileIdentity,
    Trailer,
    file_nbytes,
    read_trailer,
    verify_data_file,
    write_data_file,
)
from localckpt.global_tier.places import FilePlace
from localckpt.global_tier.storage_reader import CachedMetadataFileSystemReader
from localckpt.global_tier.storage_writer import FileSystemWriterAsync
from localckpt.memory.digests import BLOCK_NBYTES, BlockHasher
from localckpt.memory.host_memory import map_memory
from localckpt.state_dict.source import ShardSource
from tests.global_tier.states import (
    assert_same,
    data_files,
    load_with_ours,
    save,
    tensor_of,
)

SAVE_ID = st.binary(min_size=16, max_size=16).map(bytes.hex)
quickly = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def test_a_file_of_any_number_of_bytes_is_written_whole(tmp_path: Path) -> None:
    for nbytes in (8, 4032, 4040, 4048, 4096, 8136, BLOCK_NBYTES, BLOCK_NBYTES + 4032):
        place, content = FilePlace(tmp_path, str(nbytes)), map_memory(nbytes)
        write_data_file(place, "ab" * 16, lambda content=content: [content])
        verify_data_file(place, "ab" * 16, file_nbytes(nbytes), lambda nbytes: None)


class End:
    """The end of a file, of which nothing else is read."""

    def __init__(self, end: bytes, nbytes: int) -> None:
        self.nbytes = nbytes
        self._end = end

    def read(self, start: int, stop: int) -> memoryview:
        before = self.nbytes - len(self._end)
        return memoryview(self._end)[start - before : stop - before]


def trailer_in(end: bytes, nbytes: int) -> Trailer | None:
    """The trailer of a file of so many bytes that ends so."""
    return read_trailer(cast(ShardSource, End(end, nbytes)), "here")


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
            trailer_in(content, len(content)).covered_nbytes  # type: ignore[union-attr]
            for content in self.contents
        ]

    def restore(self) -> None:
        for file, content in zip(self.files, self.contents, strict=True):
            file.unlink(missing_ok=True)
            file.write_bytes(content)

    def put(self, number: int, content: bytes) -> None:
        """Replace one file's content; the other files are as they were."""
        self.restore()
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
    assert trailer_in(end, len(end) + (more if len(end) >= FOOTER_NBYTES else 0)) is None


@given(st.binary(min_size=1, max_size=100), SAVE_ID, SAVE_ID, st.integers(0, 3))
def test_a_block_verifies_in_its_place_of_its_file_of_its_save_only(
    block: bytes, save_id: str, other_save_id: str, index: int
) -> None:
    places = {("__0_0", save_id, index), ("__0_1", save_id, index)}
    places |= {("__0_0", save_id, index + 1), ("__0_0", other_save_id, index)}

    digests = {
        BlockHasher(FileIdentity(f"{name}.distcp", of_save)).digest(at, block)
        for name, of_save, at in places
    }

    assert len(digests) == len(places)


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


def test_a_file_that_goes_on_after_its_end_is_found(saved: Saved) -> None:
    saved.put(1, saved.contents[1] + bytes(1))

    saved.require_found(1)
    saved.require_found_or_right(1)


def _block(index: int) -> slice:
    return slice(index * BLOCK_NBYTES, (index + 1) * BLOCK_NBYTES)


def test_a_block_or_a_file_of_another_save_is_found(saved: Saved, tmp_path: Path) -> None:
    other = Saved(tmp_path / "other", seed=7)
    content = bytearray(saved.contents[0])
    content[_block(1)] = other.contents[0][_block(1)]

    saved.put(0, content)

    saved.require_found(0)
    with pytest.raises(CorruptShardError, match=saved.files[0].name):
        load_with_ours(saved.path, saved.state)

    saved.put(0, other.contents[0])

    with pytest.raises(CorruptShardError, match="another save"):
        load_with_ours(saved.path, saved.state, save_id=saved.save_id)


@given(st.data())
def test_any_flipped_bit_of_the_metadata_is_found_by_who_knows_its_digest(
    saved: Saved, data: st.DataObject
) -> None:
    metadata = saved.path / ".metadata"
    whole = metadata.read_bytes()
    content, bit = bytearray(whole), data.draw(st.integers(0, 8 * len(whole) - 1))
    content[bit // 8] ^= 1 << bit % 8
    reader = CachedMetadataFileSystemReader(
        saved.path, metadata_digest=xxhash.xxh3_64_intdigest(whole)
    )

    metadata.write_bytes(content)
    try:
        with pytest.raises(CorruptShardError, match=r"\.metadata is damaged"):
            reader.read_metadata()
    finally:
        metadata.write_bytes(whole)
