"""The power is cut before every system call of a save that changes something, and at the end.

While such a call waits, what the device of a small ext4 holds by then is mounted and loaded from.
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
from tests.managers.jobs import IN_PIECES_NBYTES, assert_same, make_manager, save, state_of
from tests.ranks import run_ranks

# Two digest blocks, and not a whole number of pages.
_NBYTES = 1_200_003
_FIRST_LIFE, _SECOND_LIFE = range(1, 4), range(4, 5)
_NUMEL = 2000


@dataclass(frozen=True)
class _Job:
    """How a job saves, and how durable names are that nobody has synced."""

    keep_last: int
    is_queued: bool
    # Through the page cache, as on a file system that takes no O_DIRECT.
    is_buffered: bool
    # The kernel makes names durable, not only when somebody asks.
    names_at_once: bool
    is_shared: bool = False
    # How much never changes, so that files are patched.
    frozen_nbytes: int = 0
    kind: str = "disk"

    def manager(self, root: Path) -> Any:
        options: dict[str, Any] = {"keep_last": self.keep_last, "timeout": 60.0}
        if self.is_shared:
            return localckpt.GlobalCheckpointManager(root, "job", thread_count=1, **options)
        return make_manager(self.kind, root, "job", **options)

    def state(self, iteration: int) -> dict[str, Any]:
        if self.is_shared:
            return shared.state_of(iteration, _NUMEL)
        # Each is smaller than the one before, so that a file that is used again ends differently.
        changing = state_of(0, iteration, _NBYTES - 10_000 * iteration)
        return {"frozen": torch.zeros(self.frozen_nbytes, dtype=torch.uint8), **changing}

    def find_and_load(self, root: Path, saved: int, begun: int) -> None:
        """What was saved is there, or what was being saved; and nothing else is taken for it."""
        with self.manager(root) as manager:
            found = manager.find_latest()
            assert saved <= found <= begun
            if found != -1:
                state, ckpt_id = manager.load(into=self.state(0) if self.is_shared else None)
                assert ckpt_id == (found, 0, "job")
                assert_same(state, self.state(found))
        # What was not finished is gone, and no file that has its name is half of anything.
        assert not [p for p in root.rglob("*") if p.suffix in (".dirty", ".recycled", ".corrupt")]


def _train(rank: int, world_size: int, job: _Job, store: Path, address: str, notes: Path) -> None:
    if job.is_shared and job.is_buffered:
        _take_no_direct_files()
    with Watched(address).section():
        for iterations in (_FIRST_LIFE,) if job.is_shared else (_FIRST_LIFE, _SECOND_LIFE):
            queue = localckpt.AsyncCallsQueue(timeout_s=60.0) if job.is_queued else None
            with job.manager(store) as manager, queue or nullcontext():
                if not job.is_shared:
                    manager.store._direct &= not job.is_buffered
                    if manager.find_latest() != -1:
                        manager.load()
                for iteration in iterations:
                    (notes / f"begins {iteration}").touch()
                    if job.is_shared:
                        manager.save(job.state(iteration), iteration, is_async=True)
                        manager.wait_until_finished()
                    else:
                        save(manager, job.state(iteration), iteration, queue)
                    (notes / f"saved {iteration}").touch()


def _take_no_direct_files() -> None:
    open_owned = places.open_owned

    def refuse(path: Path, flags: int, *mode: int) -> io.FileIO:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return open_owned(path, flags, *mode)

    places.open_owned = refuse  # type: ignore[assignment]


def _newest(notes: Path, what: str) -> int:
    """The iteration of the last empty file ``what`` on another disk."""
    return max((int(path.name.split()[1]) for path in notes.glob(f"{what} *")), default=-1)


def _cut_everywhere(disk: LoopDisk, job: _Job) -> list[str]:
    """Run a job, and cut the power before each of its calls and at its end; these calls."""
    cuts, notes = list[str](), disk.root.with_name("notes")
    notes.mkdir()

    def cut(call: Call | None) -> None:
        if job.names_at_once:
            disk.commit_names()
        # Other threads of the job go on meanwhile.
        saved = _newest(notes, "saved")
        copy = disk.cut_power()
        begun = _newest(notes, "begins")
        try:
            with disk.after(copy) as root:
                _check(job, root / "store", saved, begun)
        except Exception as error:
            raise AssertionError(f"{saved} was saved, {begun} begun, before {call}") from error
        cuts.append(call.name if call else "the end")

    with watch(disk.root, before=cut) as watching:
        args = (job, disk.root / "store", watching.address, notes)
        run_ranks(_train, 1, *args, init_group=False, timeout_s=1200.0)
    cut(None)
    return cuts


def _check(job: _Job, store: Path, saved: int, begun: int) -> None:
    for path in store.rglob(".owner"):
        owner = owner_of(path.parent)
        if owner is not None:
            # Nobody has survived the reboot.
            path.write_text(str(replace(owner, boot="0" * 12)))
    job.find_and_load(store, saved, begun)
    if saved > min(_FIRST_LIFE) and job.keep_last > 1:
        # The one before is whole as well, if it comes to that.
        max(store.rglob("*.safetensors")).unlink()
        job.find_and_load(store, saved - 1, begun - 1)
    # It goes on from there, whatever was left.
    with job.manager(store) as manager:
        if job.is_shared and manager.find_latest() != -1:
            manager.load(into=job.state(0))
        manager.save(job.state(9), 9)
    job.find_and_load(store, 9, 9)
    if job.is_shared:
        shared.assert_nothing_else(store / "session-job")


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
        pytest.param(
            _Job(1, True, False, False, frozen_nbytes=IN_PIECES_NBYTES, kind="pieces"), marks=_LONG
        ),
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
