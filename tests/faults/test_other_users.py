"""What other users of a node or of shared storage own, may write to, or hold is not used."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from localckpt import Checkpointer, CheckpointingException, StorageError
from localckpt.cli import cleaning
from localckpt.events.event import Event
from localckpt.events.jsonl import JsonLines
from localckpt.storage.rank_folder import lock_store
from tests.cli.commands import call
from tests.faults.small_store import write_store
from tests.global_tier.models import manager_on
from tests.managers.jobs import KINDS, make_manager
from tests.ranks import announce, await_announced, run_ranks, start_ranks

pytestmark = pytest.mark.fault("hostile-file")

Dirs = Callable[[int], list[Path]]

_OTHER, _USER = 65534, 54_321
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two other users")


@pytest.fixture(params=["disk", "shared"])
def tier(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory in which all users may make files, as ``/tmp``."""
    made = Path(tempfile.mkdtemp(prefix="localckpt-test-users-", dir="/tmp"))
    made.chmod(0o1777)
    yield made
    shutil.rmtree(made)


def _become(uid: int, groups: Sequence[int] = ()) -> None:
    """Go on as another user, without the groups of this one."""
    if os.geteuid() == uid:
        return
    os.setgroups(groups)
    os.setgid(uid)
    os.setuid(uid)


def _make(tier: str, root: Path, **options: Any) -> Any:
    if tier == "team":
        return manager_on(root)
    if tier == "shared":
        return manager_on(root, "job", **options)
    return make_manager(tier, root, "job", timeout=2.0, **options)


def _save_and_load(
    rank: int,
    world_size: int,
    uid: int,
    tier: str,
    root: Path,
    saves: int,
    umask: int,
    groups: Sequence[int],
) -> str:
    """Load what is there and save some more, as a user; the error that the job ends with."""
    os.umask(umask)
    _become(uid, groups)
    try:
        with _make(tier, root, keep_last=1) as manager:
            newest, into = manager.find_latest(), {"w": torch.zeros(4096)}
            if newest >= 0:
                assert (manager.load(into=into)[0]["w"] == newest).all()
            for iteration in range(newest + 1, newest + saves + 1):
                manager.save({"w": torch.full((4096,), float(iteration))}, iteration)
            assert (manager.load(into=into)[0]["w"] == newest + saves).all()
    except CheckpointingException as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _job(
    tier: str,
    root: Path,
    uid: int = _USER,
    saves: int = 3,
    umask: int = 0,
    groups: Sequence[int] = (),
) -> str:
    args = (uid, tier, root, saves, umask, groups)
    (error,) = run_ranks(_save_and_load, 1, *args, init_group=False)
    return str(error)


def _folder(path: Path, owner: int, group: int, mode: int) -> Path:
    path.mkdir()
    os.chown(path, owner, group)
    path.chmod(mode)
    return path


def _below(root: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.lstat().st_mode, p.lstat().st_uid) for p in sorted(root.rglob("*"))}


# Folders.


@only_root
def test_a_root_with_the_set_group_id_bit_is_its_groups(place: Path) -> None:
    team = 54_400
    root = _folder(place / "team", _USER, team, 0o2770)
    members = [(_USER, (team,)), (_OTHER, (team,)), (_OTHER + 1, (team,)), (_OTHER + 2, ())]

    errors = [_job("team", root, uid, 1, 0o022, groups) for uid, groups in members]

    assert errors[:3] == [""] * 3
    assert str(root) in errors[3]
    assert {mode & 0o7 for mode, _ in _below(root).values()} == {0}


@only_root
@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_what_is_saved_is_the_users_alone(tier: str, place: Path, umask: int) -> None:
    root = _folder(place / "store", _USER, _USER, 0o755)

    assert _job(tier, root, umask=umask) == ""

    left = {path: mode & 0o077 for path, (mode, _) in _below(root).items()}
    assert len(left) > 2
    assert set(left.values()) == {0}, left


@only_root
@pytest.mark.rows(8)
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
    root = _folder(place / "store", owner, group, mode)

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
def test_a_nodes_name_that_others_can_write_to_is_refused(place: Path) -> None:
    assert _job("disk", place / "store") == ""
    (place / "store" / "node-token").chmod(0o666)

    error = _job("disk", place / "store")

    assert error.startswith("StorageError: other users can write to")
    assert "node-token" in error


@only_root
def test_a_root_below_a_sticky_folder_is_made_for_the_user_alone(place: Path, tier: str) -> None:
    # The folder itself may be a root, where others have put nothing.
    for root in (place / "new" / "store", place):
        assert _job(tier, root) == ""

    made = _below(place)
    assert {uid for _, uid in made.values()} == {_USER}
    assert [path for path, (mode, _) in made.items() if mode & stat.S_IWOTH] == []


