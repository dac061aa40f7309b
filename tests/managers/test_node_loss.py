"""Nodes are lost, come back with older files, or in other places.

tests/faults/test_lost_nodes.py loses every set of nodes.
"""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from tests.scenarios import Begin


@pytest.mark.fault("lost-nodes")
def test_a_checkpoint_survives_exactly_when_every_clique_keeps_a_member(job: Begin) -> None:
    """Two ranks a node, whose cliques are ranks 0 and 2, and 1 and 3."""
    saved = job(nodes=2, ranks=4, redundancy=(2, 2), keep_last=2).save(6, 7).keep("all")

    saved.restart().expect(7).run()
    for lost in (0, 1):
        mine = (2 * lost, 2 * lost + 1)
        saved.bring_back("all").lose(lost)
        saved.expect(7, {rank: f"peer rank {rank ^ 2}" for rank in mine})
        # Whoever was lost is replicated again from here on.
        assert sum("000008." in name for name in saved.save(8).files()) == 8
    saved.lose(0, 1).expect_none("no shard of this session was found on any node").run()


@pytest.mark.fault("old-files")
def test_nodes_that_return_with_older_files_never_mix_with_newer_ones(job: Begin) -> None:
    saved = job(nodes=4, redundancy=(1, 2)).save(6).keep("old").expect(6).save(7).keep("new")

    for old in ((0, 3), (0, 1), (1, 2, 3), (0, 1, 2, 3)):
        saved.bring_back("new").bring_back("old", *old)
        if any({first, first + 1} <= set(old) for first in (0, 2)):
            saved.expect(6).run()
        else:
            saved.expect(7, {rank: f"peer rank {rank ^ 1}" for rank in old}).run()


@pytest.mark.fault("moved-ranks")
def test_ranks_that_come_back_on_other_nodes_get_their_own_shards(job: Begin) -> None:
    saved = job(nodes=3, keep_last=1).save(7).keep("all")

    for places in permutations(range(3)):
        moved = {r: f"peer rank {places.index(r)}" for r in range(3) if places[r] != r}
        saved.bring_back("all").restart(on=places).expect(7, moved).run()
    # Those who now live where others wrote let the others' shards go, too.
    elsewhere = [1, 2, 0]
    saved.bring_back("all").restart(on=elsewhere).call(_load).save(8)
    assert not [name for name in saved.files() if "000007." in name]
    saved.restart(on=elsewhere).expect(8).run()


def _load(manager: Any) -> None:
    assert manager.find_latest() == 7
    manager.load()
