"""Lost shards and parity are made again; tests/faults/test_lost_nodes.py loses every set."""

from __future__ import annotations

from functools import partial
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
from tests.managers.jobs import (
    MAX_S,
    damage,
    error_of,
    files,
    make_manager,
    state_of,
    strategy_of,
)
from tests.managers.own_managers import DictManager
from tests.ranks import die, node_store, on_ranks
from tests.scenarios import Begin, Job


def _uneven(rank: int, iteration: int) -> dict[str, Any]:
    """Some MB, of other ranks twice and three times as much."""
    return state_of(rank, iteration, 3_000_000 * (1 + rank % 3))


def _saved(job: Begin) -> Job:
    """A job of three ranks that keep one parity of their shards, some MB each."""
    return job(nodes=3, redundancy="parity 1 of 3", state=_uneven).save(2, 3)


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
    saved = job(nodes=4, redundancy="parity 2 of 4", state=_uneven).save(3).lose(0)
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


@pytest.mark.fault("silent-peer")
@pytest.mark.parametrize("strict", [False, True])
@on_ranks(3, nodes=3, expect_dead=[1])
def test_a_peer_that_dies_costs_the_parity_or_with_strict_the_save(
    rank: int, world_size: int, strict: bool
) -> None:
    with localckpt.ParityReplicationStrategy(1, world_size, timeout_s=4.0) as repl:
        manager = make_manager(
            "disk", node_store(), "job", repl, timeout=4.0, strict=strict, background=True
        )
        manager.save(state_of(rank, 1), 1)
        if rank == 1:
            # The others connect again, and this one does not come.
            reserve = manager.store.reserve

            def die_for_parity(identity: ShardIdentity, *args: Any, **given: Any) -> Any:
                return reserve(identity, *args, **given) if identity.is_shard else die()

            manager.store.reserve = die_for_parity
        try:
            request = manager.save(state_of(rank, 2), 2, is_async=True)
            request.async_fn(*request.async_fn_args)
            (save,) = manager._saves.in_flight
            assert save.outcome().group is None
            if strict:
                assert save.error.startswith("PeerLostError: ")
                assert "rank 1" in save.error
            else:
                assert save.error is None
            assert len(save.slots) == (0 if strict else 1)
        finally:
            manager._saves.stop_waiting()
            manager.close()
    there = [name for name in files(node_store()) if ".parity." in name]
    assert {name.rpartition("/")[2].partition(".")[0][-1] for name in there} == {"1"}


def _die_while_rebuilding(manager: Any) -> None:
    assert manager.find_latest() == 3
    if manager.rank == 1:
        rebuilding.Pipeline = die
    assert "rank 1" in error_of(manager.load, PeerLostError)


@pytest.mark.fault("lost-during-recovery")
def test_a_rank_that_dies_while_it_computes_changes_nothing_on_any_node(job: Begin) -> None:
    running = _saved(job).lose(0)
    nodes = running.nodes
    before = {p: p.read_bytes() for n in nodes for p in n.rglob("*.safetensors")}

    running.restart(timeout=3.0).call(_die_while_rebuilding).run(dead=[1])

    assert {p: p.read_bytes() for n in nodes for p in n.rglob("*.safetensors")} == before
    assert not [name for name in files(*nodes) if not name.endswith(".safetensors")]
    running.restart(timeout=MAX_S).expect(3, {0: "parity"}).run()


@on_ranks(6, nodes=3)
def test_what_parity_cannot_protect_is_refused(rank: int) -> None:
    for arguments, told in (
        ((3, 8), "it can be 1 to 2"),
        ((True, 8), "it can be 1 to 2"),
        ((2, 3), "it must be at least 4"),
        ((1, 8.0), "it must be at least 3"),
    ):
        given: Any = arguments
        with pytest.raises(localckpt.CheckpointingException, match=told):
            localckpt.ParityReplicationStrategy(*given)

    for redundancy, use in (
        ("parity 1 of 4", "for groups of 4: use group_size=3 at most"),
        ("parity 2 of 5", "for groups of 5: use parity=1, group_size=3"),
    ):
        with strategy_of(redundancy) as repl:
            make = partial(make_manager, "disk", node_store(), redundancy, repl)
            text = error_of(make, SameMachineReplicationException)
        assert f"on 3 nodes, too few {use}" in text
    with strategy_of("parity 1 of 3") as repl:
        text = error_of(partial(DictManager, {}, repl_strategy=repl), MismatchError)
    assert "DictManager keeps states" in text
