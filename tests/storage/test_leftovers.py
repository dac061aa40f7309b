"""What a killed process left is removed at the next start; what a live one has is left alone."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from localckpt.storage.buffers import SharedBuffer
from localckpt.storage.catalog import find_staging
from localckpt.storage.owner import Owner, owner_of
from localckpt.storage.staging import StagingFolder, remove_orphans
from tests.storage.conftest import Node
from tests.storage.shards import (
    ROOT,
    another_process,
    assert_loads,
    everything,
    found,
    identity,
    kill,
    names,
    older_than,
    save,
)


def files(*folders: Path) -> set[str]:
    return {path.name for folder in folders for path in folder.rglob("*") if path.is_file()}


@pytest.mark.fault("trainer-dies")
def test_half_a_shard_of_a_killed_process_is_removed_at_the_next_start(node: Node) -> None:
    first = node()
    save(first, identity(7))
    first.close()
    with another_process(node.kind, node.root, node.shared) as process:
        folder = node.root / "session-run" / "0"
        assert any(path.name.endswith(".dirty") for path in folder.iterdir())
        kill(process)

    store = node()

    assert not [path for path in folder.iterdir() if path.name.endswith(".dirty")]
    assert list(node.shared.iterdir()) == []
    assert found(store) == {identity(7)}
    assert_loads(store, identity(7))


@pytest.mark.fault("trainer-dies")
def test_it_is_removed_by_another_rank_too_when_its_own_does_not_come_back(node: Node) -> None:
    with another_process(node.kind, node.root, node.shared, rank=3) as process:
        kill(process)

    node(rank=0)

    assert not [name for name in files(node.root, node.shared) if name.endswith(".dirty")]
    assert list(node.shared.iterdir()) == []


@pytest.mark.fault("two-jobs")
def test_what_a_live_process_is_writing_is_never_touched(node: Node) -> None:
    with another_process(node.kind, node.root, node.shared, rank=3):
        before = files(node.root, node.shared)
        assert any(name.endswith(".dirty") for name in before)

        store = node(rank=0)
        save(store, identity(1))
        store.close()

        assert before <= files(node.root, node.shared)


@pytest.mark.fault("trainer-dies")
def test_the_recycled_files_of_a_killed_process_are_used_by_the_one_after_it(node: Node) -> None:
    store = node()
    save(store, identity(1))
    (file,) = store.folder.glob("*.safetensors")
    inode = file.stat().st_ino
    store.prune(everything, [])
    # As if it had been killed here: nobody closes it.
    (store.folder / ".owner").write_text(str(Owner("0123456789ab", 1, 1)))

    again = node()
    save(again, identity(2))

    assert next(again.folder.glob("*.safetensors")).stat().st_ino == inode
    assert_loads(again, identity(2))


def test_the_recycled_files_of_a_rank_that_went_elsewhere_are_removed_with_its_shards(
    node: Node,
) -> None:
    gone = node(rank=3)
    save(gone, identity(1, rank=3))
    save(gone, identity(2, rank=3))
    gone.prune(older_than(identity(2)), [])
    assert names(gone.folder) >= {"recycled"}
    (gone.folder / ".owner").write_text(str(Owner("0123456789ab", 1, 1)))
    store = node(rank=0)
    store.list_stored()

    store.prune(everything, adopted_ranks=[3])

    assert names(gone.folder) == {"owner"}


@pytest.mark.fault("two-jobs")
@pytest.mark.parametrize("owner", [Owner("0123456789ab", 1, 1), Owner("b", 2, 3)])
def test_an_owner_of_another_boot_or_before_it_is_dead(node: Node, owner: Owner) -> None:
    folder = node.root / "session-run" / "0"
    folder.mkdir(parents=True)
    (folder / ".owner").write_text(str(owner))
    (folder / "000000000001.0.1.1.safetensors.dirty").write_bytes(b"half")

    node()

    assert owner_of(folder) == Owner.me()
    assert names(folder) == {"owner"}


@pytest.mark.fault("two-jobs")
def test_an_owner_whose_pid_another_process_has_now_is_dead(node: Node) -> None:
    me = Owner.me()
    folder = node.root / "session-run" / "0"
    folder.mkdir(parents=True)
    (folder / ".owner").write_text(str(Owner(me.boot, me.pid, me.started - 1)))

    store = node()

    save(store, identity(1))


@pytest.mark.fault("trainer-dies")
def test_staging_files_of_dead_processes_are_removed_and_other_files_are_not(
    tmp_path: Path, shared: Path
) -> None:
    me = Owner.me()
    dead = f"localckpt-staging-{Owner(me.boot, me.pid, 1)}.1.0"
    live = f"localckpt-staging-{me}.1.0"
    odd = ["localckpt-staging-", "localckpt-staging-a-b-c.0", "somebody-elses", f"x{dead}"]
    for name in (dead, live, *odd):
        (shared / name).touch()
    # What another rank removed in the same moment looks the same as a link to nothing.
    (shared / f"{dead}.link").symlink_to(tmp_path / "nothing")

    remove_orphans()

    assert {path.name for path in shared.iterdir()} == {live, *odd}


def test_nothing_but_the_shards_and_the_token_stays_after_close(node: Node) -> None:
    stores = [node(rank) for rank in range(2)]
    for store, iteration in itertools.product(stores, range(4)):
        save(store, identity(iteration, store.rank))
        store.prune(older_than(identity(iteration)), [])

    for store in stores:
        store.close()

    left = files(node.root, node.shared)
    assert {name for name in left if not name.endswith(".safetensors")} == {"node-token", ".lock"}
    assert len(left) == 4


_HOLD = """
import fcntl, sys
file = open(sys.argv[1], "wb")
fcntl.lockf(file, fcntl.LOCK_EX)
print("holds", flush=True)
sys.stdin.read()
"""


@pytest.mark.fault("two-jobs")
def test_a_staging_buffer_stays_while_its_owner_is_locked_though_no_process_can_be_seen(
    shared: Path,
) -> None:
    owner = f"localckpt-staging-{Owner('0123456789ab', 1, 1)}.0"
    path, lock = shared / f"{owner}.0", shared / f"{owner}.lock"
    path.touch()

    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(lock)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "holds\n"
        remove_orphans()
        assert {path, lock} <= {*shared.iterdir()}
        kill(holder)
    remove_orphans()

    assert not {path, lock} & {*shared.iterdir()}


def test_the_lock_of_an_owner_is_gone_with_its_last_buffers(shared: Path) -> None:
    folder = StagingFolder()
    buffers = [SharedBuffer(folder.new_path(), 10) for _ in range(2)]
    assert sorted(path.suffix for path in shared.iterdir()) == [".0", ".1", ".lock"]

    for buffer in buffers:
        buffer.close()
    folder.close()
    folder.close()

    assert not list(shared.iterdir())


def test_threads_that_make_the_first_buffers_at_once_share_one_lock(shared: Path) -> None:
    threads = 4
    for _ in range(50):
        folder, together = StagingFolder(), threading.Barrier(threads)

        def new_path(folder: StagingFolder = folder, together: Any = together) -> Path:
            together.wait()
            return folder.new_path()

        with ThreadPoolExecutor(threads) as pool:
            paths = [pool.submit(new_path) for _ in range(threads)]
        assert len({path.result() for path in paths}) == threads
        folder.close()

    assert not list(shared.iterdir())


_STAGE_AND_FORK = """
import os, sys
from pathlib import Path
from localckpt.storage import staging
from localckpt.storage.buffers import SharedBuffer

staging.SHARED_MEMORY = Path(sys.argv[1])
folder = staging.StagingFolder()
buffer = SharedBuffer(folder.new_path(), 4_000_000)
child = os.fork()
if child == 0:
    sys.stdin.read()
    os._exit(0)
print(child, flush=True)
sys.stdin.read()
"""


@pytest.mark.fault("trainer-dies")
def test_staging_of_a_killed_trainer_is_removed_and_freed_while_a_fork_of_it_lives(
    shared: Path,
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _STAGE_AND_FORK, str(shared)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as trainer:
        assert trainer.stdout is not None
        child = psutil.Process(int(trainer.stdout.readline()))
        try:
            assert [path for path in shared.iterdir() if path.stat().st_size >= 4_000_000]
            kill(trainer)
            assert child.is_running()
            # Else the memory would stay until the fork ends, with a name or without.
            assert str(shared) not in Path(f"/proc/{child.pid}/maps").read_text()
            opened = [os.readlink(f) for f in Path(f"/proc/{child.pid}/fd").iterdir()]
            assert not [name for name in opened if str(shared) in name and "lock" not in name]
            assert {file.is_live for file in find_staging()} == {False}

            remove_orphans()

            assert not list(shared.iterdir())
        finally:
            child.kill()
