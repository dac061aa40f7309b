"""What ``localckpt ls`` tells of a node, and how it tells it."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.commands import DEAD_OWNER, call, listed, only_shards, run
from tests.managers.jobs import damage, make_manager, state_of

Dirs = Callable[[int], list[Path]]


def _everything(root: Path) -> dict[Path, tuple[int, int]]:
    """All names of a store, each with its inode and time of change."""
    return {p: (p.lstat().st_ino, p.lstat().st_ctime_ns) for p in [root, *root.rglob("*")]}


def test_checkpoints_come_newest_first_with_all_that_is_known_of_them(
    kind: str, root: Path
) -> None:
    with make_manager(kind, root, "run", keep_last=2) as manager:
        for iteration in range(1, 4):
            manager.save(state_of(0, iteration), iteration)
        epoch, sequence = max(
            stored.record.identity.generation for stored in manager.store.list_stored()
        )
    sizes = [path.stat().st_size for path in only_shards(root)]

    told = listed(root)["checkpoints"]

    assert [row["iteration"] for row in told] == [3, 2]
    assert [row["nbytes"] for row in told] == sizes[::-1]
    assert {row["epoch"] for row in told} == {epoch}
    assert sequence in {row["sequence"] for row in told}
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
    before = _everything(store)

    told = listed(store)
    answer = call("ls", store)

    assert [row["iteration"] for row in told["checkpoints"]] == [3]
    assert [(file["path"], file["fault"]) for file in told["uncounted"]] == [(str(bad), "damaged")]
    assert str(bad) in answer.out
    assert answer.status == 0
    assert _everything(store) == before


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


@pytest.mark.parametrize("command", ["ls", "verify", "explain", "clean", "inspect"])
def test_what_is_not_there_is_one_line_and_status_2(command: str, tmp_path: Path) -> None:
    answer = call(command, tmp_path / "nothing")

    assert answer.status == 2
    assert answer.out == ""
    assert answer.err.count("\n") == 1
    assert answer.err.startswith("localckpt: ")
    assert f"{tmp_path / 'nothing'} cannot be read: No such file" in answer.err


@pytest.mark.parametrize("command", ["ls", "verify", "explain", "clean"])
def test_what_is_no_store_is_one_line_and_status_2(command: str, store: Path) -> None:
    (store.parent / "file").write_text("no store")
    empty = store.parent / "empty"
    empty.mkdir()

    answers = {
        path: call(command, path)
        for path in (empty, store.parent / "file", store / "session-run", store / "session-run/0")
    }

    for path, answer in answers.items():
        assert (answer.status, answer.out, answer.err.count("\n")) == (2, "", 1)
        assert str(path) in answer.err
    assert f"give {store}\n" in answers[store / "session-run"].err
    assert f"give {store}\n" in answers[store / "session-run/0"].err
    assert list(empty.iterdir()) == []


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


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "ls --nonsense",
        "inspect",
        "survive --nodes 64",
        "survive --nodes 0 --ranks-per-node 8",
        "survive --nodes 64 --ranks-per-node 0",
        "survive --nodes many --ranks-per-node 8",
    ],
)
def test_wrong_usage_is_status_2_without_a_traceback(line: str) -> None:
    answer = call(*line.split())

    assert answer.status == 2
    assert "Usage: " in answer.err
    assert "Traceback" not in answer.err
