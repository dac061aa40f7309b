"""Bad copies are found out, set aside, and replaced: by a replica, or by an older state."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from localckpt import MismatchError, NoReplicasAvailableError
from tests.managers.jobs import (
    Dirs,
    assert_same,
    cliques,
    damage,
    error_of,
    files,
    in_job,
    iterations_on,
    reads_fail,
)
from tests.ranks import node_store, run_ranks

# Several digest blocks, so that damage can lie where finding the shard does not look.
_NBYTES = 3 << 20
_MIDDLE = 0.6


def _large(rank: int, iteration: int) -> dict[str, Any]:
    random = torch.Generator().manual_seed(100 * iteration + rank)
    return {"large": torch.randn(_NBYTES // 4, generator=random), "iteration": iteration}


def _save_iterations(rank: int, world_size: int, replicated: bool = True) -> None:
    with in_job(None if replicated else nullcontext(), keep_last=2) as (manager, _):
        for iteration in (7, 8):
            manager.save(_large(rank, iteration), iteration)


def _load(rank: int, world_size: int) -> tuple[int, int, str]:
    """What find_latest said, what was loaded and was right, and where it came from."""
    with in_job(keep_last=2) as (manager, _):
        found = manager.find_latest()
        state, ckpt_id = manager.load()
        assert manager.last_load.iteration == manager.latest_iteration == ckpt_id.iteration
        assert_same(state, _large(rank, ckpt_id.iteration))
        source = manager.last_load.source
        # Loading again gives the same, whatever had to be found out the first time.
        again, same_id = manager.load()
        assert same_id == ckpt_id
        assert_same(again, state)
    return found, ckpt_id.iteration, source


def _copy(node: Path, owner: int, iteration: int) -> Path:
    (found,) = node.rglob(f"{iteration:012d}.{owner}.*.safetensors")
    return found


def _set_aside(*nodes: Path) -> list[tuple[int, int]]:
    names = (n.rpartition("/")[2].split(".") for n in files(*nodes) if n.endswith(".corrupt"))
    return [(int(iteration), int(owner)) for iteration, owner, *_ in names]


@pytest.fixture
def nodes(node_dirs: Dirs) -> list[Path]:
    """Two nodes that keep iterations 7 and 8 of each other's rank."""
    found = node_dirs(2)
    run_ranks(_save_iterations, 2, store_per_node=found)
    return found


@pytest.mark.fault("bad-copies")
def test_a_bad_own_copy_is_quarantined_and_the_replica_is_taken(nodes: list[Path]) -> None:
    damage(_copy(nodes[1], 1, 8), _MIDDLE)
    before = len(files(*nodes))

    told = run_ranks(_load, 2, store_per_node=nodes)

    assert told == [(8, 8, "own node"), (8, 8, "peer rank 0")]
    assert _set_aside(nodes[1]) == [(8, 1)]
    assert _set_aside(nodes[0]) == []
    # Nothing is deleted by a restart, and the copy is made again.
    assert len(files(*nodes)) == before + 1
    assert _copy(nodes[1], 1, 8).read_bytes() == _copy(nodes[0], 1, 8).read_bytes()


@pytest.mark.fault("bad-copies")
@pytest.mark.parametrize("own", ["is gone", "is bad"])
def test_when_no_copy_is_good_all_ranks_take_the_older_checkpoint(
    own: str, nodes: list[Path]
) -> None:
    damage(_copy(nodes[0], 1, 8), _MIDDLE)
    if own == "is bad":
        damage(_copy(nodes[1], 1, 8), _MIDDLE)
    else:
        _copy(nodes[1], 1, 8).unlink()

    told = run_ranks(_load, 2, store_per_node=nodes)
    found_again = run_ranks(_load, 2, store_per_node=nodes)

    assert told == [(8, 7, "own node")] * 2
    assert _set_aside(nodes[0]) == [(8, 1)]
    assert _set_aside(nodes[1]) == ([(8, 1)] if own == "is bad" else [])
    assert found_again == [(7, 7, "own node")] * 2


def _all_is_bad(rank: int, world_size: int) -> list[str]:
    told = []
    with in_job(keep_last=2) as (manager, _):
        assert manager.find_latest() == 8
        told.append(error_of(manager.load, NoReplicasAvailableError))
        assert manager.find_latest() == -1
        told.append(error_of(manager.load, NoReplicasAvailableError))
        # The job can begin anew.
        manager.save(_large(rank, 1), 1)
        assert manager.find_latest() == 1
        assert_same(manager.load()[0], _large(rank, 1))
    return told


@pytest.mark.fault("bad-copies")
def test_when_nothing_is_good_it_is_an_error_that_names_the_shards(nodes: list[Path]) -> None:
    for iteration in (7, 8):
        for node in nodes:
            damage(_copy(node, 1, iteration), _MIDDLE)

    told = run_ranks(_all_is_bad, 2, store_per_node=nodes)

    assert told[0] == told[1]
    for text in told[0]:
        assert "iteration 8 (generation 1.2, 2 ranks) lacks the shards of ranks 1" in text
        assert "iteration 7 (generation 1.1, 2 ranks) lacks the shards of ranks 1" in text
        assert "Looked for on the node of rank 0, the node of rank 1." in text
        for node in ("the node of rank 0", "the node of rank 1"):
            for iteration in (7, 8):
                name = rf"{node}: {iteration:012d}\.1\.\d+\.\d+\.safetensors\.corrupt: "
                assert len(re.findall(rf"{name}iteration {iteration} of rank 1", text)) == 1
        assert text.count("is damaged: the 1048576 bytes from") == 4


