"""Writing an image: every byte, every way, in any process; after an error nothing of it is left."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from localckpt.errors import CorruptShardError, StorageError
from localckpt.memory.digests import BlockHasher
from localckpt.storage.buffers import PrivateBuffer
from localckpt.storage.directory import DirectoryStore
from localckpt.storage.write import ShardWrite, write_shard
from tests.storage.conftest import Node
from tests.storage.shards import (
    assert_loads,
    everything,
    found,
    identity,
    save,
    slots_of,
    staged,
)

SIZES = [1, 4096, 100_001, (1 << 20) - 4096, 3 << 20, (33 << 20) + 7]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DirectoryStore]:
    with closing(DirectoryStore(tmp_path, "run", 0, 5.0)) as opened:
        yield opened


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("nbytes", SIZES)
def test_every_size_is_written_whole_past_and_through_the_page_cache(
    store: DirectoryStore, direct: bool, nbytes: int
) -> None:
    who = identity(1)
    job = staged(store, who, nbytes)
    if direct and not job.direct:
        pytest.skip("this file system does not take O_DIRECT")

    write_shard(dataclasses.replace(job, direct=direct))

    assert store.holds(who)
    assert job.final.stat().st_size == job.nbytes
    assert not job.dirty.exists()
    assert_loads(store, who, nbytes)


def received(job: ShardWrite) -> ShardWrite:
    """The job of a replica: its digests came with it, and are to be checked."""
    BlockHasher(job.identity).fill(job.buffer.view[: job.nbytes], job.covered_nbytes)
    return dataclasses.replace(job, digests="check")


def test_a_replica_is_checked_while_it_is_written(store: DirectoryStore) -> None:
    write_shard(received(staged(store, identity(1, rank=5))))

    assert identity(1, rank=5) in found(store)
    assert_loads(store, identity(1, rank=5))


@pytest.mark.fault("flipped-bit")
@pytest.mark.parametrize("place", [0, 50_000, -1])
def test_a_replica_that_is_not_what_was_sent_is_refused_and_removed(node: Node, place: int) -> None:
    store = node()
    kept = save(store, identity(1))
    job = received(staged(store, identity(2, rank=5)))
    job.buffer.view[place % job.nbytes] ^= 1

    with pytest.raises(CorruptShardError, match="iteration 2 of rank 5"):
        write_shard(job)

    assert not job.buffer.in_use
    store.discard(slots_of(store, job.identity))
    assert not job.final.exists()
    assert not job.dirty.exists()
    assert found(store) == {kept}
    save(store, identity(3))


@pytest.mark.fault("refused-io")
def test_a_job_whose_buffer_was_closed_is_an_error_and_not_a_hang(store: DirectoryStore) -> None:
    job = staged(store, identity(1))

    job.buffer.close()

    with pytest.raises(StorageError, match="its save was given up"):
        write_shard(job)
    assert not job.final.exists()


def test_a_file_that_is_in_the_way_is_not_overwritten_and_shards_before_it_stay(
    store: DirectoryStore,
) -> None:
    earlier, job = (staged(store, identity(1, rank)) for rank in (1, 0))
    job.dirty.write_bytes(b"somebody else's")

    write_shard(earlier)
    with pytest.raises(StorageError, match=r"\.dirty"):
        write_shard(job)

    assert not job.final.exists()
    assert found(store) == {earlier.identity}
    assert not job.buffer.in_use


@pytest.mark.fault("refused-io")
def test_a_recycled_file_that_vanished_is_an_error_and_the_next_save_is_good(
    store: DirectoryStore,
) -> None:
    save(store, identity(1))
    store.prune(everything, [])
    job = staged(store, identity(2))
    assert job.recycled
    job.dirty.unlink()

    with pytest.raises(StorageError, match="could not write"):
        write_shard(job)

    assert not job.buffer.in_use
    assert save(store, identity(3)) in found(store)


def test_a_buffer_is_written_even_if_it_is_closed_meanwhile(store: DirectoryStore) -> None:
    job = staged(store, identity(1), 1 << 20)
    assert isinstance(job.buffer, PrivateBuffer)
    closing = _ClosesWhenHashed(job.buffer)

    write_shard(dataclasses.replace(job, buffer=closing))

    assert store.holds(identity(1))
    assert_loads(store, identity(1), 1 << 20)
    assert len(job.buffer.view) == 0


class _ClosesWhenHashed(PrivateBuffer):
    """A buffer that is closed as soon as a writer has looked at it."""

    def __init__(self, inner: PrivateBuffer) -> None:
        self._inner = inner
        self._in_use = True

    @property
    def view(self) -> memoryview:  # type: ignore[override]
        view = self._inner.view
        self._inner.close()
        return view
