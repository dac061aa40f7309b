"""The commands understand roots on shared storage, alone and beside nodes."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from localckpt import Best, Retention
from localckpt.global_tier.folders import RECORD_NAME
from tests.cli.commands import Answer, call
from tests.global_tier.models import manager_on
from tests.managers.jobs import damage, make_manager, state_of


def _write(root: Path, session: str, iterations: range) -> None:
    with manager_on(root, session) as manager:
        for iteration in iterations:
            state = {"w": torch.full((150_000,), float(iteration)), "v": torch.ones(150_000)}
            manager.save(state, iteration, is_async=False)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root on shared storage with iterations 100 and 101."""
    _write(tmp_path / "shared", "run", range(100, 102))
    return tmp_path / "shared"


def _checkpoint(root: Path, iteration: int) -> Path:
    (folder,) = root.rglob(f"iteration_{iteration:08d}.*")
    return folder


def _explained(*directories: Path) -> Any:
    (told,) = call("explain", *directories, "--json").json()["sessions"]
    return told


def test_beside_nodes_it_is_no_node_and_which_has_the_higher_iteration_is_said(
    root: Path, tmp_path: Path
) -> None:
    for iteration, said in (
        (70, "The higher iteration is that on shared storage."),
        (101, "Both are the same iteration."),
        (102, "The higher iteration is that on the nodes."),
    ):
        with make_manager("disk", tmp_path / "node", "run") as manager:
            manager.save(state_of(0, iteration), iteration)

        both = tmp_path / "node", root
        answer, told = call("explain", *both), _explained(*both)

        assert answer.status == 0
        assert told["nodes"] == [str(tmp_path / "node")]
        assert told["loads"]["iteration"] == iteration
        assert f"A restart loads iteration {iteration}" in answer.out
        assert re.search(rf"Iteration {iteration} was saved \d+ (s|min) ago\.", answer.out)
        assert "From shared storage a restart loads iteration 101" in answer.out
        assert said in answer.out


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 8)


_DAMAGES: dict[str, tuple[str, Callable[[Path], object], bool]] = {
    "a bit of a data file": ("__0_0.distcp", damage, True),
    "a data file that is cut": ("__0_0.distcp", _cut, False),
    "a data file that is gone": ("__0_1.distcp", Path.unlink, False),
    "a bit of the metadata": (".metadata", damage, True),
    "no metadata": (".metadata", Path.unlink, True),
    "a bit of the record": (RECORD_NAME, damage, False),
}


@pytest.mark.fault("flipped-bit")
@pytest.mark.parametrize("what", _DAMAGES)
def test_verify_finds_every_damage_and_explain_what_a_header_tells(root: Path, what: str) -> None:
    name, act, is_hidden = _DAMAGES[what]
    before = call("verify", root, "--json")
    act(_checkpoint(root, 101) / name)

    answer, told = call("verify", root), call("verify", root, "--json")
    explained = _explained(root)["shared"][0]

    assert (before.status, before.json()["verified"]) == (0, 6)
    assert (answer.status, told.status) == (1, 1)
    (bad,) = told.json()["bad"]
    place = _checkpoint(root, 101)
    assert bad["path"] in (str(place / name), str(place))
    assert f"bad: {bad['path']}: {bad['why']}" in answer.out
    assert explained["loads"]["iteration"] == (101 if is_hidden else 100)
    assert len(explained["uncounted"]) == (not is_hidden)


def _kept(answer: Answer) -> dict[str, str]:
    """What the last column of the table says, by iteration."""
    rows = re.findall(r"^ +(\d+) +\d+ .* (?:s|min) +(\S.*)$", answer.out, re.MULTILINE)
    return dict(rows)


def test_what_keeps_each_checkpoint_is_said(tmp_path: Path) -> None:
    retention = Retention(last=1, every=100, best=Best("loss", count=1))
    with manager_on(tmp_path, "run", retention=retention) as manager:
        for iteration, loss in ((100, 3.0), (150, 0.25), (180, float("nan"))):
            state = {"w": torch.full((9,), float(iteration))}
            manager.save(state, iteration, metrics={"loss": loss})

    pinned = call("pin", tmp_path, "100")
    listed, explained = call("ls", tmp_path), call("explain", tmp_path)
    told = _explained(tmp_path)["shared"][0]

    assert (pinned.status, pinned.out) == (0, f"pinned {_checkpoint(tmp_path, 100)}\n")
    assert _kept(listed) == {
        "180": "newest, last 1, every 100",
        "150": "best loss 0.25",
        "100": "pinned, every 100",
    }
    assert _kept(explained) == _kept(listed)
    best = {"metric": "loss", "mode": "min", "count": 1}
    assert told["retention"] == {"last": 1, "every": 100, "best": best}
    assert [(row["kept"], row["pinned"], row["metrics"]) for row in told["checkpoints"]] == [
        (["newest", "last", "every"], False, {"loss": "nan"}),
        (["best"], False, {"loss": 0.25}),
        (["pinned", "every"], True, {"loss": 3.0}),
    ]