@only_root
@pytest.mark.parametrize(
    ("tier", "name"),
    [("disk", "session-job"), ("disk", "session-job/0"), ("shared", "session-job")],
)
@pytest.mark.parametrize("way", ["of another user", "writable", "a link"])
def test_a_folder_below_the_root_is_checked_like_the_root(
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
    before = _below(place)

    error = _job(tier, place / "store")

    assert error.startswith("StorageError")
    assert str(folder) in error or str(folder.parent) in error
    assert _below(place) == before


@only_root
def test_a_link_of_another_user_in_the_place_of_the_root_is_refused(tier: str, place: Path) -> None:
    mine = _folder(place / "mine", _USER, _USER, 0o700)
    (place / "store").symlink_to(mine)
    os.chown(place / "store", _OTHER, _OTHER, follow_symlinks=False)

    error = _job(tier, place / "store")

    assert error.startswith("StorageError")
    assert _below(mine) == {}
    os.chown(place / "store", _USER, _USER, follow_symlinks=False)
    assert _job(tier, place / "store") == ""


def test_a_parent_that_all_may_write_to_is_logged(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place.chmod(0o777)

    with make_manager("disk", place / "store"):
        pass

    assert f"chmod +t {place}" in caplog.text


def test_events_are_not_written_where_others_can_replace_them(place: Path) -> None:
    (place / "events").mkdir()
    (place / "events").chmod(0o777)
    event = Event("save", start=0.0, rank=0, node="n", run="r", number=0)

    with pytest.raises(StorageError, match="not this user's alone"):
        JsonLines(place / "events").write(event)

    assert list((place / "events").iterdir()) == []


def _train(rank: int, world_size: int, root: Path) -> tuple[str, str]:
    """Run a loop as the user; the error that it ends with, and what it has logged."""
    os.umask(0)
    _become(_USER)
    log = io.StringIO()
    logging.getLogger("localckpt").addHandler(logging.StreamHandler(log))
    try:
        with Checkpointer({"n": (lambda: 1, print)}, local=root, session_id="s") as checkpointer:
            checkpointer.resume()
            checkpointer.step(0)
    except CheckpointingException as error:
        return f"{type(error).__name__}: {error}", log.getvalue()
    return "", log.getvalue()


@only_root
def test_what_a_loop_records_is_the_users_alone(place: Path) -> None:
    root = _folder(place / "store", _USER, _USER, 0o700)

    assert run_ranks(_train, 1, root, init_group=False)[0][0] == ""

    events = list((root / "events").rglob("*.jsonl"))
    assert events
    assert {mode & 0o077 for mode, _ in _below(root).values()} == {0}
    out, umask = place / "trace.json", os.umask(0)
    try:
        assert call("report", str(root), "--trace", str(out)).status == 0
    finally:
        os.umask(umask)
    assert out.stat().st_mode & 0o777 == 0o600


@only_root
@pytest.mark.parametrize(("name", "way"), [("events", "a link"), ("events/session-s", "a folder")])
def test_a_place_of_events_that_another_user_has_taken_is_not_written_to(
    place: Path, name: str, way: str
) -> None:
    root, mine = place / "store", place / "mine"
    mine.joinpath("session-s").mkdir(parents=True)
    for folder in (mine, mine / "session-s"):
        for number in range(1001):
            (folder / f"rank00000.{number:04d}.jsonl").touch()
    for path in (mine, *mine.rglob("*")):
        os.chown(path, _USER, _USER)
    root.mkdir()
    root.chmod(0o1777)
    taken = root / name
    taken.parent.mkdir(exist_ok=True)
    if way == "a folder":
        taken.mkdir()
    else:
        taken.symlink_to(mine)
    for path in {taken, root / "events"}:
        os.chown(path, _OTHER, _OTHER, follow_symlinks=False)
    before = _below(mine)

    ((error, log),) = run_ranks(_train, 1, root, init_group=False)

    assert _below(mine) == before
    assert str(root / "events") in error + log
    assert "choose another directory" in error + log or "ermission denied" in error + log


# Files.


@only_root
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["of another user", "writable", "readable", "linked"])
def test_a_recycled_file_that_is_not_this_users_alone_is_not_written_to(
    kind: str, node_dirs: Dirs, shm_roots: Dirs, way: str
) -> None:
    root, outside = (node_dirs if kind == "disk" else shm_roots)(2)
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
@pytest.mark.parametrize("name", [".lock", "node-token"])
def test_files_that_another_user_put_into_a_sticky_root_are_refused(place: Path, name: str) -> None:
    (place / name).write_text("0" * 32)
    (place / name).chmod(0o666)
    os.chown(place / name, _OTHER, _OTHER)

    error = _job("disk", place)

    assert error.startswith("StorageError")
    assert f"{place / name} is a file of user {_OTHER}" in error


@only_root
def test_the_lock_of_shared_storage_is_the_users_own(place: Path) -> None:
    assert _job("shared", place / "store") == ""
    lock = next((place / "store").rglob("*.lock"))
    os.chown(lock, _OTHER, _OTHER)
    lock.chmod(0o666)

    error = _job("shared", place / "store")

    assert f"{lock} is a file of user {_OTHER}" in error


def _hold(rank: int, world_size: int, uid: int, path: Path) -> None:
    _become(uid)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        announce("held", os.getpid())
        await_announced("over")


def test_at_the_deadline_of_a_lock_the_error_names_its_file_its_owner_and_who_holds_it(
    place: Path,
) -> None:
    uid = _OTHER if os.geteuid() == 0 else os.geteuid()
    lock = place / ".lock"
    lock.touch()
    lock.chmod(0o666)
    with start_ranks(_hold, 1, uid, lock, init_group=False) as group:
        pid = group.await_announced("held")

        with pytest.raises(StorageError, match=str(lock)) as raised, lock_store(place, 0.1):
            pass

        group.announce("over")
        group.join()
    assert f"the file is of user {os.geteuid()}" in str(raised.value)
    assert f"process {pid} of user {uid}" in str(raised.value)


# Links that lead out, and names.


@only_root
def test_the_note_of_the_owner_is_not_written_through_a_link(place: Path) -> None:
    assert _job("shared", place / "store") == ""
    precious, note = place / "precious", next((place / "store").rglob("*.owner"))
    precious.write_text("mine")
    os.chown(precious, _USER, _USER)
    note.unlink()
    note.symlink_to(precious)
    os.chown(note, _OTHER, _OTHER, follow_symlinks=False)

    error = _job("shared", place / "store")

    assert precious.read_text() == "mine"
    assert error == ""
    assert not note.is_symlink()


def test_a_link_in_the_place_of_a_checkpoint_is_removed_and_not_what_it_leads_to(
    place: Path,
) -> None:
    state = {"w": torch.ones(3)}
    with manager_on(place / "a", "job", keep_last=1) as manager:
        manager.save(state, 1)
    outside = next((place / "a" / "session-job").glob("iteration*"))
    before = sorted(path.name for path in outside.iterdir())
    with manager_on(place / "b", "job", keep_last=1) as manager:
        manager.save(state, 1)
        (inside,) = (place / "b" / "session-job").glob("iteration*")
        shutil.rmtree(inside)
        inside.symlink_to(outside)

        manager.save(state, 2)

    assert not inside.is_symlink()
    assert sorted(path.name for path in outside.iterdir()) == before


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


@only_root
def test_root_cleans_the_store_of_another_user(place: Path) -> None:
    assert _job("disk", place / "store") == ""
    (place / "store" / "session-job" / "0" / "half.dirty").write_bytes(b"half")

    answer = call("clean", place / "store")

    assert answer.status == 0
    assert "removed 1 file" in answer.out


_ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"


def test_no_command_prints_what_a_terminal_would_obey(place: Path) -> None:
    root, shared = place / "store", place / "shared"
    with make_manager("disk", root, f"run{_ESCAPES}") as manager:
        manager.save({f"key{_ESCAPES}": torch.ones(3)}, 1)
        folder = manager.store.folder
    (folder / f"bad{_ESCAPES}.safetensors").write_bytes(b"bad")
    (folder / f"bad{_ESCAPES}.safetensors.corrupt").write_bytes(b"bad")
    (folder / f"half{_ESCAPES}.dirty").write_bytes(b"half")
    with manager_on(shared, f"run{_ESCAPES}") as manager:
        manager.save({"w": torch.ones(3)}, 1)
    shard = next(folder.glob("0*.safetensors"))

    answers = [
        *(call(name, root) for name in ("ls", "verify", "explain", "clean", "report", "watch")),
        *(call(name, shared) for name in ("ls", "verify", "explain", "clean")),
        *(call("inspect", path) for path in (shard, *folder.glob("bad*"))),
        call("pin", shared, "9"),
        call("ls", place / f"none{_ESCAPES}"),
        call("clean", root, "--corrupt"),
    ]

    printed = "".join(answer.out + answer.err for answer in answers)
    assert "owned" in printed
    assert not [c for c in printed if not c.isprintable() and c != "\n"]
