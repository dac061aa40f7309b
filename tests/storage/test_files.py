"""Reading a file, warm out of the page cache and cold past it, to wherever the bytes belong."""

from __future__ import annotations

import os
import random
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from localckpt.errors import CorruptShardError, StorageError
from localckpt.memory.copying import Copier
from localckpt.state_dict.image import pack
from localckpt.state_dict.source import (
    PIECE_NBYTES,
    ByteRange,
    ImageBytes,
    MemorySource,
    ShardSource,
)
from localckpt.storage.files import FileSource
from tests.ranks import run_ranks
from tests.storage.shards import identity

WHO = identity(1)


def make_cold(path: Path) -> None:
    """Drop a file from the page cache."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


@pytest.fixture(params=["warm", "cold", "memory"])
def source_of(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """``source_of(data)``: the same bytes in a cached file, a file on disk only, or memory."""
    opened: list[ShardSource] = []

    def make(data: bytes | bytearray | memoryview) -> ShardSource:
        source: ShardSource
        if request.param == "memory":
            source = MemorySource(memoryview(bytearray(data)))
        else:
            path = tmp_path / f"file-{len(opened)}"
            path.write_bytes(data)
            if request.param == "cold":
                make_cold(path)
            source = FileSource(path)
        opened.append(source)
        return source

    yield make

    for source in opened:
        source.close()
        source.close()


SIZES = [1, 4095, 4097, PIECE_NBYTES - 1, PIECE_NBYTES, 2 * PIECE_NBYTES + 5, 5 * PIECE_NBYTES]


@pytest.mark.parametrize("nbytes", SIZES)
def test_every_byte_arrives_once_in_parts_of_any_size(source_of: Any, nbytes: int) -> None:
    data = random.Random(nbytes).randbytes(nbytes)
    source = source_of(data)
    target = memoryview(bytearray(nbytes))

    def places(start: int, stop: int) -> list[memoryview]:
        chance = random.Random(start)
        cuts = sorted(chance.randrange(start, stop + 1) for _ in range(chance.randrange(9)))
        return [target[a:b] for a, b in zip([start, *cuts], [*cuts, stop], strict=True)]

    def work(starts: Iterator[int]) -> None:
        for start in starts:
            stop = min(start + PIECE_NBYTES, nbytes)
            parts = places(start, stop)
            source.read_into(start, parts)
            assert b"".join(parts) == data[start:stop]

    Copier(source.threads).share(range(0, nbytes, PIECE_NBYTES), work)

    assert source.nbytes == nbytes
    assert bytes(target) == data


def test_what_a_place_raises_ends_the_read_and_is_raised(source_of: Any) -> None:
    image = ImageBytes(source_of(pack({"weight": torch.zeros(10 << 20)}, WHO).view), WHO)
    threads = threading.active_count()

    def fail(offset: int, data: memoryview) -> None:
        raise KeyError("place")

    with pytest.raises(KeyError, match="place"):
        image.read_ranges([ByteRange(0, image.header.digests_start, fail)])

    assert threading.active_count() == threads


@pytest.mark.fault("torn-file")
@pytest.mark.parametrize("cold", [True, False])
@pytest.mark.parametrize("left", [5000, PIECE_NBYTES, PIECE_NBYTES + 1])
def test_a_file_that_is_cut_while_it_is_open_is_an_error(
    tmp_path: Path, cold: bool, left: int
) -> None:
    path = tmp_path / "shard"
    path.write_bytes(bytes(3 * PIECE_NBYTES))
    source = FileSource(path)
    os.truncate(path, left)
    if cold:
        make_cold(path)

    with pytest.raises(CorruptShardError, match=f"{path} is cut short"):
        source.read_into(0, [memoryview(bytearray(source.nbytes))])
    with pytest.raises(CorruptShardError, match="is cut short"):
        source.read(0, source.nbytes)

    source.close()


@pytest.mark.fault("hostile-file")
def test_a_link_is_refused_and_a_missing_file_named(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "real")

    with pytest.raises(StorageError, match=r"link: .* symbolic link"):
        FileSource(tmp_path / "link")
    with pytest.raises(StorageError, match=r"could not open .*missing"):
        FileSource(tmp_path / "missing")


def _read_without_memory(rank: int, world_size: int, path: Path) -> str:
    make_cold(path)
    source, view = FileSource(path), memoryview(bytearray(1 << 20))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize(), resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_AS, limit)
    try:
        # As another copy of the file could not be read either.
        with pytest.raises(MemoryError) as raised:
            source.read_into(0, [view])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    return str(raised.value)


def test_memory_that_runs_out_is_no_error_of_the_storage(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(8 << 20))

    (told,) = run_ranks(_read_without_memory, 1, tmp_path / "file", init_group=False)

    assert told == f"could not read {tmp_path / 'file'}: Cannot allocate memory"
