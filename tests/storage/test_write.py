"""Writing an image: every byte, every way, in any process; after an error nothing of it is left."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from localckpt.errors import CorruptShardError, StorageError
from localckpt.memory.digests import BlockHasher
from localckpt.state_dict.image import unpack
from localckpt.storage.directory import DirectoryStore, MemoryStore
from localckpt.storage.write import ShardWrite, write_shard
from tests.faults.loop_disk import new_disk
from tests.faults.traced import Fault, Watched, watch
from tests.ranks import run_ranks
from tests.storage.conftest import Node
from tests.storage.shards import (
    assert_loads,
    everything,
    filled,
    found,
    identity,
    names,
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


MIB = 1 << 20


def _cut_short(file: Path) -> None:
    os.truncate(file, 10 * MIB)


def _without_header(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.write(bytes(4096))


def _flipped(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(8 * MIB)
        opened.write(b"?")


@pytest.mark.fault("flipped-bit")
@pytest.mark.parametrize("harm", [_cut_short, _without_header, _flipped])
def test_a_recycled_file_that_is_not_what_it_was_is_written_whole_or_found_damaged(
    store: DirectoryStore, harm: Callable[[Path], None]
) -> None:
    # A state that does not depend on the iteration, in its large tensor.
    state = {"weight": torch.arange(2 << 20)}

    def save_again(iteration: int) -> int:
        who = identity(iteration)
        slot = filled(store, who, content={**state, "iteration": iteration})
        store.commit([slot])
        assert store.holds(who)
        store.release([slot])
        store.prune(lambda shard: shard.iteration < iteration, ())
        assert slot.written_nbytes is not None
        return slot.written_nbytes

    whole = [save_again(iteration) for iteration in (1, 2)]
    assert save_again(3) < 3 * MIB < 16 * MIB < min(whole)
    (recycled,) = store.folder.glob("*.recycled")
    harm(recycled)

    again = save_again(4)

    with closing(store.open(identity(4))) as source:
        if harm is _flipped:
            with pytest.raises(CorruptShardError, match=f"bytes from {8 * MIB} on"):
                unpack(source)
        else:
            assert again >= min(whole)
            assert torch.equal(unpack(source)["weight"], state["weight"])


def free_nbytes(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


@pytest.mark.fault("refused-io")
@pytest.mark.parametrize("kind", [DirectoryStore, MemoryStore])
def test_a_full_node_is_an_error_that_keeps_the_older_and_gives_the_space_back(
    kind: type[DirectoryStore], small_disk: Callable[[str], Path]
) -> None:
    store = kind(small_disk("size=8m"), "run", 0, 5.0)
    for n in (1, 2):
        save(store, identity(n), 3 * MIB)
    before = free_nbytes(store.root)

    with pytest.raises(StorageError, match=rf"{store.folder}.*it is full: free space") as raised:
        save(store, identity(3), 3 * MIB)

    assert "saved before are as they were" in str(raised.value)
    assert free_nbytes(store.root) == before
    assert found(store) == {identity(1), identity(2)}
    for n in (1, 2):
        assert_loads(store, identity(n), 3 * MIB)
    save(store, identity(4), MIB)
    assert_loads(store, identity(4), MIB)
    # A recycled file that cannot grow is given up with its space.
    store.prune(lambda shard: shard != identity(2), [])
    with pytest.raises(StorageError, match="it is full"):
        save(store, identity(5), 6 * MIB)
    assert free_nbytes(store.root) > 3 * MIB
    assert found(store) == {identity(2)}
    assert_loads(store, identity(2), 3 * MIB)
    save(store, identity(6), 4 * MIB)
    assert_loads(store, identity(6), 4 * MIB)
    store.close()


@pytest.mark.fault("unusable-store")
def test_shared_memory_that_shrank_and_grows_again_is_reserved_before_it_is_touched(
    small_disk: Callable[[str], Path],
) -> None:
    store = MemoryStore(small_disk("size=8m"), "run", 0, 5.0)
    save(store, identity(1), 5 * MIB)
    store.prune(everything, [])
    save(store, identity(2), MIB)
    store.prune(everything, [])
    filler = store.root / "filler"
    filler.write_bytes(bytes(5 * MIB))

    # Touching a page that cannot be had would be a SIGBUS.
    with pytest.raises(StorageError, match=r"it is full: .* enlarge it"):
        save(store, identity(3), 5 * MIB)

    filler.unlink()
    save(store, identity(4), 5 * MIB)
    assert_loads(store, identity(4), 5 * MIB)
    store.close()


@pytest.mark.fault("refused-io")
def test_a_disk_that_turns_read_only_is_an_error_and_what_is_there_can_be_read(
    small_disk: Callable[[str], Path],
) -> None:
    disk = small_disk("size=8m")
    store = DirectoryStore(disk, "run", 0, 5.0)
    save(store, identity(1))
    job = staged(store, identity(2))
    remount = ["mount", "-o", "remount,ro", str(disk)]
    subprocess.run(remount, timeout=30, check=True)
    try:
        with pytest.raises(StorageError, match=rf"{job.dirty}.*mounted read-only"):
            write_shard(job)
        with pytest.raises(StorageError, match=f"{disk}.*mounted read-only"):
            DirectoryStore(disk, "another", 0, 5.0)

        assert found(store) == {identity(1)}
        assert_loads(store, identity(1))
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], timeout=30, check=True)
    save(store, identity(3))
    store.close()


# The system calls of a write.


def _write(
    rank: int, world_size: int, root: Path, address: str, recycled: bool, fault: Fault | None
) -> tuple[list[str], str]:
    """Write a shard; the calls on its file and its folder, and the error."""
    watched, error = Watched(address), ""
    store = DirectoryStore(root, "run", 0, 5.0)
    if recycled:
        save(store, identity(2))
        store.prune(everything, [])
    job = staged(store, identity(3))
    with watched.section(fault) as section:
        try:
            write_shard(job)
        except StorageError as raised:
            error = str(raised)
    if error:
        assert not job.dirty.exists()
    else:
        assert store.holds(identity(3))
        assert_loads(store, identity(3))
    store.close()
    places = {
        str(job.dirty.relative_to(root)): "file",
        str(store.folder.relative_to(root)): "folder",
    }
    steps = [(call.name, places.get(call.paths[0])) for call in section.calls]
    kinds = ("pwrite64", "fsync", "fdatasync", "fallocate", "rename")
    return [f"{name} {place}" for name, place in steps if place and name in kinds], error


def _written(root: Path, recycled: bool = False, fault: Fault | None = None) -> Any:
    with watch(root) as watching:
        args = (root, watching.address, recycled, fault)
        ((steps, error),) = run_ranks(_write, 1, *args, init_group=False)
    return steps, error


@pytest.mark.parametrize("recycled", [False, True], ids=["new file", "recycled file"])
def test_the_bytes_are_durable_before_the_name_and_the_name_before_the_save_is_over(
    tmp_path: Path, recycled: bool
) -> None:
    steps, error = _written(tmp_path, recycled)

    assert error == ""
    wanted = ["fallocate file", "pwrite64 file", "fsync file", "rename file", "fsync folder"]
    # A recycled file's old name is gone for good before its bytes change.
    assert list(dict.fromkeys(steps[recycled:-1])) + steps[-1:] == wanted
    assert steps[0] == ("fsync folder" if recycled else "fallocate file")


@pytest.mark.fault("partial-io")
def test_writes_that_take_nothing_are_tried_again_and_at_last_an_error(tmp_path: Path) -> None:
    _, error = _written(tmp_path, fault=Fault(1, "skip", only=("pwrite64",)))

    assert error == ""

    _, error = _written(tmp_path, fault=Fault(1, "skip", only=("pwrite64",), lasts=True))

    assert "no byte after 0 is taken" in error


@pytest.mark.fault("unusable-store")
@pytest.mark.parametrize("kind", ["ext2", "ext3"])
def test_saves_work_on_it_and_files_are_used_again(
    kind: str, tmp_path: Path, shm_roots: Callable[[int], list[Path]]
) -> None:
    with new_disk(kind, shm_roots(1)[0] / "disk", tmp_path / "disk"):
        store = DirectoryStore(tmp_path / "disk" / "node", "run", 0, 5.0)
        for iteration, nbytes in ((1, 100_000), (2, 1_000_000), (3, 300_001)):
            save(store, identity(iteration), nbytes)
            assert_loads(store, identity(iteration), nbytes)
            store.prune(everything, [])

        save(store, identity(4))
        job = staged(store, identity(5), 40_000_000)
        with pytest.raises(StorageError, match="No space left"):
            write_shard(job)

        assert names(store.folder) == {"safetensors", "owner"}
        assert found(store) == {identity(4)}
        save(store, identity(6))
        assert found(store) == {identity(4), identity(6)}
        store.close()
