"""``localckpt clean`` removes what dead processes left, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from filelock import FileLock

import localckpt
from localckpt.errors import StorageError
from localckpt.storage.catalog import Problem, quarantine
from localckpt.storage.owner import Running, owner_of
from tests.cli.commands import DEAD_OWNER, call, listed, only_shards, run
from tests.managers.jobs import make_manager, resume, state_of
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


def _files(root: Path) -> set[Path]:
    return {path for path in root.rglob("*") if path.is_file()}


def test_what_a_killed_process_left_is_removed_and_the_shards_stay(writer: str, root: Path) -> None:
    before = _files(root)
    with another_process(writer, root, rank=3) as process:
        made = _files(root) - before
        kill(process)
    dirty = {path: path.stat().st_size for path in made if path.name.endswith(".dirty")}

    would, answer = call("clean", root, "--dry-run", "--json").json(), run("clean", root)

    assert dirty
    found = {Path(file["path"]): file["nbytes"] for file in would["removed"]}
    assert {path: nbytes for path, nbytes in found.items() if root in path.parents} == dirty
    assert would["nbytes"] == sum(found.values())
    assert (answer.status, answer.err) == (0, "")
    assert {path.name for path in _files(root) - before} == {".owner"}
    for path in dirty:
        assert f"removed {path} (" in answer.out
    assert f"{root}: removed " in answer.out.splitlines()[-1]
    with make_manager(writer, root, "run") as manager:
        assert resume(manager, 0, 4) == "own node"


def test_what_a_live_process_is_using_is_left_alone(writer: str, root: Path) -> None:
    with another_process(writer, root, rank=3):
        before = _files(root)

        answers = [call("clean", root), call("clean", root, "--corrupt"), run("clean", root)]

        assert _files(root) == before
        assert any(path.name.endswith(".dirty") for path in before)
        assert all(answer.status == 0 for answer in answers)
        assert not any(str(path) in answer.out for path in before for answer in answers)


def test_what_was_quarantined_and_is_good_is_put_back(root: Path, writer: str) -> None:
    shard = only_shards(root)[0]
    quarantine(shard, Problem("damaged", "a class could not be loaded"))
    aside = Path(f"{shard}.corrupt")

    would = call("clean", root, "--corrupt", "--dry-run").out
    stayed = aside.exists()
    answer = call("clean", root, "--corrupt", "--json").json()

    assert stayed
    assert f"would put back {aside} (" in would
    assert answer["removed"] == answer["left"] == []
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

    assert [file["path"] for file in answer["removed"]] == [str(twice)]
    (back,) = (Path(file["path"]) for file in answer["put_back"])
    assert back.name.startswith(older.name.removesuffix(".safetensors"))
    assert back.name.endswith(".safetensors")
    assert older.read_bytes() == newer.read_bytes()
    assert {c["iteration"] for c in listed(store)["checkpoints"]} == {3, 4}


def test_recycled_files_go_only_when_their_owner_is_gone(tmp_path: Path) -> None:
    manager = make_manager("disk", tmp_path, "run", keep_last=1)
    for iteration in range(2):
        manager.save(state_of(0, iteration), iteration)

    call("clean", tmp_path)
    with_owner = listed(tmp_path)["leftovers"]
    (tmp_path / "session-run" / "0" / ".owner").write_text(DEAD_OWNER)
    of_the_dead = listed(tmp_path)["leftovers"]
    call("clean", tmp_path)
    without = listed(tmp_path)["leftovers"]

    manager.close()
    assert with_owner["recycled_live"]["files"] == of_the_dead["recycled_dead"]["files"] == 1
    assert with_owner["recycled_dead"]["files"] == of_the_dead["recycled_live"]["files"] == 0
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
    before = _files(tmp_path)
    with pytest.raises(StorageError, match="in use by process 1 of a job that is still running"):
        localckpt.LocalCheckpointManager(tmp_path, "run", timeout=0.2)

    answer = call("clean", tmp_path)
    leftovers = listed(tmp_path)["leftovers"]

    assert answer.status == 0
    assert _files(tmp_path) == before
    assert leftovers["dirty_live"]["files"] == 1
    assert leftovers["dirty_dead"]["files"] == 0
    contained.communicate("", timeout=PATIENCE_S)


def test_what_was_quarantined_and_cannot_be_judged_stays(store: Path) -> None:
    older, _ = only_shards(store)
    older.write_bytes(older.read_bytes().replace(b"localckpt-6", b"localckpt-9"))
    aside = older.rename(f"{older}.corrupt")

    answer = call("clean", store, "--corrupt", "--json").json()

    assert aside.exists()
    assert answer["removed"] == answer["put_back"] == []
    assert [file["path"] for file in answer["left"]] == [str(aside)]
