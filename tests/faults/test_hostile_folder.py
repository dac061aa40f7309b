"""What somebody put in the place of a file: nobody waits for it, and nothing is written to it."""

from __future__ import annotations

import os
import re
import socket
import stat
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

import pytest

from localckpt import CheckpointingException
from tests.cli.commands import Answer, call
from tests.faults.small_store import NEWEST, limit_memory, small_state, write_store
from tests.managers.jobs import Dirs, make_manager
from tests.ranks import run_ranks
from tests.state_dict.states import assert_same

pytestmark = pytest.mark.fault("hostile-file")

_READ_S = 10.0
_NAMES = ["z.safetensors", "0.recycled", "0.dirty", ".owner", ".notes", "../../node-token"]


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


def _look(rank: int, world_size: int, root: Path, path: Path) -> dict[str, Answer]:
    """What the commands say of a store; ``inspect`` of the file alone."""
    limit_memory()
    commands = ("ls", "verify", "explain", "inspect", "clean")
    return {name: call(name, path if name == "inspect" else root) for name in commands}


def _make_zero(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may make a device")
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))


def _make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as unix, chdir(path.parent):
        unix.bind(path.name)


def _make_folder(path: Path) -> None:
    path.mkdir()
    (path / "inside").write_text("kept")


@pytest.mark.rows(5)
@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.parametrize("make", [os.mkfifo, _make_zero, _make_socket, _make_folder])
def test_what_is_no_file_holds_up_no_command_and_no_job_and_is_not_written_to(
    make: Callable[[Path], None], name: str, tmp_path: Path
) -> None:
    shard, _ = write_store(tmp_path)
    path = shard.parent / name
    path.unlink(missing_ok=True)
    make(path)
    before = path.lstat().st_mode

    (told,) = run_ranks(_look, 1, tmp_path, path, init_group=False, timeout_s=_READ_S)

    assert path.lstat().st_mode == before
    assert {told[command].status for command in ("ls", "verify", "explain")} == {0}
    assert f"A restart loads iteration {NEWEST}" in told["explain"].out
    assert told["inspect"].status == 2
    assert told["clean"].status in (0, 2)

    (refused,) = run_ranks(_take_up, 1, tmp_path, init_group=False, timeout_s=_READ_S)

    # Either it is told, with its path, or the job goes on as if it were not there.
    assert all(str(tmp_path) in text for text in refused)
    if not refused:
        with make_manager("disk", tmp_path, "job") as manager:
            assert manager.find_latest() == 21
            assert_same(manager.load()[0], small_state(21))


@pytest.mark.parametrize("name", [*_NAMES, ".notes.new", "../../node-token.new", "../../.lock"])
def test_links_in_a_store_to_a_file_outside_are_neither_followed_nor_changed(
    name: str, node_dirs: Dirs
) -> None:
    root, outside = node_dirs(2)
    path, image = write_store(root)
    (outside / "kept").write_bytes(image)
    link = path.parent / name
    link.unlink(missing_ok=True)
    before = call("ls", root).out
    link.symlink_to(outside / "kept")

    (told,) = run_ranks(_look, 1, root, path, init_group=False, timeout_s=_READ_S)

    # The ages of the checkpoints grow meanwhile.
    listings = (text.partition("\n")[2] for text in (before, told["ls"].out))
    one, other = (re.sub(r"\d+ (s|min) ", "", listing).split() for listing in listings)
    assert one == other
    assert told["verify"].out.count("2 good") == 1
    assert link.is_symlink()

    # Nor by a job.
    run_ranks(_take_up, 1, root, init_group=False, timeout_s=_READ_S)

    assert (outside / "kept").read_bytes() == image
    assert [p.name for p in outside.iterdir()] == ["kept"]
