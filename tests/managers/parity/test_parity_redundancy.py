"""Parity and lost shards are made again, wherever ranks come back; a lost peer costs parity."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import localckpt
from localckpt import MismatchError, PeerLostError, SameMachineReplicationException
from localckpt.ids import ShardIdentity
from localckpt.parity import rebuilding
from localckpt.state_dict.source import read_verified_record
from localckpt.storage.files import FileSource
from tests.managers.jobs import MAX_S, Dirs, error_of, files, make_manager, state_of
from tests.managers.own_managers import DictManager
from tests.ranks import DeadRank, node_store, run_ranks
from tests.scenarios import Begin, Job

_REPLICATED = "iteration 3 is replicated, 2 of 2"


def _parity(parity: int, group_size: int, timeout_s: float = MAX_S) -> Any:
    return localckpt.ParityReplicationStrategy(parity, group_size, timeout_s=timeout_s)


def _saved(job: Begin, nodes: int, ranks: int, group_size: int, kind: str = "disk") -> Job:
    """A job of which each group keeps one parity of its shards, some MB each."""
    redundancy = f"parity 1 of {group_size}"
    begun = job(nodes, kind, ranks=ranks, redundancy=redundancy, nbytes=3_000_000)
    return begun.save(2, 3)


def _lineage_of(path: Path) -> localckpt.Lineage | None:
    source = FileSource(path)
    try:
        return read_verified_record(source).identity.lineage
    finally:
        source.close()


@pytest.mark.fault("lost-nodes")
def test_nodes_are_lost_one_after_the_other_without_a_save_between(job: Begin) -> None:
    running = _saved(job, nodes=4, ranks=8, group_size=4, kind="memory")
    newest = [name for name in running.files() if "000003." in name]

    for lost in (0, 2):
        running.lose(lost).expect(3, {2 * lost: "parity", 2 * lost + 1: "parity"})
        running.repaired().status(_REPLICATED)
        assert [name for name in running.files() if "000003." in name] == newest
    # Parity that was made again, too, tells what its epoch resumed from.
    paths = [path for node in running.nodes for path in node.rglob("*000003.*.safetensors")]
    lineages = {_lineage_of(path) for path in paths}
    assert len(lineages) == 1
    assert None not in lineages


@pytest.mark.fault("moved-ranks", "lost-nodes")
def test_ranks_that_come_back_on_other_nodes_get_their_shards_and_new_parity(
    job: Begin,
) -> None:
    running = _saved(job, nodes=3, ranks=3, group_size=3).lose(1)

    # Rank 0 is now on the empty node, and rank 1 where rank 0 was.
    running.restart(on=[1, 0, 2]).expect(3, {0: "peer rank 1", 1: "parity"}).repaired()
    running.lose(2).expect(3, {2: "parity"}).repaired().run()


def _lose_a_peer(rank: int, world_size: int, strict: bool) -> list[Any]:
    with _parity(1, world_size, 4.0) as repl:
        manager = make_manager(
            "disk", node_store(), "job", repl, timeout=4.0, strict=strict, background=True
        )
        manager.save(state_of(rank, 1), 1)
        if rank == 1:
            # The others connect again, and this one does not come.
            reserve = manager.store.reserve

            def die(identity: ShardIdentity, *args: Any) -> Any:
                if identity.is_shard:
                    return reserve(identity, *args)
                return os.kill(os.getpid(), signal.SIGKILL)

            manager.store.reserve = die
        told = []
        try:
            request = manager.save(state_of(rank, 2), 2, is_async=True)
            request.async_fn(*request.async_fn_args)
            (save,) = manager._saves.in_flight
            told = [save.error, save.outcome().group, len(save.slots)]
        finally:
            manager._saves.stop_waiting()
            manager.close()
        return [*told, files(node_store())]


@pytest.mark.fault("silent-peer")
@pytest.mark.parametrize("strict", [False, True])
def test_a_peer_that_dies_costs_the_parity_or_with_strict_the_save(
    strict: bool, node_dirs: Dirs
) -> None:
    nodes = node_dirs(3)

    told = run_ranks(_lose_a_peer, 3, strict, store_per_node=nodes, expect_dead=[1])

    assert isinstance(told[1], DeadRank)
    for rank in (0, 2):
        error, group, shards, there = told[rank]
        assert group is None
        if strict:
            assert error.startswith("PeerLostError: ")
            assert "rank 1" in error
            assert shards == 0
        else:
            assert error is None
            assert shards == 1
        kinds = [name.split(".", 1)[0][-1:] + "p" * (".parity." in name) for name in there]
        assert "1p" in kinds
        assert "2p" not in kinds


def _die_while_rebuilding(rank: int, world_size: int) -> str:
    repl = _parity(1, world_size, 3.0)
    manager = make_manager("disk", node_store(), "job", repl, timeout=3.0)
    assert manager.find_latest() == 3
    if rank == 1:
        rebuilding.Pipeline = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    try:
        return error_of(manager.load, PeerLostError)
    finally:
        manager.close()
        repl.close()


@pytest.mark.fault("lost-during-recovery")
def test_a_rank_that_dies_while_it_computes_changes_nothing_on_any_node(job: Begin) -> None:
    running = _saved(job, nodes=3, ranks=3, group_size=3).lose(0)
    nodes = running.nodes
    before = {p: p.read_bytes() for n in nodes for p in n.rglob("*.safetensors")}

    told = run_ranks(_die_while_rebuilding, 3, store_per_node=nodes, expect_dead=[1])

    assert all("rank 1" in told[rank] for rank in (0, 2))
    assert {p: p.read_bytes() for n in nodes for p in n.rglob("*.safetensors")} == before
    assert not [name for name in files(*nodes) if not name.endswith(".safetensors")]
    running.expect(3, {0: "parity"}).run()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((3, 8), "it can be 1 to 2"),
        ((True, 8), "it can be 1 to 2"),
        ((2, 3), "it must be at least 4"),
        ((1, 8.0), "it must be at least 3"),
    ],
)
def test_parities_that_cannot_be_are_refused(arguments: tuple[Any, Any], told: str) -> None:
    with pytest.raises(localckpt.CheckpointingException, match=told):
        localckpt.ParityReplicationStrategy(*arguments)


def _place_badly(rank: int, world_size: int) -> list[str]:
    told = []
    for parity, group_size in ((1, 4), (2, 5)):
        with _parity(parity, group_size) as repl:
            told.append(
                error_of(
                    lambda: make_manager("disk", node_store(), f"{group_size}", repl),  # noqa: B023
                    SameMachineReplicationException,
                )
            )
    with _parity(1, 3) as repl:
        told.append(error_of(lambda: DictManager({}, repl_strategy=repl), MismatchError))
    return told


def test_what_parity_cannot_protect_is_refused_when_the_manager_is_made(node_dirs: Dirs) -> None:
    told = run_ranks(_place_badly, 6, store_per_node=node_dirs(3))

    for one, two, hooks in told:
        assert "on 3 nodes, too few for groups of 4: use group_size=3 at most" in one
        assert "on 3 nodes, too few for groups of 5: use parity=1, group_size=3" in two
        assert "DictManager keeps states" in hooks
