"""What ``localckpt ls`` tells of a node, and what damage ``localckpt verify`` finds."""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from localckpt.storage.catalog import UncountedFile, find_sessions
from tests.cli.commands import DEAD_OWNER, call, listed, only_shards, run
from tests.faults.images import flip
from tests.managers.jobs import damage, make_manager, reads_fail, state_of

Dirs = Callable[[int], list[Path]]


def test_checkpoints_come_newest_first_with_all_that_is_known_of_them(
    kind: str, root: Path
) -> None:
    with make_manager(kind, root, "run", keep_last=2) as manager:
        for iteration in range(1, 4):
            manager.save(state_of(0, iteration), iteration)
        stored = [each.record.identity for each in manager.store.list_stored()]
    sizes = [path.stat().st_size for path in only_shards(root)]

    told = listed(root)["checkpoints"]

    assert [row["iteration"] for row in told] == [3, 2]
    assert [row["nbytes"] for row in told] == sizes[::-1]
    named = {(row["iteration"], row["epoch"], row["sequence"]) for row in told}
    assert named == {(identity.iteration, *identity.generation) for identity in stored}
    for row in told:
        assert (row["world_size"], row["ranks"], row["copies"]) == (1, [0], 1)
        assert row["complete_here"] is True


def test_sessions_are_told_apart_whatever_their_names(tmp_path: Path) -> None:
    names = ["", "run", "a/b [red]c[/red] \N{SNOWMAN}", "..", "\x1b[31m\n"]
    for name in names:
        with make_manager("disk", tmp_path, name) as manager:
            manager.save(state_of(0, 1), 1)

    told = call("ls", tmp_path, "--json").json()
    answer = run("ls", tmp_path, env={"PYTHONIOENCODING": "ascii"})

    assert {session["session"] for session in told["sessions"]} == set(names)
    assert all(len(session["checkpoints"]) == 1 for session in told["sessions"])
    assert answer.status == 0
    assert "\x1b" not in answer.out
    assert "[red]c[/red]" in answer.out


@pytest.mark.fault("flipped-bit")
def test_a_bad_header_is_told_and_the_file_left_where_it_is(store: Path) -> None:
    bad = only_shards(store)[-1]
    damage(bad, 0.01)

    def everything() -> dict[Path, tuple[int, int]]:
        return {p: (p.lstat().st_ino, p.lstat().st_ctime_ns) for p in [store, *store.rglob("*")]}

    before, told, answer = everything(), listed(store), call("ls", store)

    assert [row["iteration"] for row in told["checkpoints"]] == [3]
    assert [(file["path"], file["fault"]) for file in told["uncounted"]] == [(str(bad), "damaged")]
    assert str(bad) in answer.out
    assert answer.status == 0
    assert everything() == before
    shutil.rmtree(store / "session-run")
    assert "No job has used it yet." in call("ls", store).out


