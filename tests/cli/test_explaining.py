"""``localckpt explain`` says what a restart does, from the stores of all nodes."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import call, only_shards, run
from tests.managers.jobs import damage, make_manager, state_of
from tests.ranks import run_ranks


def _of(node: Path, iteration: int, rank: int) -> Path:
    (path,) = node.rglob(f"*{iteration}.{rank}.*.safetensors")
    return path


def _explained(nodes: Sequence[Path], *options: str) -> dict[str, Any]:
    (told,) = call("explain", *nodes, *options, "--json").json()["sessions"]
    assert isinstance(told, dict)
    return told


def test_a_whole_job_loads_its_newest_and_survives_any_one_node(nodes: list[Path]) -> None:
    answer, told = run("explain", *nodes), _explained(nodes)

    a, b, c, d = map(str, nodes)
    assert (answer.status, answer.err) == (0, "")
    assert "A restart loads iteration 20 (generation 1.2, 4 ranks)." in answer.out
    assert "Iteration 20 survives the loss of any one node." in answer.out
    assert told["loads"]["iteration"] == 20
    assert told["breaking"] == [[a, b], [c, d]]
    assert told["survives_any"] == 1
    assert [row["complete"] for row in told["checkpoints"]] == [True, True]


@pytest.mark.fault("lost-nodes")
def test_a_newer_checkpoint_is_rejected_for_reasons_that_name_ranks_and_nodes(
    nodes: list[Path],
) -> None:
    for node in nodes[2:]:
        _of(node, 20, 2).unlink()
    _of(nodes[2], 20, 3).unlink()
    _of(nodes[3], 20, 3).write_bytes(b"torn")

    told, answer = _explained(nodes), call("explain", *nodes)

    why = "1 copy, not a shard image: it has 4 bytes"
    assert told["loads"]["iteration"] == 10
    assert told["checkpoints"][0]["lacks"] == [
        {"ranks": [2], "why": "on no node", "nodes": []},
        {"ranks": [3], "why": why, "nodes": [str(nodes[3])]},
    ]
    assert f"  rank 2: on no node\n  rank 3: {why} (D)\n" in answer.out
    assert "A restart loads iteration 10" in answer.out


@pytest.mark.fault("bad-copies")
def test_what_was_quarantined_is_told_with_the_shard_that_its_name_speaks_of(
    nodes: list[Path],
) -> None:
    for node in nodes[:2]:
        path = _of(node, 20, 0)
        path.rename(f"{path}.corrupt")

    told = _explained(nodes)

    assert told["checkpoints"][0]["lacks"] == [
        {
            "ranks": [0],
            "why": "2 copies, it was quarantined as damaged",
            "nodes": [str(node) for node in nodes[:2]],
        }
    ]
    assert told["checkpoints"][0]["damaged"][0] == [str(node) for node in nodes[:2]]


@pytest.mark.fault("bad-copies")
def test_a_node_with_nothing_but_damaged_files_tells_of_the_checkpoints_they_were(
    nodes: list[Path],
) -> None:
    for path in only_shards(nodes[3]):
        path.write_bytes(b"torn")

    told = _explained(nodes[3:])

    assert told["loads"] is told["newest_complete"] is told["refusal"] is None
    assert [(row["iteration"], row["by_name"]) for row in told["checkpoints"]] == [
        (20, True),
        (10, True),
    ]
    assert told["checkpoints"][0]["lacks"][0]["ranks"] == [0, 1]


@pytest.mark.fault("flipped-bit")
def test_damage_behind_a_header_that_is_intact_is_not_called_damage_of_the_header(
    nodes: list[Path],
) -> None:
    path = _of(nodes[3], 20, 3)
    header_stop = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    damage(path, (header_stop + 100) / path.stat().st_size)
    _of(nodes[2], 20, 3).unlink()

    told = _explained(nodes)

    (lack,) = told["checkpoints"][0]["lacks"]
    assert lack["why"] == "1 copy, the 1048576 bytes from 0 on do not match their digest"
    assert told["bad"] == {
        str(nodes[3]): [f"{path.name}: the 1048576 bytes from 0 on do not match their digest"]
    }


@pytest.mark.fault("lost-nodes")
@pytest.mark.parametrize("options", [[], ["--json"]], ids=["text", "json"])
def test_directories_that_cannot_be_used_are_left_out_and_the_others_explained(
    options: list[str], nodes: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "replaced").mkdir()
    useless = [tmp_path / "replaced", tmp_path / "nothing"]

    answer = run("explain", useless[0], *nodes, useless[1], *options)

    without = run("explain", *nodes, *options)
    assert (answer.status, without.status) == (2, 0)
    shown = [re.sub(r"saved \d+ \w+ ago", "", told.out) for told in (answer, without)]
    assert shown[0] == shown[1]
    assert [line.split(": ")[:2] for line in answer.err.splitlines()] == [
        ["localckpt", f"{path} is left out"] for path in useless
    ]


@pytest.mark.usefixtures("as_root")
@pytest.mark.fault("unusable-store")
def test_a_directory_of_which_a_part_cannot_be_read_is_left_out_whole(
    shm_roots: Callable[[int], list[Path]], nodes: list[Path]
) -> None:
    # In shared memory, since another user cannot come to this one's temporary files.
    copies = [root / "store" for root in shm_roots(4)]
    for node, copy in zip(nodes, copies, strict=True):
        shutil.copytree(node, copy)
        for path in [copy.parent, copy, *copy.rglob("*")]:
            path.chmod(0o755)
    (copies[1] / "session-run" / "1").chmod(0o700)

    answer = run("explain", *copies, "--json", user=54_321)

    assert answer.status == 2
    refused = f"{copies[1] / 'session-run' / '1'} cannot be read: Permission denied"
    assert answer.err == f"localckpt: {copies[1]} is left out: {refused}\n"
    (told,) = answer.json()["sessions"]
    assert told["nodes"] == [str(copy) for copy in (copies[0], *copies[2:])]
    assert told["loads"]["iteration"] == 20


def test_without_any_directory_that_can_be_used_nothing_is_printed(tmp_path: Path) -> None:
    answers = [call("explain", tmp_path, tmp_path / "nothing", *o) for o in ([], ["--json"])]

    assert [(answer.status, answer.out) for answer in answers] == [(2, "")] * 2
    assert [answer.err.count("\n") for answer in answers] == [2, 2]


@pytest.mark.fault("hostile-file")
def test_owners_that_are_no_files_and_another_spelling_of_a_session_hide_nothing(
    nodes: list[Path],
) -> None:
    for node in nodes:
        for owner in node.glob("session-run/*"):
            (owner / ".owner").unlink(missing_ok=True)
            (owner / ".owner").mkdir()
    (nodes[0] / "session-%72un" / "0").mkdir(parents=True)

    assert _explained(nodes)["loads"]["iteration"] == 20


@pytest.mark.fault("world-size")
@pytest.mark.parametrize("world_size", [2, 3, 9])
def test_another_number_of_ranks_is_told_that_it_takes_elastic(
    world_size: int, nodes: list[Path]
) -> None:
    options = f"--world-size={world_size}"
    answer, told = call("explain", *nodes, options), _explained(nodes, options)

    assert answer.status == 0
    assert "A restart loads iteration 20 (generation 1.2, 4 ranks). Of another" in answer.out
    assert "elastic=True" in answer.out
    assert "it needs 2 nodes at least" in answer.out
    assert told["loads"]["iteration"] == 20
    assert (told["reshards"], told["least_nodes"], told["refusal"]) == (True, 2, None)
    same = _explained(nodes, "--world-size=4")
    assert (same["loads"]["iteration"], same["reshards"]) == (20, False)


@pytest.mark.fault("world-size")
def test_fewer_ranks_than_nodes_that_are_needed_are_refused(nodes: list[Path]) -> None:
    answer, told = call("explain", *nodes, "--world-size", "1"), _explained(nodes, "--world-size=1")

    assert answer.status == 1
    assert "A restart is refused: the shards of iteration 20 are spread over 2 nodes" in answer.out
    assert "Start with 2 ranks or more" in told["refusal"]
    assert told["loads"] is None
    assert told["newest_complete"]["iteration"] == 20


def test_two_directories_of_one_node_count_as_one(nodes: list[Path], tmp_path: Path) -> None:
    again = tmp_path / "again"
    shutil.copytree(nodes[1], again)

    answer = call("explain", *nodes, again, nodes[0])
    told = _explained([*nodes, again, nodes[0]])

    assert f"localckpt: {again} is of the same node as {nodes[1]}\n" == answer.err
    assert told == _explained(nodes)


def test_nodes_without_the_session_count_as_nodes_that_hold_nothing(
    nodes: list[Path], tmp_path: Path
) -> None:
    with make_manager("disk", tmp_path / "other", "another") as manager:
        manager.save(state_of(0, 3), 3)

    told = call("explain", *nodes, tmp_path / "other", "--json").json()["sessions"]

    assert [(s["session"], s["loads"]["iteration"], len(s["nodes"])) for s in told] == [
        ("another", 3, 5),
        ("run", 20, 5),
    ]
    assert str(tmp_path / "other") in told[1]["may_be_lost_alone"]


def _find_latest(rank: int, world_size: int, cases: list[list[str]]) -> list[int]:
    found = []
    for stores in cases:
        with make_manager("disk", Path(stores[rank]), "run") as manager:
            found.append(manager.find_latest())
    return found


@pytest.mark.fault("lost-nodes", "bad-copies")
def test_what_it_says_is_what_a_restart_does(
    nodes: list[Path],
    tmp_path: Path,
    long_form: bool,
    record_property: pytest.RecordProperty,
) -> None:
    count, cases, said = (60 if long_form else 6), [], []
    for number in range(count):
        chosen = random.Random(number)
        copies = [tmp_path / f"case {number}" / node.name for node in nodes]
        for node, copy in zip(nodes, copies, strict=True):
            shutil.copytree(node, copy)
        shards = [path for copy in copies for path in only_shards(copy)]
        for path in chosen.sample(shards, chosen.randrange(1, 8)):
            if chosen.random() < 0.7:
                path.unlink()
            else:
                damage(path, 0.01)
        cases.append([str(copy) for copy in copies])
        loads = _explained(copies)["loads"]
        said.append(-1 if loads is None else loads["iteration"])

    results = run_ranks(_find_latest, 4, cases, timeout_s=120)

    assert results == [said] * 4
    assert len(set(said)) > 1
    record_property("cases", count)
