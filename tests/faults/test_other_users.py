"""What other users of a node or of shared storage own, may write to, or hold is not used."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from localckpt import CheckpointingException
from localckpt.cli import cleaning
from tests.cli.commands import call
from tests.faults.small_store import write_store
from tests.global_tier.models import manager_on
from tests.managers.jobs import KINDS, NodesOf, make_manager
from tests.ranks import run_ranks

pytestmark = pytest.mark.fault("hostile-file")

_OTHER, _USER = 65534, 54_321
_TIERS = ("disk", "shared")
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two other users")


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory in which all users may make files, as ``/tmp``."""
    made = Path(tempfile.mkdtemp(prefix="localckpt-test-users-", dir="/tmp"))
    made.chmod(0o1777)
    yield made
    shutil.rmtree(made)


def _save_and_load(rank: int, world_size: int, tier: str, root: Path, umask: int) -> str:
    """Load what is there and save some more, as a user; the error that the job ends with."""
    os.umask(umask)
    # Without the groups of this one.
    os.setgroups([])
    os.setgid(_USER)
    os.setuid(_USER)
    try:
        is_shared = tier == "shared"
        make = manager_on if is_shared else partial(make_manager, tier, timeout=2.0)
        with make(root, "job", keep_last=1) as manager:
            newest, into = manager.find_latest(), {"w": torch.zeros(4096)}
            if newest >= 0:
                assert (manager.load(into=into)[0]["w"] == newest).all()
            for iteration in range(newest + 1, newest + 4):
                manager.save({"w": torch.full((4096,), float(iteration))}, iteration)
            assert (manager.load(into=into)[0]["w"] == newest + 3).all()
    except CheckpointingException as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _job(tier: str, root: Path, umask: int = 0) -> str:
    (error,) = run_ranks(_save_and_load, 1, tier, root, umask, init_group=False)
    return str(error)


def _below(root: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.lstat().st_mode, p.lstat().st_uid) for p in sorted(root.rglob("*"))}


@only_root
@pytest.mark.parametrize("tier", _TIERS)
@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_what_is_saved_is_the_users_alone_also_in_a_root_below_a_sticky_folder(
    tier: str, place: Path, umask: int
) -> None:
    # The folder itself may be a root, where others have put nothing.
    for root in (place / "new" / "store", place):
        assert _job(tier, root, umask=umask) == ""

    made = _below(place)
    assert len(made) > 4
    assert {uid for _, uid in made.values()} == {_USER}
    parents = {str(place / "new"), str(place / "new" / "store")}
    assert {mode & 0o077 for path, (mode, _) in made.items() if path not in parents} == {0}
    assert not any(mode & stat.S_IWOTH for mode, _ in made.values())


@only_root
@pytest.mark.rows(8)
@pytest.mark.parametrize("tier", _TIERS)
@pytest.mark.parametrize(
    ("owner", "group", "mode", "takers", "cure"),
    [
        (_OTHER, _OTHER, 0o1777, (), f"owner {_OTHER}"),
        # Of what cannot even be entered the system says so.
        (_OTHER, _OTHER, 0o700, (), "ermission denied"),
        # A group that the user is not in.
        (_USER, _OTHER, 0o770, (), "chmod go-w"),
        # The user's group, which on shared storage may be a team.
        (_USER, _USER, 0o775, ("shared",), "chmod go-w"),
        (0, _USER, 0o775, ("shared",), "give a new directory below it"),
        (_OTHER, _USER, 0o775, (), f"owner {_OTHER}"),
        (_OTHER, _USER, 0o2775, ("shared",), f"owner {_OTHER}"),
    ],
)
def test_a_root_is_refused_where_others_can_put_something_with_the_cure(
    tier: str, place: Path, owner: int, group: int, mode: int, takers: tuple[str, ...], cure: str
) -> None:
    root = place / "store"
    root.mkdir()
    os.chown(root, owner, group)
    root.chmod(mode)

    error = _job(tier, root)

    if tier in takers:
        assert error == ""
        return
    assert error.startswith("StorageError")
    assert str(root) in error
    assert cure in error
    assert _below(root) == {}
    os.chown(root, _USER, _USER)
    root.chmod(0o700)
    assert _job(tier, root) == ""