@pytest.mark.fault("hostile-file")
def test_links_in_a_store_are_not_followed(store: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    shutil.move(store / "session-run", outside)
    (store / "session-run").symlink_to(outside)
    (store / "session-other" / "0").mkdir(parents=True)
    (store / "session-other" / "0" / "x.safetensors").symlink_to(only_shards(outside)[0])

    told = call("ls", store, "--json").json()["sessions"]

    assert [(s["session"], s["checkpoints"], s["uncounted"]) for s in told] == [("other", [], [])]


@pytest.mark.usefixtures("as_root")
@pytest.mark.fault("unusable-store")
def test_what_another_user_cannot_read_is_one_line_and_status_2_where_it_matters(
    shm_roots: Dirs,
) -> None:
    (store,) = shm_roots(1)
    with make_manager("memory", store, "run") as manager:
        manager.save(state_of(0, 1), 1)
    owner = store / "session-run" / "0" / ".owner"
    owner.write_text(DEAD_OWNER)

    for unreadable in (store, owner):
        for command in (["ls", store], ["clean", store, "--dry-run"]):
            answer = run(*command, user=54_321)

            assert (answer.status, answer.out) == (2, "")
            assert answer.err == f"localckpt: {unreadable} cannot be read: Permission denied\n"
        for path in [store, *store.rglob("*")]:
            path.chmod(0o755)
        owner.chmod(0o600)
    assert run("verify", store, user=54_321).status == 0


@pytest.mark.parametrize("command", ["ls", "verify", "explain", "clean"])
def test_what_is_no_store_or_not_there_is_one_line_and_status_2(command: str, store: Path) -> None:
    (store.parent / "file").write_text("no store")
    empty, nothing = store.parent / "empty", store.parent / "nothing"
    empty.mkdir()
    paths = (empty, nothing, store.parent / "file", store / "session-run", store / "session-run/0")

    answers = {path: call(command, path) for path in paths}

    for path, answer in answers.items():
        assert (answer.status, answer.out, answer.err.count("\n")) == (2, "", 1)
        assert answer.err.startswith("localckpt: ")
        assert str(path) in answer.err
    assert f"give {store}\n" in answers[store / "session-run"].err
    assert f"give {store}\n" in answers[store / "session-run/0"].err
    assert list(empty.iterdir()) == []
    for answer in (answers[nothing], call("inspect", nothing)):
        assert (answer.status, answer.out, answer.err.count("\n")) == (2, "", 1)
        assert f"{nothing} cannot be read: No such file" in answer.err


@pytest.mark.usefixtures("as_root")
def test_without_a_directory_it_is_the_users_store_in_memory() -> None:
    user = random.SystemRandom().randrange(1_000_000, 2_000_000_000)
    root = Path(f"/dev/shm/localckpt-{user}")
    nothing = run("ls", user=user)
    try:
        with make_manager("memory", root, "run") as manager:
            manager.save(state_of(0, 5), 5)
        for path in [root, *root.rglob("*")]:
            os.chown(path, user, -1)

        answers = [run(command, user=user) for command in ("ls", "explain")]
    finally:
        shutil.rmtree(root, ignore_errors=True)

    assert nothing.status == 2
    assert str(root) in nothing.err
    assert [answer.status for answer in answers] == [0, 0]
    assert all(str(root) in answer.out for answer in answers)


def test_wrong_usage_is_status_2_without_a_traceback() -> None:
    for line in (
        *("nonsense", "ls --nonsense", "inspect", "survive --nodes 64"),
        "survive --nodes 0 --ranks-per-node 8",
        "survive --nodes 64 --ranks-per-node 0",
        "survive --nodes many --ranks-per-node 8",
    ):
        answer = call(*line.split())

        assert answer.status == 2
        assert "Usage: " in answer.err
        assert "Traceback" not in answer.err


@pytest.mark.fault("flipped-bit")
def test_how_much_is_good_is_said_and_a_flipped_bit_is_found_wherever_it_is(
    store: Path, long_form: bool, record_property: pytest.RecordProperty
) -> None:
    good, path = only_shards(store)
    content = path.read_bytes()
    nbytes = good.stat().st_size + len(content)

    answer, told = run("verify", store), call("verify", store, "--json").json()

    assert (answer.status, answer.err) == (0, "")
    assert answer.out == f"{store}: 2 good ({nbytes / 1000:.1f} kB), 0 bad\n"
    assert (told["verified"], told["nbytes"], told["bad"]) == (2, nbytes, [])
    positions = [*range(0, len(content), 37 if long_form else 997), len(content) - 1]
    for position in positions:
        path.write_bytes(flip(content, position, position % 8))

        answer = call("verify", store)

        assert answer.status == 1, position
        lines = answer.out.splitlines()
        assert len(lines) == 2
        assert lines[0].startswith(f"bad: {path}: ")
        assert f"1 good ({good.stat().st_size / 1000:.1f} kB), 1 bad" in lines[1]
    record_property("cases", len(positions))


@pytest.mark.fault("refused-io")
@pytest.mark.usefixtures("can_attach")
def test_a_file_that_the_disk_refuses_to_read_is_not_called_good(store: Path) -> None:
    path = only_shards(store)[0]

    with reads_fail(path):
        verified, listed = call("verify", store), call("ls", store)

    assert verified.status == 2
    assert f"not readable: {path}: Input/output error\n" in verified.out
    assert "1 good" in verified.out
    assert listed.status == 0
    assert f"not counted: {path}: Input/output error\n" in listed.out


@pytest.mark.parametrize("is_retired", [True, False], ids=["retired", "damaged"])
def test_a_file_that_is_overwritten_while_it_is_read_is_bad_only_if_it_kept_its_name(
    is_retired: bool, tmp_path: Path
) -> None:
    with make_manager("disk", tmp_path, "run") as manager:
        # Several threads read ahead of what is overwritten.
        manager.save({"large": torch.arange(8_000_000)}, 1)
    (session,) = find_sessions(tmp_path)
    (shard,) = session.shards()[0]
    reads: list[int] = []
    is_first = threading.Lock()

    def overwrite(nbytes: int) -> None:
        reads.append(nbytes)
        if is_first.acquire(blocking=False):
            path = shard.path
            if is_retired:
                path = shard.path.rename(shard.path.with_suffix(".dirty"))
            with open(path, "r+b") as file:
                file.seek(63_000_000)
                file.write(bytes(100))

    outcome = session.verify(shard, overwrite)

    assert sum(reads) > 63_000_000
    assert outcome is None if is_retired else isinstance(outcome, UncountedFile)
    # Nor is one that the job let go before it was read.
    shard.path.unlink(missing_ok=True)
    assert session.verify(shard, lambda _: None) is None
