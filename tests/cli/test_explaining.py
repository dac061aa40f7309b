"""``localckpt explain`` says what a restart does, from the stores of all nodes."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import call, only_shards, run
from tests.managers.jobs import damage, make_manager
from tests.ranks import run_ranks


def _of(node: Path, iteration: int, rank: int) -> Path:
    (path,) = node.rglob(f"*{iteration}.{rank}.*.safetensors")
    return path


def _explained(nodes: Sequence[Path], *options: str) -> Any:
    (told,) = call("explain", *nodes, *options, "--json").json()["sessions"]
    return told


def test_a_whole_job_loads_its_newest_and_survives_any_one_node(
    nodes: list[Path], tmp_path: Path
) -> None:
    answer, told = run("explain", *nodes), _explained(nodes)

    a, b, c, d = map(str, nodes)
    assert (answer.status, answer.err) == (0, "")
    assert "A restart loads iteration 20 (generation 1.2, 4 ranks)." in answer.out
    assert "Iteration 20 survives the loss of any one node." in answer.out
    assert told["loads"]["iteration"] == 20
    assert told["breaking"] == [[a, b], [c, d]]
    assert told["survives_any"] == 1
    assert [row["complete"] for row in told["checkpoints"]] == [True, True]
    again = shutil.copytree(nodes[0], tmp_path / "again")
    assert f"{again} is of the same node as {a}" in call("explain", *nodes, again).err


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


@pytest.mark.fault("world-size")
def test_another_number_of_ranks_is_told_that_it_takes_elastic(nodes: list[Path]) -> None:
    for options in ("--world-size=2", "--world-size=3", "--world-size=9"):
        answer, told = call("explain", *nodes, options), _explained(nodes, options)

        assert answer.status == 0
        assert "A restart loads iteration 20 (generation 1.2, 4 ranks). Of another" in answer.out
        assert "elastic=True" in answer.out
        assert "it needs 2 nodes at least" in answer.out
        assert told["loads"]["iteration"] == 20
        assert (told["reshards"], told["least_nodes"], told["refusal"]) == (True, 2, None)
    same = _explained(nodes, "--world-size=4")
    assert (same["loads"]["iteration"], same["reshards"]) == (20, False)


def _find_latest(rank: int, world_size: int, cases: list[list[str]]) -> list[int]:
    found = []
    for stores in cases:
        with make_manager("disk", Path(stores[rank]), "job") as manager:
            found.append(manager.find_latest())
    return found


@pytest.mark.fault("lost-nodes", "bad-copies")
def test_what_it_says_is_what_a_restart_does(
    nodes: list[Path], tmp_path: Path, long_form: bool, record_property: pytest.RecordProperty
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