def test_a_pin_of_the_command_line_holds_in_a_job_until_it_is_taken_away(tmp_path: Path) -> None:
    with manager_on(tmp_path, "run", keep_last=1) as manager:
        for iteration in (1, 2, 3):
            manager.save({"w": torch.ones(9)}, iteration)
            if iteration == 1:
                # While the job runs, which holds the lock.
                assert call("pin", tmp_path, "1").status == 0
        listed = _kept(call("ls", tmp_path))
        unpinned, again = call("unpin", tmp_path, "1"), call("unpin", tmp_path, "1")
        late = _kept(call("ls", tmp_path))
        manager.save({"w": torch.ones(9)}, 4)
        gone = call("pin", tmp_path, "1")
        to_programs = [
            call(command, tmp_path, "4", "--json").json() for command in ("pin", "unpin", "unpin")
        ]

    path = str(_checkpoint(tmp_path / "session-run", 4))
    assert to_programs == [{"pinned": [path]}, {"unpinned": [path]}, {"unpinned": []}]
    assert listed == {"3": "newest, last 1", "1": "pinned"}
    assert (unpinned.status, again.out) == (0, "iteration 1 is not pinned\n")
    assert late == {"3": "newest, last 1", "1": "until the next save"}
    assert gone.status == 2
    assert f"{tmp_path} has no checkpoint of iteration 1: `localckpt ls {tmp_path}`" in gone.err


def test_what_cannot_be_pinned_is_refused(tmp_path: Path) -> None:
    for session in ("one", "other"):
        _write(tmp_path / "shared", session, range(7, 8))
    (_checkpoint(tmp_path / "shared" / "session-one", 7) / "__0_0.distcp").unlink()
    with make_manager("disk", tmp_path / "node", "run") as manager:
        manager.save(state_of(0, 7), 7)

    of_node = call("pin", tmp_path / "node", "7")
    of_two = call("pin", tmp_path / "shared", "7")
    damaged = call("pin", tmp_path / "shared", "7", "--session", "one")
    good = call("pin", tmp_path / "shared", "7", "--session", "other")
    negative = call("pin", tmp_path / "shared", "-1")

    assert [of_node.status, of_two.status, damaged.status, negative.status] == [2, 2, 2, 2]
    assert "is no root on shared storage" in of_node.err
    assert "2 sessions have iteration 7 ('one', 'other'): give --session" in of_two.err
    assert "__0_0.distcp is gone" in damaged.err
    assert good.status == 0


@pytest.mark.parametrize("session", ["", "run"], ids=["no session", "session"])
def test_its_checkpoints_are_listed_with_sizes_and_ages(session: str, tmp_path: Path) -> None:
    root = tmp_path / "shared"
    _write(root, session, range(100, 102))
    old = time.time() - 2 * 86_400 - 60
    os.utime(_checkpoint(root, 100) / RECORD_NAME, (old, old))
    (root / "session-x").mkdir()
    (_checkpoint(root, 100).parent / ".iteration_00000102.0001.aa.partial").mkdir()

    answer, told = call("ls", root), call("ls", root, "--json").json()

    assert (answer.status, answer.err) == (0, "")
    assert answer.out.startswith(f"{root}: shared storage\n\nsession {session!r}\n")
    assert re.search(r"^ +101 +1 +1 +2 +1\.2 MB +\d+ (s|min)$", answer.out, re.MULTILINE)
    assert re.search(r"^ +100 +1 +1 +2 +1\.2 MB +2 d$", answer.out, re.MULTILINE)
    assert "1 unfinished save: under way, or cut off" in answer.out
    assert told["shared"] is True
    (only,) = told["sessions"]
    assert only["session"] == session
    assert [row["iteration"] for row in only["checkpoints"]] == [101, 100]
    assert only["loads"] == only["checkpoints"][0]
    assert only["checkpoints"][1]["saved_at"] == pytest.approx(old)
    assert only["leftovers"] == 1


def test_explain_of_one_session_leaves_the_others_out(tmp_path: Path) -> None:
    _write(tmp_path, "one", range(5, 6))
    _write(tmp_path, "other", range(7, 8))
    shutil.rmtree(_checkpoint(tmp_path, 7))

    one = call("explain", tmp_path, "--session", "one")
    other = call("explain", tmp_path, "--session", "other")
    none = call("explain", tmp_path, "--session", "nobody's")

    assert [one.status, other.status, none.status] == [0, 1, 1]
    assert "'other'" not in one.out
    assert "no checkpoint" in other.out
    assert none.out == 'No session "nobody\'s".\n'


def test_clean_refuses_it_and_a_single_checkpoint_names_its_root(root: Path) -> None:
    cleaned = call("clean", root)
    single = [call(command, _checkpoint(root, 100)) for command in ("ls", "verify", "explain")]

    assert cleaned.status == 2
    assert f"{root} is on shared storage" in cleaned.err
    for answer in single:
        assert answer.status == 2
        assert "is one checkpoint of a root on shared storage: give" in answer.err
