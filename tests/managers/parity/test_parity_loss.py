"""Every set of nodes of parity groups is lost; shards and parity are made again elsewhere."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

import localckpt
from localckpt import (
    MismatchError,
    NoReplicasAvailableError,
    PeerLostError,
    SameMachineReplicationException,
)
from localckpt.errors import CorruptShardError
from localckpt.ids import ShardIdentity
from localckpt.managers.load import Load
from localckpt.parity import rebuilding
from localckpt.state_dict.source import read_verified_record
from localckpt.storage.files import FileSource
from tests.faults.lives import Lives
from tests.managers.jobs import (
    KINDS,
    MAX_S,
    Dirs,
    damage,
    error_of,
    files,
    make_manager,
    resume,
    state_of,
)
from tests.managers.own_managers import DictManager
from tests.ranks import DeadRank, node_store, run_ranks
from tests.scenarios import Begin, Job

_OLDER, _NEWEST = 6, 7


def _lose(
    rank: int,
    world_size: int,
    kind: str,
    base: Path,
    parity: int,
    sets: Sequence[tuple[int, ...]],
) -> list[tuple[str, str]]:
    """For each set of nodes: what happens when they come back empty, and with older files."""
    strategy = localckpt.ParityReplicationStrategy(parity, world_size)
    lives = Lives(kind, base, rank, None, strategy=strategy)
    with lives.life(None, keep_last=2) as manager:
        manager.save(state_of(rank, _OLDER), _OLDER)
        lives.keep("older")
        manager.save(state_of(rank, _NEWEST), _NEWEST)
        assert str(manager.status()[0]) == (
            f"iteration 7 is replicated, {1 + parity} of {1 + parity}"
        )
    lives.keep("newest")
    told = []
    for lost in sets:
        with lives.life(None if rank in lost else "newest", keep_last=2) as manager:
            if len(lost) > parity:
                assert manager.find_latest() == -1
                empty = error_of(manager.load, NoReplicasAvailableError)
            else:
                empty = resume(manager, rank, _NEWEST)
        with lives.life("older" if rank in lost else "newest", keep_last=2) as manager:
            older = resume(manager, rank, _OLDER if len(lost) > parity else _NEWEST)
        told.append((empty, older))
    lives.close()
    return told


@pytest.mark.fault("lost-nodes")
@pytest.mark.parametrize(
    ("kind", "world_size", "parity"),
    [
        *(("disk", 3, 1), ("memory", 4, 2)),
        # Large groups differ in what is computed alone, not in what is read and sent.
        *(
            pytest.param(KINDS[g % 2], g, m, marks=pytest.mark.long)
            for g in range(4, 9)
            for m in (1, 2)
        ),
    ],
)
@pytest.mark.timeout(1800)
def test_any_nodes_up_to_the_parities_may_be_lost_and_no_more(
    kind: str,
    world_size: int,
    parity: int,
    node_dirs: Dirs,
    shm_roots: Dirs,
    long_form: bool,
    record_property: Any,
) -> None:
    base = (node_dirs if kind == "disk" else shm_roots)(1)[0]
    sets = [s for size in range(parity + 2) for s in combinations(range(world_size), size)]
    sets = sets[:: 1 if long_form or world_size == 3 else 2]

    told = run_ranks(_lose, world_size, kind, base, parity, sets, timeout_s=1200.0)

    for rank in range(world_size):
        for lost, (empty, older) in zip(sets, told[rank], strict=True):
            source = "parity" if rank in lost else "own node"
            if len(lost) > parity:
                ranks = ", ".join(map(str, lost))
                lacking = f"({world_size} ranks) lacks the shards of ranks {ranks}"
                assert lacking.replace("(", "iteration 7 (generation 1.2, ") in empty
                assert older == "own node"
            else:
                assert empty == older == source
    record_property("cases", 2 * len(sets))


def _saved(job: Begin) -> Job:
    """A job of three ranks that keep one parity of their shards, some MB each."""
    return job(nodes=3, redundancy="parity 1 of 3", nbytes=3_000_000).save(2, 3)


def _lineage_of(path: Path) -> localckpt.Lineage | None:
    source = FileSource(path)
    try:
        return read_verified_record(source).identity.lineage
    finally:
        source.close()


@pytest.mark.fault("moved-ranks", "lost-nodes")
def test_ranks_that_come_back_on_other_nodes_get_their_shards_and_new_parity(job: Begin) -> None:
    running = _saved(job).lose(1)

    # Rank 0 is now on the empty node, and rank 1 where rank 0 was.
    running.restart(on=[1, 0, 2]).expect(3, {0: "peer rank 1", 1: "parity"}).repaired()
    running.lose(2).expect(3, {2: "parity"}).repaired()
    running.status("iteration 3 is replicated, 2 of 2").run()

    # Parity that was made again, too, tells what its epoch resumed from.
    paths = [path for node in running.nodes for path in node.rglob("*000003.*.safetensors")]
    lineages = {_lineage_of(path) for path in paths}
    assert len(lineages) == 1
    assert None not in lineages


@pytest.mark.fault("flipped-bit", "lost-nodes")
def test_a_damaged_image_beside_a_lost_node_is_computed_again_with_two_parities(
    job: Begin,
) -> None:
    saved = job(nodes=4, redundancy="parity 2 of 4", nbytes=3 << 20).save(3).lose(0)
    (image,) = saved.nodes[1].rglob("000000000003.1.*[0-9].safetensors")
    damage(image, 0.7)

    saved.expect(3, {0: "parity", 1: "parity"}).repaired()

    (aside,) = [name for name in saved.files() if ".corrupt" in name]
    assert aside.rpartition("/")[2].startswith("000000000003.1.")
    saved.expect(3).run()


def _load_with_bad_memory(manager: Any) -> None:
    """Whatever comes to rank 0 is spoiled there."""
    if manager.rank == 0:

        def spoiled(own: Load) -> Any:
            with own._images.noting(own._mine):
                raise CorruptShardError("a bit has flipped")

        Load._restore = spoiled  # type: ignore[method-assign]
    assert manager.find_latest() == 3
    told = error_of(manager.load, NoReplicasAvailableError)
    assert "a bit has flipped" in told


@pytest.mark.fault("bad-copies")
def test_a_rank_with_bad_memory_does_not_talk_others_out_of_good_copies(job: Begin) -> None:
    saved = _saved(job)

    # Ranks 0 and 1 come back on each other's nodes, so each is sent its shard.
    saved.restart(on=[1, 0, 2]).call(_load_with_bad_memory)

    assert not [name for name in saved.files() if ".corrupt" in name]
    saved.restart(redundancy=None).expect(3).run()


def _lose_a_peer(rank: int, world_size: int, strict: bool) -> list[Any]:
    with localckpt.ParityReplicationStrategy(1, world_size, timeout_s=4.0) as repl:
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
    repl = localckpt.ParityReplicationStrategy(1, world_size, timeout_s=3.0)
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
    running = _saved(job).lose(0)
    nodes = running.nodes
    before = {p: p.read_bytes() for n in nodes for p in n.rglob("*.safetensors")}

    told = run_ranks(_die_while_rebuilding, 3, store_per_node=nodes, expect_dead=[1])

    assert all("rank 1" in told[rank] for rank in (0, 2))
    assert {p: p.read_bytes() for n in nodes for p in n.rglob("*.safetensors")} == before
    assert not [name for name in files(*nodes) if not name.endswith(".safetensors")]
    running.expect(3, {0: "parity"}).run()


def _place_badly(rank: int, world_size: int) -> list[str]:
    told = []
    for parity, group_size in ((1, 4), (2, 5)):
        with localckpt.ParityReplicationStrategy(parity, group_size, timeout_s=MAX_S) as repl:
            told.append(
                error_of(
                    lambda: make_manager("disk", node_store(), f"{group_size}", repl),  # noqa: B023
                    SameMachineReplicationException,
                )
            )
    with localckpt.ParityReplicationStrategy(1, 3, timeout_s=MAX_S) as repl:
        told.append(error_of(lambda: DictManager({}, repl_strategy=repl), MismatchError))
    return told


def test_what_parity_cannot_protect_is_refused(node_dirs: Dirs) -> None:
    for arguments, told in (
        ((3, 8), "it can be 1 to 2"),
        ((True, 8), "it can be 1 to 2"),
        ((2, 3), "it must be at least 4"),
        ((1, 8.0), "it must be at least 3"),
    ):
        given: Any = arguments
        with pytest.raises(localckpt.CheckpointingException, match=told):
            localckpt.ParityReplicationStrategy(*given)

    for one, two, hooks in run_ranks(_place_badly, 6, store_per_node=node_dirs(3)):
        assert "on 3 nodes, too few for groups of 4: use group_size=3 at most" in one
        assert "on 3 nodes, too few for groups of 5: use parity=1, group_size=3" in two
        assert "DictManager keeps states" in hooks
