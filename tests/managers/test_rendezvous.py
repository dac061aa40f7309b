"""Ranks that meet learn their nodes, and what these hold, from the root alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from localckpt.events.stream import EventStream
from localckpt.managers.context import Context
from localckpt.managers.look import Finder
from localckpt.options import Options
from localckpt.ranks.ranks import Ranks
from localckpt.replication.strategies import NoReplication
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.storage.directory import DirectoryStore
from tests.simulated import World

_WORLD, _NODES = 24, 6


def _join_and_look(ranks: Ranks, root: Path) -> tuple[Any, ...]:
    # Dealt out one by one, so that no two neighbours share a node.
    store = DirectoryStore(root / str(ranks.rank % _NODES), "run", ranks.rank, 20.0)
    try:
        strategy = NoReplication(20.0, None)
        context = Context("run", Options(), EventStream(), ranks, strategy, SafeGlobals(), store)
        epoch = context.epoch
        epoch.join()
        found = Finder(context).look()
        return epoch.nodes, epoch.generation, found, store.claim.newest_epoch()
    finally:
        store.close()


def test_ranks_that_meet_name_nodes_and_epoch_alike_whoever_shares_a_node(tmp_path: Path) -> None:
    world = World(_WORLD, 20.0)

    first = world.all_do(lambda ranks: _join_and_look(ranks, tmp_path))
    second = world.all_do(lambda ranks: _join_and_look(ranks, tmp_path))

    for outcomes, epoch in ((first, 1), (second, 2)):
        nodes, generation, found, noted = outcomes[0]
        assert all(outcome == outcomes[0] for outcome in outcomes.values())
        assert nodes == [nodes[rank % _NODES] for rank in range(_WORLD)]
        assert len(set(nodes)) == _NODES
        assert nodes[1] == "the node of ranks 1,7,13,19"
        assert (generation.epoch, noted) == (epoch, epoch)
        assert (found.complete, found.incomplete) == ({}, "")
    assert first[0][1].epoch_id != second[0][1].epoch_id