def _go_on_after_a_fall_back(rank: int, world_size: int) -> None:
    with in_job(nullcontext(), keep_last=2) as (manager, _):
        assert manager.find_latest() == 8
        assert manager.load()[1].iteration == 7
        # 8 is no more than a name now, so 7 is one of the two that are kept.
        manager.save(_large(rank, 9), 9)
        assert {7, 9} <= iterations_on(node_store())
        manager.save(_large(rank, 10), 10)
    with in_job(nullcontext(), keep_last=2) as (manager, _):
        assert manager.find_latest() == 10
        assert_same(manager.load()[0], _large(rank, 10))


def test_a_checkpoint_that_could_not_be_loaded_is_not_counted_among_those_that_are_kept(
    node_dirs: Dirs,
) -> None:
    nodes = node_dirs(2)
    run_ranks(_save_iterations, 2, False, store_per_node=nodes)
    damage(_copy(nodes[1], 1, 8), _MIDDLE)

    run_ranks(_go_on_after_a_fall_back, 2, store_per_node=nodes)


def _save_as_another_number_of_ranks(rank: int, world_size: int) -> None:
    with in_job(nullcontext(), keep_last=9) as (manager, _):
        manager.save(_large(rank, 5), 5)


def _load_where_only_another_number_of_ranks_is_left(rank: int, world_size: int) -> list[str]:
    with in_job(nullcontext(), keep_last=9) as (manager, _):
        assert manager.find_latest() == 5
        told = [error_of(manager.load, MismatchError)]
        manager.latest_iteration = -1
        told.append(error_of(manager.find_latest, MismatchError))
    return told


@pytest.mark.fault("world-size")
def test_a_job_never_falls_back_to_the_state_of_another_number_of_ranks(node_dirs: Dirs) -> None:
    nodes = node_dirs(1)
    run_ranks(_save_as_another_number_of_ranks, 2, store_per_node=nodes)
    run_ranks(_save_as_another_number_of_ranks, 1, store_per_node=nodes)
    (newest,) = (p for p in nodes[0].rglob("*.safetensors") if p.name.split(".")[2] == "2")
    damage(newest, _MIDDLE)

    (told,) = run_ranks(_load_where_only_another_number_of_ranks_is_left, 1, store_per_node=nodes)

    for text in told:
        assert "saved by 2 ranks, and this job has 1" in text


def _lose_a_file_before_loading(rank: int, world_size: int) -> str:
    with in_job() as (manager, _):
        assert manager.find_latest() == 8
        if rank == 1:
            _copy(node_store(), 1, 8).unlink()
        assert_same(manager.load()[0], _large(rank, 8))
        return str(manager.last_load.source)


@pytest.mark.fault("lost-during-recovery")
def test_a_copy_that_is_gone_when_it_is_to_be_loaded_is_replaced_by_its_replica(
    nodes: list[Path],
) -> None:
    told = run_ranks(_lose_a_file_before_loading, 2, store_per_node=nodes)

    assert told == ["own node", "peer rank 0"]


def _receive_badly(rank: int, world_size: int) -> str:
    repl = cliques(1, 3)
    with in_job(repl) as (manager, _):
        manager.save(_large(rank, 3), 3)
        if rank == 2:
            _copy(node_store(), 2, 3).unlink()
        assert manager.find_latest() == 3
        receive = repl.retrieve_image
        tries = []

        def spoil_the_first(plan: Any, open_source: Any, accept: Any, timeout_s: float) -> Any:
            rooms = []

            def room(id_: Any, nbytes: int) -> memoryview:
                rooms.append(accept(id_, nbytes))
                return rooms[-1]

            received = receive(plan, open_source, room, timeout_s)
            tries.append([entry.sender for entry in plan.transfers])
            if rank == 2 and len(tries) == 1:
                rooms[0][_NBYTES // 2] ^= 1
            return received

        repl.retrieve_image = spoil_the_first
        state, _ = manager.load()
        assert_same(state, _large(rank, 3))
        assert tries == [[0], [1]]
        return str(manager.last_load.source)


@pytest.mark.fault("bad-copies")
def test_a_copy_that_was_spoiled_on_its_way_is_not_quarantined_where_it_is_good(
    node_dirs: Dirs,
) -> None:
    nodes = node_dirs(3)

    told = run_ranks(_receive_badly, 3, store_per_node=nodes)

    assert told == ["own node", "own node", "peer rank 1"]
    assert _set_aside(*nodes) == []


def _read_from_a_node_whose_disk_fails(rank: int, world_size: int) -> str:
    with in_job(cliques(1, 3)) as (manager, _):
        manager.save(_large(rank, 3), 3)
        if rank == 2:
            _copy(node_store(), 2, 3).unlink()
        assert manager.find_latest() == 3
        with reads_fail(_copy(node_store(), 2, 3)) if rank == 0 else nullcontext():
            state, _ = manager.load()
        assert_same(state, _large(rank, 3))
        return str(manager.last_load.source)


@pytest.mark.fault("refused-io")
@pytest.mark.usefixtures("can_attach")
def test_a_disk_that_fails_while_its_node_sends_costs_that_copy_and_not_the_load(
    node_dirs: Dirs,
) -> None:
    nodes = node_dirs(3)

    told = run_ranks(_read_from_a_node_whose_disk_fails, 3, store_per_node=nodes)

    assert told == ["own node", "own node", "peer rank 1"]
    # What could not be read now may be read the next time.
    assert _set_aside(*nodes) == []