@only_root
@pytest.mark.parametrize(
    ("tier", "name"),
    [
        *(("disk", ""), ("disk", "session-job"), ("disk", "session-job/0")),
        *(("shared", ""), ("shared", "session-job")),
    ],
)
@pytest.mark.parametrize("way", ["of another user", "writable", "a link"])
def test_a_folder_of_a_store_that_is_not_the_users_alone_is_refused(
    tier: str, place: Path, name: str, way: str
) -> None:
    assert _job(tier, place / "store") == ""
    folder = place / "store" / name
    if way == "of another user":
        os.chown(folder, _OTHER, _OTHER)
    elif way == "writable":
        folder.chmod(0o777)
    else:
        folder.rename(place / "moved")
        folder.symlink_to(place / "moved")
        os.chown(folder, _OTHER, _OTHER, follow_symlinks=False)
    before = _below(place)

    error = _job(tier, place / "store")

    assert error.startswith("StorageError")
    assert str(folder) in error or str(folder.parent) in error
    assert _below(place) == before


def test_a_parent_that_all_may_write_to_is_logged(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place.chmod(0o777)

    make_manager("disk", place / "store").close()

    assert f"chmod +t {place}" in caplog.text


@only_root
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["of another user", "writable", "readable", "linked"])
def test_a_recycled_file_that_is_not_this_users_alone_is_not_written_to(
    kind: str, nodes_of: NodesOf, way: str
) -> None:
    root, outside = nodes_of(kind, 2)
    with make_manager(kind, root, keep_last=1) as manager:
        manager.save({"w": torch.zeros(4096)}, 1)
        folder = manager.store.folder
        recycled = folder / "x.recycled"
        recycled.write_bytes(bytes(1 << 15))
        recycled.chmod({"writable": 0o666, "readable": 0o644}.get(way, 0o600))
        if way == "of another user":
            os.chown(recycled, _OTHER, _OTHER)
        elif way == "linked":
            os.link(recycled, outside / "kept")
        with recycled.open("rb") as opened:
            for iteration in (2, 3, 4):
                manager.save({"w": torch.full((4096,), float(iteration))}, iteration)

            assert opened.read() == bytes(1 << 15)
        assert all(path.stat().st_mode & 0o777 == 0o600 for path in folder.glob("*.safetensors"))


@only_root
@pytest.mark.parametrize(
    ("tier", "pattern"), [("disk", ".lock"), ("disk", "node-token"), ("shared", "*.lock")]
)
def test_files_of_another_user_in_a_store_are_refused(place: Path, tier: str, pattern: str) -> None:
    assert _job(tier, place / "store") == ""
    path = next((place / "store").rglob(pattern))
    path.chmod(0o666)
    writable = _job(tier, place / "store") if pattern == "node-token" else "StorageError"
    os.chown(path, _OTHER, _OTHER)

    error = _job(tier, place / "store")

    assert writable.startswith("StorageError")
    assert f"{path} is a file of user {_OTHER}" in error


@pytest.mark.parametrize("step", ["_remove", "put_back"])
def test_a_folder_that_becomes_a_link_while_clean_runs_is_not_followed(
    step: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, outside = place / "store", place / "outside"
    shard, _ = write_store(root)
    quarantined = shard.rename(shard.with_name(f"{shard.name}.corrupt"))
    (shard.parent / "half.dirty").write_bytes(b"half")
    outside.mkdir()
    for name in ("half.dirty", quarantined.name):
        (outside / name).write_bytes(b"kept")
    act = getattr(cleaning, step)

    def swap_and_act(*args: Any) -> Any:
        shard.parent.rename(place / "moved")
        shard.parent.symlink_to(outside)
        return act(*args)

    monkeypatch.setattr(cleaning, step, swap_and_act)

    answer = call("clean", root, "--corrupt")

    assert answer.status == 2
    assert "is a symbolic link" in answer.err
    assert {path.name for path in outside.iterdir()} == {"half.dirty", quarantined.name}
