"""``localckpt clean`` removes what dead processes left, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

import localckpt
from localckpt.errors import StorageError
from localckpt.storage import staging
from localckpt.storage.catalog import Problem, find_staging, quarantine
from localckpt.storage.owner import Owner, Running, owner_of
from tests.cli.commands import DEAD_OWNER, call, listed, only_shards, run
from tests.managers.jobs import damage, make_manager, resume, state_of
from tests.storage.shards import HOLD, PATIENCE_S, ROOT, another_process, kill

Dirs = Callable[[int], list[Path]]

_SHARED_MEMORY = Path("/dev/shm")
_WRITERS = ["disk", "memory"]


@pytest.fixture(params=_WRITERS)
def writer(request: pytest.FixtureRequest) -> str:
    """Who writes; it decides what is left when it is killed."""
    return str(request.param)


@pytest.fixture
def root(writer: str, tmp_path: Path, shm_roots: Dirs) -> Path:
    """A store in which rank 0 of a session has saved iteration 4."""
    root = shm_roots(1)[0] if writer == "memory" else tmp_path / "store"
    with make_manager(writer, root, "run") as manager:
        manager.save(state_of(0, 4), 4)
    return root


def _files(root: Path, pid: int) -> set[Path]:
    """What lies in a store, and what a process has in shared memory."""
    staging = _SHARED_MEMORY.glob(f"localckpt-staging-*-{pid}-*")
    return {*(path for path in root.rglob("*") if path.is_file()), *staging}


def test_what_a_killed_process_left_is_removed_and_the_shards_stay(writer: str, root: Path) -> None:
    before = _files(root, 0)
    with another_process(writer, root, _SHARED_MEMORY, rank=3) as process:
        made = _files(root, process.pid) - before
        kill(process)
    # Whatever job starts on this machine meanwhile removes orphaned shared memory, too.
    dirty = {path: path.stat().st_size for path in made if path.name.endswith(".dirty")}

    would, answer = call("clean", root, "--dry-run", "--json").json(), run("clean", root)

    assert dirty
    found = {Path(file["path"]): file["nbytes"] for file in would["removed"]}
    assert {path: nbytes for path, nbytes in found.items() if root in path.parents} == dirty
    assert would["nbytes"] == sum(found.values())
    assert (answer.status, answer.err) == (0, "")
    assert {path.name for path in _files(root, process.pid) - before} == {".owner"}
    for path in dirty:
        assert f"removed {path} (" in answer.out
    assert f"{root}: removed " in answer.out.splitlines()[-1]
    with make_manager(writer, root, "run") as manager:
        assert resume(manager, 0, 4) == "own node"


def test_what_a_live_process_is_using_is_left_alone(writer: str, root: Path) -> None:
    with another_process(writer, root, _SHARED_MEMORY, rank=3) as process:
        before = _files(root, process.pid)

        answers = [call("clean", root), call("clean", root, "--corrupt"), run("clean", root)]

        assert _files(root, process.pid) == before
        assert any(path.name.endswith(".dirty") for path in before)
        assert all(answer.status == 0 for answer in answers)
        assert not any(str(path) in answer.out for path in before for answer in answers)


def test_a_dry_run_says_what_would_go_and_removes_nothing(root: Path) -> None:
    dirty = root / "session-run" / "0" / "a.safetensors.dirty"
    dirty.write_bytes(bytes(1000))

    # Nobody who only looks has to wait for a job that is starting.
    with FileLock(root / ".lock"):
        answer = call("clean", root, "--dry-run")

    assert dirty.exists()
    assert answer.status == 0
    assert f"would remove {dirty} (1.0 kB)\n" in answer.out


def test_what_was_quarantined_goes_only_when_it_is_asked_for(root: Path) -> None:
    corrupt = only_shards(root)[0]
    damage(corrupt)
    corrupt = corrupt.rename(f"{corrupt}.corrupt")

    without = call("clean", root)
    stayed = corrupt.exists()
    asked = call("clean", root, "--corrupt")

    assert stayed
    assert not corrupt.exists()
    assert (without.status, asked.status) == (0, 0)
    assert f"removed {corrupt} (" in asked.out


def _of_the_store(files: list[dict[str, Any]]) -> list[str]:
    """Their paths, but for staging memory, which dead processes of any job leave in one place."""
    return [file["path"] for file in files if file["kind"] != "staging"]


def test_what_was_quarantined_and_is_good_is_put_back(root: Path, writer: str) -> None:
    shard = only_shards(root)[0]
    quarantine(shard, Problem("damaged", "a class could not be loaded"))
    aside = Path(f"{shard}.corrupt")

    would = call("clean", root, "--corrupt", "--dry-run").out
    stayed = aside.exists()
    answer = call("clean", root, "--corrupt", "--json").json()

    assert stayed
    assert f"would put back {aside} (" in would
    assert _of_the_store(answer["removed"]) == answer["left"] == []
    assert [file["path"] for file in answer["put_back"]] == [str(shard)]
    assert not aside.exists()
    with make_manager(writer, root, "run") as manager:
        assert resume(manager, 0, 4) == "own node"


def test_what_was_quarantined_takes_no_other_name_and_goes_where_it_is_not_needed(
    store: Path,
) -> None:
    older, newer = only_shards(store)
    # The older one has lost its name to a newer one since, and the newer one is there twice.
    quarantine(older, Problem("damaged", "no reason"))
    shutil.copy(newer, older)
    twice = newer.with_name(f"{newer.name}.0123abcd.corrupt")
    shutil.copy(newer, twice)

    answer = call("clean", store, "--corrupt", "--json").json()

    assert _of_the_store(answer["removed"]) == [str(twice)]
    (back,) = (Path(file["path"]) for file in answer["put_back"])
    assert back.name.startswith(older.name.removesuffix(".safetensors"))
    assert back.name.endswith(".safetensors")
    assert older.read_bytes() == newer.read_bytes()
    assert {c["iteration"] for c in listed(store)["checkpoints"]} == {3, 4}


def test_what_was_quarantined_and_cannot_be_judged_stays(store: Path) -> None:
    older, _ = only_shards(store)
    older.write_bytes(older.read_bytes().replace(b"localckpt-6", b"localckpt-9"))
    aside = older.rename(f"{older}.corrupt")

    answer = call("clean", store, "--corrupt", "--json").json()

    assert aside.exists()
    assert (_of_the_store(answer["removed"]), answer["put_back"]) == ([], [])
    assert [file["path"] for file in answer["left"]] == [str(aside)]


def test_recycled_files_go_only_when_their_owner_is_gone(tmp_path: Path) -> None:
    manager = make_manager("disk", tmp_path, "run", keep_last=1)
    for iteration in range(2):
        manager.save(state_of(0, iteration), iteration)

    call("clean", tmp_path)
    with_owner = listed(tmp_path)["leftovers"]
    (tmp_path / "session-run" / "0" / ".owner").write_text(DEAD_OWNER)
    call("clean", tmp_path)
    without = listed(tmp_path)["leftovers"]

    manager.close()
    assert with_owner["recycled_live"]["files"] == 1
    assert without["recycled_live"]["files"] == without["recycled_dead"]["files"] == 0
    assert len(only_shards(tmp_path)) == 1


def test_a_store_that_stays_locked_is_one_line_and_nothing_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "session-run" / "0"
    folder.mkdir(parents=True)
    (folder / "a.safetensors.dirty").touch()

    with FileLock(tmp_path / ".lock"):
        answer = run("clean", tmp_path, "--timeout", "0.2")

    assert (answer.status, answer.out) == (2, "")
    assert answer.err.count("\n") == 1
    assert f"another process held {tmp_path / '.lock'} for 0.2 s" in answer.err
    assert (folder / "a.safetensors.dirty").exists()


@pytest.fixture
def contained(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that saves in a container of this node, which counts its own processes."""
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare")
    hidden = ["unshare", "--fork", "--pid", "--mount-proc", "--kill-child"]
    if subprocess.run([*hidden, "true"], capture_output=True, timeout=30, check=False).returncode:
        pytest.skip("no process namespaces here")
    arguments = ["disk", str(tmp_path), "run", "0", str(_SHARED_MEMORY)]
    process = subprocess.Popen(
        [*hidden, sys.executable, "-c", HOLD, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "holds\n"

    yield process

    kill(process)
    call("clean", tmp_path)


def test_a_job_in_a_container_of_this_node_is_seen_to_live(
    contained: subprocess.Popen[str], tmp_path: Path
) -> None:
    owner = owner_of(tmp_path / "session-run" / "0")
    assert owner is not None
    assert owner in Running()
    before = _files(tmp_path, 0)
    with pytest.raises(StorageError, match="in use by process 1 of a job that is still running"):
        localckpt.LocalCheckpointManager(tmp_path, "run", timeout=0.2)

    answer = call("clean", tmp_path)
    leftovers = listed(tmp_path)["leftovers"]

    assert answer.status == 0
    assert _files(tmp_path, 0) == before
    assert leftovers["dirty_live"]["files"] == 1
    assert leftovers["dirty_dead"]["files"] == 0
    contained.communicate("", timeout=PATIENCE_S)


def test_only_staging_files_of_dead_processes_of_this_user_count_as_orphans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "SHARED_MEMORY", tmp_path)
    me = Owner.me()
    dead = tmp_path / f"localckpt-staging-{Owner(me.boot, me.pid, 1)}.1.0"
    live = tmp_path / f"localckpt-staging-{me}.1.0"
    for path in (dead, live, tmp_path / "localckpt-staging-nonsense", tmp_path / "other"):
        path.touch()

    found = {file.path: file.is_live for file in find_staging()}

    assert found == {dead: False, live: True}


def _epochs(root: Path) -> dict[int, str]:
    """The name of the epoch of each iteration, as ``explain`` gives it."""
    (session,) = call("explain", root, "--json").json()["sessions"]
    return {n: branch["epoch"] for branch in session["lineages"] for n in branch["iterations"]}


def test_the_checkpoints_of_an_epoch_are_removed_when_it_is_named(tmp_path: Path) -> None:
    for iteration in (20, 3):
        # The second does not ask what there is: what is ahead of it stays.
        with make_manager("disk", tmp_path, "run", keep_last=1) as manager:
            manager.save(state_of(0, iteration), iteration)
    ahead = _epochs(tmp_path)[20]

    would = call("clean", tmp_path, "--epoch", ahead, "--dry-run").out
    assert set(_epochs(tmp_path)) == {3, 20}
    answer = call("clean", tmp_path, "--epoch", ahead, "--epoch", ahead, "--json").json()

    # Other tests that run now may leave staging buffers in the node's shared memory.
    assert would.count(f"would remove {tmp_path}/") == 1
    removed = [file for file in answer["removed"] if file["kind"] != "staging"]
    assert [file["kind"] for file in removed] == ["shard"]
    assert set(_epochs(tmp_path)) == {3}
    with make_manager("disk", tmp_path, "run") as manager:
        assert resume(manager, 0, 3) == "own node"


def test_no_epoch_is_removed_that_is_not_there_or_that_a_job_is_in(tmp_path: Path) -> None:
    with make_manager("disk", tmp_path, "run") as manager:
        manager.save(state_of(0, 20), 20)
    with make_manager("disk", tmp_path, "run") as manager:
        assert resume(manager, 0, 20) == "own node"
        before = _epochs(tmp_path)[20]
        # It may still want what it has loaded, and has not said that it goes on.
        assert call("clean", tmp_path, "--epoch", before).status == 2
        manager.save(state_of(0, 21), 21)
        epochs = _epochs(tmp_path)

        answers = [
            call("clean", tmp_path, "--epoch", name)
            for name in (epochs[21], "9-00000000", "21", f"{epochs[20]}0")
        ]
        removed = call("clean", tmp_path, "--epoch", epochs[20])

        assert [answer.status for answer in answers] == [2] * 4
        assert "end it first" in answers[0].err
        assert all("has no checkpoint of an epoch" in answer.err for answer in answers[1:])
        assert all("Nothing was removed" in answer.err for answer in answers)
        assert removed.status == 0
        assert set(_epochs(tmp_path)) == {21}
        manager.save(state_of(0, 22), 22)
        assert resume(manager, 0, 22) == "own node"
