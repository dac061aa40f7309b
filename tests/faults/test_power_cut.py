"""The power is cut before every system call of a save that changes something, and at the end.

The job runs on a small ext4 of its own. While such a call waits, what the device holds by then is
mounted and loaded from.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import localckpt
from localckpt.global_tier import places
from localckpt.storage.owner import owner_of
from tests.faults import shared
from tests.faults.loop_disk import LoopDisk, new_disk
from tests.faults.traced import Call, Watched, watch
from tests.managers.jobs import assert_same, make_manager, save, state_of
from tests.ranks import run_ranks

# Two digest blocks, and not a whole number of pages.
_NBYTES = 1_200_003
_FIRST_LIFE, _SECOND_LIFE = range(1, 4), range(4, 5)
_NUMEL = 2000


@dataclass(frozen=True)
class _Job:
    """How a job saves, and how durable names are that nobody has synced.

    Attributes:
        keep_last: How many checkpoints stay.
        is_queued: Saves are behind training.
        is_buffered: Files are written through the page cache, as on a file system that takes no
            O_DIRECT; else past it.
        names_at_once: The kernel makes names durable at once, not only when somebody asks.
        is_shared: The disk is shared storage.
        frozen_nbytes: How much of the state never changes, so that files are patched.
    """

    keep_last: int
    is_queued: bool
    is_buffered: bool
    names_at_once: bool
    is_shared: bool = False
    frozen_nbytes: int = 0

    def state(self, iteration: int) -> dict[str, Any]:
        # Each is smaller than the one before, so that a file that is used again ends differently.
        changing = state_of(0, iteration, _NBYTES - 10_000 * iteration)
        return {"frozen": torch.zeros(self.frozen_nbytes, dtype=torch.uint8), **changing}

    def manager(self, root: Path) -> Any:
        return make_manager("disk", root, "job", keep_last=self.keep_last, timeout=60.0)

    def shared_manager(self, root: Path) -> localckpt.GlobalCheckpointManager:
        options = {"keep_last": self.keep_last, "thread_count": 1, "timeout": 60.0}
        return localckpt.GlobalCheckpointManager(root, **options)


def _train(
    rank: int, world_size: int, job: _Job, store: Path, address: str, note: Callable[[str], None]
) -> None:
    with Watched(address).section():
        for iterations in (_FIRST_LIFE, _SECOND_LIFE):
            queue = localckpt.AsyncCallsQueue(timeout_s=60.0) if job.is_queued else None
            with job.manager(store) as manager, queue or nullcontext():
                manager.store._direct &= not job.is_buffered
                if manager.find_latest() != -1:
                    manager.load()
                for iteration in iterations:
                    note(f"begins {iteration}")
                    save(manager, job.state(iteration), iteration, queue)
                    note(f"saved {iteration}")


def _train_with_shared_storage(
    rank: int, world_size: int, job: _Job, store: Path, address: str, note: Callable[[str], None]
) -> None:
    if job.is_buffered:
        _take_no_direct_files()
    with Watched(address).section(), job.shared_manager(store) as manager:
        for iteration in _FIRST_LIFE:
            note(f"begins {iteration}")
            manager.save(shared.state_of(iteration, _NUMEL), iteration, is_async=True)
            manager.wait_until_finished()
            note(f"saved {iteration}")


def _take_no_direct_files() -> None:
    open_owned = places.open_owned

    def refuse(path: Path, flags: int, *mode: int) -> io.FileIO:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return open_owned(path, flags, *mode)

    places.open_owned = refuse  # type: ignore[assignment]


@dataclass(frozen=True)
class _Notes:
    """What the job has begun and saved: empty files on another disk."""

    folder: Path

    def __call__(self, text: str) -> None:
        (self.folder / text).touch()

    def newest(self, what: str) -> int:
        return max(
            (int(path.name.split()[1]) for path in self.folder.glob(f"{what} *")), default=-1
        )


def _cut_everywhere(disk: LoopDisk, job: _Job) -> list[str]:
    """Run a job, and cut the power before each of its calls and at its end; these calls."""
    cuts, notes = list[str](), _Notes(disk.root.with_name("notes"))
    notes.folder.mkdir()

    def cut(call: Call | None) -> None:
        if job.names_at_once:
            disk.commit_names()
        # Other threads of the job go on meanwhile.
        saved = notes.newest("saved")
        copy = disk.cut_power()
        begun = notes.newest("begins")
        try:
            with disk.after(copy) as root:
                check(job, root / "store", saved, begun)
        except Exception as error:
            raise AssertionError(f"{saved} was saved, {begun} begun, before {call}") from error
        cuts.append(call.name if call else "the end")

    train, check = _train, _check
    if job.is_shared:
        train, check = _train_with_shared_storage, _check_shared_storage
    with watch(disk.root, before=cut) as watching:
        args = (job, disk.root / "store", watching.address, notes)
        run_ranks(train, 1, *args, init_group=False, timeout_s=1200.0)
    cut(None)
    return cuts


def _find_and_load(job: _Job, root: Path, saved: int, begun: int) -> None:
    """What was saved is there, or what was being saved; and nothing else is taken for it."""
    with job.manager(root) as manager:
        found = manager.find_latest()
        assert saved <= found <= begun
        if found != -1:
            state, ckpt_id = manager.load()
            assert ckpt_id == (found, 0, "job")
            assert_same(state, job.state(found))
    # What was not finished is gone, and no file that has its name is half of anything.
    assert not [p for p in root.rglob("*") if p.suffix in (".dirty", ".recycled", ".corrupt")]


def _check(job: _Job, store: Path, saved: int, begun: int) -> None:
    for path in store.rglob(".owner"):
        owner = owner_of(path.parent)
        if owner is not None:
            # Nobody has survived the reboot.
            path.write_text(str(replace(owner, boot="0" * 12)))
    _find_and_load(job, store, saved, begun)
    if saved > min(_FIRST_LIFE) and job.keep_last > 1:
        # The one before is whole as well, if it comes to that.
        max(store.rglob("*.safetensors")).unlink()
        _find_and_load(job, store, saved - 1, begun - 1)
    # It goes on from there, whatever was left.
    with job.manager(store) as manager:
        manager.save(job.state(9), 9)
    _find_and_load(job, store, 9, 9)


def _check_shared_storage(job: _Job, store: Path, saved: int, begun: int) -> None:
    with job.shared_manager(store) as manager:
        found = manager.find_latest()
        assert saved <= found <= begun
        if found != -1:
            into = shared.state_of(0, _NUMEL)
            assert manager.load(into=into)[1].iteration == found
            assert_same(into, shared.state_of(found, _NUMEL))
        manager.save(shared.state_of(9, _NUMEL), 9, is_async=False)
    shared.assert_nothing_else(store)


@pytest.fixture
def disk(tmp_path: Path, shm_roots: Callable[[int], list[Path]]) -> Iterator[LoopDisk]:
    # In memory, so that no other disk's speed matters.
    backing = shm_roots(1)[0] / "disk"
    with new_disk("ext4", backing, tmp_path / "disk"):
        yield LoopDisk(backing, tmp_path / "disk")


_LONG = pytest.mark.long


@pytest.mark.fault("power-cut")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "job",
    [
        _Job(1, False, False, names_at_once=False, frozen_nbytes=7 << 20),
        _Job(2, is_queued=True, is_buffered=True, names_at_once=True),
        pytest.param(_Job(2, False, True, False, frozen_nbytes=7 << 20), marks=_LONG),
        pytest.param(_Job(1, True, False, True), marks=_LONG),
        _Job(1, is_queued=True, is_buffered=True, names_at_once=True, is_shared=True),
        pytest.param(_Job(1, True, False, False, is_shared=True), marks=_LONG),
    ],
)
def test_what_was_saved_when_the_power_went_is_there_and_else_the_one_before(
    job: _Job, disk: LoopDisk, record_property: Any
) -> None:
    cuts = _cut_everywhere(disk, job)

    record_property("cases", len(cuts))
    of_kind = {"mkdir"} if job.is_shared else {"unlink", "fallocate"}
    assert {"fsync", "rename"} | of_kind <= set(cuts)


@pytest.mark.fault("power-cut")
def test_a_file_that_nobody_synced_is_lost_with_the_power(disk: LoopDisk) -> None:
    content, final = os.urandom(_NBYTES), disk.root / "file"
    (disk.root / "file.dirty").write_bytes(content)
    (disk.root / "file.dirty").rename(final)

    with disk.after(disk.cut_power()) as root:
        assert not (root / "file").exists()
    disk.commit_names()
    with disk.after(disk.cut_power()) as root:
        assert (root / "file").read_bytes() == b""
    with final.open("rb") as file:
        os.fsync(file)
    with disk.after(disk.cut_power()) as root:
        assert (root / "file").read_bytes() == content
