"""The power is cut after every system call of a save and of what comes after it.

The job runs on a small ext4 of its own. Whenever it has changed or synced something it is stopped,
and what the device holds by then is mounted and loaded from.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import localckpt
from localckpt.storage.owner import owner_of
from localckpt.storage.write import sync_folder
from tests.faults.loop_disk import DiskAfterPowerCut, LoopDisk, loop_disk
from tests.faults.stops import stops_of
from tests.faults.table import fixed_rows
from tests.managers.jobs import assert_same, make_manager, save, state_of
from tests.ranks import announce, await_announced, start_ranks

__all__ = ["loop_disk"]

_SYNCS = "fsync,fdatasync"
# What some are called differs from machine to machine.
_CHANGES = (
    "?rename,?renameat,?renameat2,?unlink,?unlinkat,?mkdir,?mkdirat,fallocate,ftruncate,pwrite64"
)
# Two digest blocks, and not a whole number of pages.
_NBYTES = 1_200_003
_FIRST_LIFE, _SECOND_LIFE = range(1, 4), range(4, 6)


def _train(
    rank: int, world_size: int, root: Path, told: Path, how: str, keep_last: int, written: str
) -> None:
    announce("ready")
    await_announced("go")
    for iterations in (_FIRST_LIFE, _SECOND_LIFE):
        queue = None if how == "sync" else localckpt.AsyncCallsQueue(timeout_s=60.0)
        with _manager(root, keep_last, how) as manager, queue or nullcontext():
            if written == "buffered":
                # As on a file system that takes no O_DIRECT.
                manager.store._direct = False
            if manager.find_latest() != -1:
                manager.load()
            for iteration in iterations:
                _tell(told, f"begins {iteration}")
                save(manager, _state(iteration), iteration, queue)
                _tell(told, f"saved {iteration}")


def _state(iteration: int) -> dict[str, Any]:
    # Each is smaller than the one before, so that a file that is used again ends differently.
    return state_of(0, iteration, _NBYTES - 10_000 * iteration)


def _manager(root: Path, keep_last: int, how: str = "sync") -> Any:
    return make_manager("disk", root, "job", keep_last=keep_last, timeout=60.0)


def _tell(told: Path, what: str) -> None:
    fd = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(fd, f"{what}\n".encode())
    os.close(fd)


def _told(told: Path, what: str) -> int:
    """The last iteration of which this was told; -1 if of none."""
    lines = told.read_text().splitlines() if told.exists() else []
    return max((int(line.split()[1]) for line in lines if line.startswith(what)), default=-1)


def _cuts(
    disk: LoopDisk,
    tmp_path: Path,
    how: str,
    keep_last: int,
    written: str,
    names: str,
    syncs: str = "",
) -> Iterator[tuple[DiskAfterPowerCut, int, int, str]]:
    """Cut the power again and again: ``(disk, last saved, last begun, after which call)``.

    Args:
        written: Past the page cache (``"direct"``) or through it (``"buffered"``).
        names: Whether the kernel makes names durable at once, or only when somebody asks.
        syncs: What happens in place of an fsync.
    """
    calls = {_CHANGES: "", _SYNCS: syncs}
    told = tmp_path / "told"
    args = (disk.root / "store", told, how, keep_last, written)
    with start_ranks(_train, 1, *args, init_group=False) as group:
        group.await_announced("ready")
        with stops_of(group.pids[0], calls, tmp_path / "trace") as stops:
            group.announce("go")
            for call in stops:
                if names == "at once":
                    disk.commit_names()
                yield disk.cut_power(), _told(told, "saved"), _told(told, "begins"), call
        group.join()


def _find_and_load(root: Path, keep_last: int, saved: int, begun: int) -> None:
    """What was saved is there, or what was being saved; and nothing else is taken for it."""
    with _manager(root, keep_last) as manager:
        found = manager.find_latest()
        assert saved <= found <= begun
        if found != -1:
            state, ckpt_id = manager.load()
            assert ckpt_id == (found, 0, "job")
            assert_same(state, _state(found))
    # What was not finished is gone, and no file that has its name is half of anything.
    assert not [p for p in root.rglob("*") if p.suffix in (".dirty", ".recycled", ".corrupt")]


def _name(call: str) -> str:
    """The system call that a line of a trace begins with."""
    return call.split("(")[0].split()[-1].removesuffix("at").removesuffix("at2")


def _as_after_a_reboot(root: Path) -> None:
    """Who owned a folder is gone: nobody has survived."""
    for path in root.rglob(".owner"):
        owner = owner_of(path.parent)
        if owner is not None:
            path.write_text(str(replace(owner, boot="0" * 12)))


def _check(after: DiskAfterPowerCut, keep_last: int, saved: int, begun: int) -> None:
    with after.mounted() as root:
        store = root / "store"
        _as_after_a_reboot(store)
        _find_and_load(store, keep_last, saved, begun)
        if saved > min(_FIRST_LIFE) and keep_last > 1:
            # The one before is whole as well, if it comes to that.
            newest = max(store.rglob("*.safetensors"))
            newest.unlink()
            _find_and_load(store, keep_last, saved - 1, begun - 1)
        # It goes on from there, whatever was left.
        with _manager(store, keep_last) as manager:
            manager.save(_state(9), 9)
        _find_and_load(store, keep_last, 9, 9)


_WAYS = product(("sync", "thread"), (1, 2), ("direct", "buffered"), ("when asked", "at once"))
_IN_SHORT = {("sync", 1, "direct", "when asked"), ("thread", 2, "buffered", "at once")}


@pytest.mark.fault("power-cut")
@pytest.mark.usefixtures("can_attach")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("how", "keep_last", "written", "names"), fixed_rows(_WAYS, _IN_SHORT))
def test_what_was_saved_when_the_power_went_is_there_and_else_the_one_before(
    how: str,
    keep_last: int,
    written: str,
    names: str,
    loop_disk: LoopDisk,
    tmp_path: Path,
    record_property: Any,
) -> None:
    cuts = []

    for after, saved, begun, call in _cuts(loop_disk, tmp_path, how, keep_last, written, names):
        try:
            _check(after, keep_last, saved, begun)
        except Exception as error:
            raise AssertionError(f"{saved} was saved, {begun} begun, last call {call}") from error
        cuts.append(call)

    record_property("cases", len(cuts))
    assert {"fsync", "rename", "unlink", "fallocate"} <= {_name(call) for call in cuts}


@pytest.mark.fault("power-cut")
@pytest.mark.usefixtures("can_attach")
def test_a_disk_that_lies_about_fsync_is_found_out(loop_disk: LoopDisk, tmp_path: Path) -> None:
    lost = 0

    # What makes a save durable does nothing and says that it has.
    for after, saved, _, _ in _cuts(
        loop_disk, tmp_path, "sync", 1, "direct", "when asked", syncs="retval=0"
    ):
        with after.mounted() as root:
            there = len(list(root.rglob("*.safetensors")))
            lost += saved != -1 and not there

    assert lost > 10


@pytest.mark.fault("power-cut")
@pytest.mark.parametrize("folder_synced", [False, True])
def test_a_file_that_nobody_synced_is_lost_or_short(
    loop_disk: LoopDisk, folder_synced: bool
) -> None:
    content = os.urandom(_NBYTES)
    dirty, final = loop_disk.root / "file.dirty", loop_disk.root / "file"
    dirty.write_bytes(content)
    dirty.rename(final)
    if folder_synced:
        sync_folder(loop_disk.root)

    with loop_disk.cut_power().mounted() as root:
        found = (root / "file").read_bytes() if (root / "file").exists() else None

    assert found == (b"" if folder_synced else None)
    with final.open("rb") as file:
        os.fsync(file)
    with loop_disk.cut_power().mounted() as root:
        assert (root / "file").read_bytes() == content
