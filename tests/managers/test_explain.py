"""A manager says which checkpoint a restart would load, and why none that is newer."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.managers.jobs import (
    KINDS,
    assert_same,
    cliques,
    damage,
    error_of,
    make_manager,
    state_of,
)
from tests.managers.own_managers import FileManager
from tests.ranks import node_store, run_ranks

Dirs = Callable[[int], list[Path]]


def _save_two(rank: int, world_size: int, kind: str) -> None:
    with (
        cliques(1, 2) as repl,
        make_manager(kind, node_store(), "job", repl, keep_last=2) as manager,
    ):
        for iteration in (7, 8):
            manager.save(state_of(rank, iteration), iteration)


def _explain(rank: int, world_size: int, kind: str) -> tuple[str, Any, int]:
    with cliques(1, 2) as repl, make_manager(kind, node_store(), "job", repl) as manager:
        explanation = manager.explain()
        found = manager.find_latest()
        assert found == (explanation.loads.iteration if explanation.loads else -1)
        if found == -1:
            error_of(manager.load)
        else:
            assert_same(manager.load()[0], state_of(rank, found))
        return str(explanation), explanation.to_json(), found


@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_get_why_a_newer_checkpoint_is_not_loaded(
    kind: str, node_dirs: Dirs, shm_roots: Dirs
) -> None:
    nodes = (node_dirs if kind == "disk" else shm_roots)(4)
    run_ranks(_save_two, 4, kind, store_per_node=nodes)
    # Rank 2's clique loses one node, and on the other what it holds of iteration 8.
    shutil.rmtree(nodes[2])
    nodes[2].mkdir()
    for path in nodes[3].rglob("000000000008.*.safetensors"):
        damage(path, 0.0001)

    told = run_ranks(_explain, 4, kind, store_per_node=nodes)

    text, plain, found = told[0]
    assert told == [(text, plain, found)] * 4
    assert found == 7
    assert "A restart loads iteration 7" in text
    assert "the node of rank 3" in text
    lacks = plain["checkpoints"][0]["lacks"]
    assert [lack["ranks"] for lack in lacks] == [[2], [3]]
    assert all("1 copy, not a shard image" in lack["why"] for lack in lacks)
    assert all(lack["nodes"] == ["the node of rank 3"] for lack in lacks)
    assert plain["checkpoints"][0]["complete"] is False
    # Ranks 0 and 1 keep each other's shards; those of 2 and 3 are on one node.
    assert plain["may_be_lost_alone"] == [f"the node of rank {rank}" for rank in (0, 1, 2)]
    assert plain["survives_any"] == 0


@pytest.mark.parametrize("position", [0.0001, 0.9], ids=["header", "tensors"])
def test_a_newer_checkpoint_without_an_intact_copy_is_named_and_older_ones_load(
    position: float, node_dirs: Dirs
) -> None:
    nodes = node_dirs(4)
    run_ranks(_save_two, 4, "disk", store_per_node=nodes)
    for path in [p for node in nodes for p in node.rglob("000000000008.*.safetensors")]:
        damage(path, position)

    told = run_ranks(_explain, 4, "disk", store_per_node=nodes)

    text, plain, found = told[0]
    assert told == [(text, plain, found)] * 4
    assert found == 7
    newer, older = plain["checkpoints"]
    assert (newer["iteration"], newer["world_size"], newer["complete"]) == (8, 4, False)
    assert (newer["by_name"], older["by_name"]) == (True, False)
    assert all(len(on) == 2 for on in newer["damaged"])
    assert all(lack["why"].startswith("2 copies, ") for lack in newer["lacks"])
    assert "Iteration 8 (generation 1.2, by the names of its files) is newer, and lacks:" in text
    assert "is damaged: " not in text.partition("Not counted")[0]


def test_without_any_checkpoint_the_explanation_is_that(node_dirs: Dirs) -> None:
    told = run_ranks(_explain, 2, "disk", store_per_node=node_dirs(2))

    assert [found for *_, found in told] == [-1, -1]
    assert "A restart finds nothing to load: no node holds a shard" in told[0][0]


def test_ones_own_hooks_are_explained_by_rank(tmp_path: Path) -> None:
    manager = FileManager(tmp_path)
    manager.save(state_of(0, 5), 5)

    explanation = manager.explain()

    assert explanation.loads is not None
    assert explanation.loads.iteration == 5
    assert explanation.nodes == ("the node of rank 0",)
