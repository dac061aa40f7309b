"""``localckpt clean`` removes what dead processes left; no command disturbs a job that lives."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from filelock import FileLock

import localckpt
from localckpt.errors import StorageError
from localckpt.storage.catalog import Problem, quarantine
from localckpt.storage.owner import Running, owner_of
from tests.cli.commands import DEAD_OWNER, call, listed, only_shards, run
from tests.managers.jobs import damage, in_job, make_manager, resume, save, state_of
from tests.ranks import announce, start_ranks
from tests.storage.shards import PATIENCE_S, another_process, kill


def _files(root: Path) -> set[Path]:
    return {path for path in root.rglob("*") if path.is_file()}


def test_what_a_process_uses_stays_until_it_is_killed_and_the_shards_stay_even_then(
    kind: str, root: Path
) -> None:
    with make_manager(kind, root, "run") as manager:
        manager.save(state_of(0, 4), 4)
    before = _files(root)
    with another_process(kind, root, rank=3) as process:
        used = _files(root)
        alive = [call("clean", root), call("clean", root, "--corrupt"), run("clean", root)]
        assert _files(root) == used
        kill(process)
    dirty = {p: p.stat().st_size for p in used - before if p.name.endswith(".dirty")}

    would, answer = call("clean", root, "--dry-run", "--json").json(), run("clean", root)

    assert all(told.status == 0 for told in alive)
    assert not any(str(path) in told.out for path in used for told in alive)
    assert dirty
    found = {Path(file["path"]): file["nbytes"] for file in would["removed"]}
    assert {path: nbytes for path, nbytes in found.items() if root in path.parents} == dirty
    assert would["nbytes"] == sum(found.values())
    assert (answer.status, answer.err) == (0, "")
    assert {path.name for path in _files(root) - before} == {".owner"}
    for path in dirty:
        assert f"removed {path} (" in answer.out
    assert f"{root}: removed " in answer.out.splitlines()[-1]
    with make_manager(kind, root, "run") as manager:
        assert resume(manager, 0, 4) == "own node"


def test_what_was_quarantined_is_put_back_if_it_is_good_and_stays_if_it_cannot_be_judged(
    store: Path,
) -> None:
    older, newer = only_shards(store)
    older.write_bytes(older.read_bytes().replace(b"localckpt-6", b"localckpt-9"))
    unknown = older.rename(f"{older}.corrupt")
    bad = Path(shutil.copy(newer, f"{newer}.0123abcd.corrupt"))
    damage(bad, 0.9)
    quarantine(newer, Problem("damaged", "a class could not be loaded"))
    aside = Path(f"{newer}.corrupt")

    would = call("clean", store, "--corrupt", "--dry-run").out
    stayed = aside.exists()
    answer = call("clean", store, "--corrupt", "--json").json()

    assert stayed
    assert f"would put back {aside} (" in would
    assert [file["path"] for file in answer["removed"]] == [str(bad)]
    assert [file["path"] for file in answer["put_back"]] == [str(newer)]
    assert [file["path"] for file in answer["left"]] == [str(unknown)]
    assert unknown.exists()
    assert not aside.exists()
    with make_manager("disk", store, "run") as manager:
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
    with another_process("disk", tmp_path, within=hidden) as process:
        yield process

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


Dirs = Callable[[int], list[Path]]

_NBYTES = 3 << 20


def _save_until_told(rank: int, world_size: int, kind: str, stop: Path) -> int:
    with in_job(kind=kind, keep_last=1) as (manager, queue):
        iteration, told = -1, torch.zeros(1)
        while not told.item():
            iteration += 1
            save(manager, state_of(rank, iteration, _NBYTES), iteration, queue)
            if iteration == 0:
                announce(f"saves {rank}")
            # All ranks save equally often.
            told.fill_(stop.exists())
            dist.broadcast(told, 0)
        manager.save(state_of(rank, iteration + 1), iteration + 1)
        assert resume(manager, rank, iteration + 1) == "own node"
    return iteration


def test_a_job_that_saves_all_the_time_and_the_commands_do_not_disturb_each_other(
    kind: str, node_dirs: Dirs, shm_roots: Dirs, tmp_path: Path
) -> None:
    nodes = (node_dirs if kind == "disk" else shm_roots)(2)
    stop = tmp_path / "stop"
    commands = [["clean"], ["ls"], ["verify"], ["clean", "--corrupt"]]
    answers = []
    with start_ranks(_save_until_told, 2, kind, stop, store_per_node=nodes) as group:
        for rank in range(2):
            group.await_announced(f"saves {rank}")
        for _ in range(8):
            answers += [call(*command, node) for command in commands for node in nodes]
            answers.append(call("explain", *nodes))
        by_itself = [run(command, nodes[0]) for command in ("verify", "clean")]
        live = call("ls", nodes[0], "--json").json()["sessions"][0]
        stop.touch()
        saved = group.join()

    assert {(answer.status, answer.err) for answer in [*answers, *by_itself]} == {(0, "")}
    assert not [a.out for a in answers if "not counted" in a.out or "Not counted" in a.out]
    assert not [a.out for a in answers for node in nodes if f"removed {node}/" in a.out]
    assert live["checkpoints"]
    assert min(saved) > 1
