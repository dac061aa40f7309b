"""What somebody put in the place of a file or a folder of the store.

Nobody waits for it, or reads it without end; nothing is written to it, or through it.
"""

from __future__ import annotations

import os
import re
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from localckpt import CheckpointingException
from tests.cli.commands import Answer, call
from tests.faults.forged import small_state
from tests.faults.small_store import NEWEST, limit_memory, write_store
from tests.managers.jobs import make_manager
from tests.ranks import run_ranks
from tests.state_dict.states import assert_same

pytestmark = pytest.mark.fault("hostile-file")

Dirs = Callable[[int], list[Path]]

_READ_S = 10.0


def _take_up(rank: int, world_size: int, root: Path) -> list[str]:
    """Start a job on a store and save twice; errors of ours on the way."""
    limit_memory()
    refused = []
    for iteration in (20, 21):
        try:
            with make_manager("disk", root, "job", keep_last=1, timeout=5.0) as manager:
                if manager.find_latest() != -1:
                    manager.load()
                manager.save(small_state(iteration), iteration)
        except CheckpointingException as error:
            refused.append(f"{type(error).__name__}: {error}")
    return refused


_COMMANDS = ("ls", "verify", "explain", "inspect", "clean")


def _look(rank: int, world_size: int, root: Path, path: Path) -> dict[str, Answer]:
    """What the commands say of a store; ``inspect`` of the file alone."""
    limit_memory()
    return {name: call(name, path if name == "inspect" else root) for name in _COMMANDS}


def _make_fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def _make_zero(path: Path) -> None:
    path.unlink(missing_ok=True)
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("only root may make a device")


def _make_socket(path: Path) -> None:
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as unix:
        here = os.getcwd()
        os.chdir(path.parent)
        try:
            unix.bind(path.name)
        finally:
            os.chdir(here)


def _make_folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()
    (path / "inside").write_text("kept")


def _make_link_to_zero(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


_THINGS = [_make_fifo, _make_zero, _make_socket, _make_folder, _make_link_to_zero]
_NAMES = ["z.safetensors", "0.recycled", "0.dirty", ".owner", ".notes", "../../node-token"]


@pytest.mark.rows(5)
@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.parametrize("make", _THINGS[:-1])
def test_what_is_no_file_holds_up_nobody_and_is_not_written_to(
    make: Callable[[Path], None], name: str, tmp_path: Path
) -> None:
    path, _ = write_store(tmp_path)
    make(path.parent / name)

    (refused,) = run_ranks(_take_up, 1, tmp_path, init_group=False, timeout_s=_READ_S)

    # Either it is told, with its path, or the job goes on as if it were not there.
    assert all(str(tmp_path) in text for text in refused)
    if not refused:
        with make_manager("disk", tmp_path, "job") as manager:
            assert manager.find_latest() == 21
            assert_same(manager.load()[0], small_state(21))


@pytest.mark.rows(5)
@pytest.mark.parametrize("name", [*_NAMES, "../../.lock"])
@pytest.mark.parametrize("make", _THINGS)
def test_what_is_no_file_holds_up_no_command_and_stays_as_it_is(
    make: Callable[[Path], None], name: str, tmp_path: Path
) -> None:
    shard, _ = write_store(tmp_path)
    path = shard.parent / name
    make(path)
    before = path.lstat().st_mode

    (told,) = run_ranks(_look, 1, tmp_path, path, init_group=False, timeout_s=_READ_S)

    assert path.lstat().st_mode == before
    assert {told[command].status for command in ("ls", "verify", "explain")} == {0}
    assert f"A restart loads iteration {NEWEST}" in told["explain"].out
    assert told["inspect"].status == 2
    for answer in (told["inspect"], told["clean"]):
        assert answer.status in (0, 2)
        assert answer.err.count("\n") == (answer.status == 2)


def _without_ages(listing: str) -> list[str]:
    """The lines below the first, without the ages of the checkpoints, which grow meanwhile."""
    return [re.sub(r"\d+ s  ", "", line) for line in listing.splitlines()[1:]]


_LINKED = [*_NAMES, ".notes.new", "../../node-token.new", "../../.lock"]


@pytest.mark.parametrize("name", _LINKED)
def test_links_in_a_store_to_a_file_outside_are_neither_followed_nor_changed(
    name: str, node_dirs: Dirs
) -> None:
    root, outside = node_dirs(2)
    path, image = write_store(root)
    (outside / "kept").write_bytes(image)
    link = path.parent / name
    link.unlink(missing_ok=True)
    before = _without_ages(call("ls", root).out)
    link.symlink_to(outside / "kept")

    (told,) = run_ranks(_look, 1, root, path, init_group=False, timeout_s=_READ_S)

    assert _without_ages(told["ls"].out) == before
    assert told["verify"].out.count("2 good") == 1
    assert link.is_symlink()

    # Nor by a job.
    run_ranks(_take_up, 1, root, init_group=False, timeout_s=_READ_S)

    assert (outside / "kept").read_bytes() == image
    assert [p.name for p in outside.iterdir()] == ["kept"]


def test_a_link_to_another_folder_in_the_place_of_a_ranks_reaches_nothing(node_dirs: Dirs) -> None:
    root, outside = node_dirs(2)
    path, image = write_store(root)
    names = {"a.recycled", "b.dirty", path.name, ".notes", ".owner"}
    for name in names:
        (outside / name).write_bytes(image)
    (path.parent.parent / "5").symlink_to(outside)

    with make_manager("disk", root, "job", keep_last=1) as manager:
        assert manager.find_latest() == NEWEST
        manager.load()
        manager.save(small_state(9), 9)

    assert {p.name for p in outside.iterdir()} == names
    assert all(p.read_bytes() == image for p in outside.iterdir())


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_a_file_with_another_name_elsewhere_is_not_overwritten(
    kind: str, node_dirs: Dirs, shm_roots: Dirs
) -> None:
    root, outside = (node_dirs if kind == "disk" else shm_roots)(2)

    with make_manager(kind, root, "job", keep_last=1) as manager:
        manager.save(small_state(8), 8)
        (path,) = root.rglob("*.safetensors")
        image = path.read_bytes()
        # As a backup does that links what has not changed (cp --link, rsync --link-dest).
        os.link(path, outside / "kept")
        for iteration in range(9, 13):
            manager.save(small_state(iteration), iteration)

    assert (outside / "kept").read_bytes() == image
