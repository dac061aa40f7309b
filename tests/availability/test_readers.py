"""Each shard is read on a node that holds it, if possible by the rank that wants the most of it."""

from __future__ import annotations

from fractions import Fraction
from math import floor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localckpt.availability.inventory import Inventory, ranks_by_node
from localckpt.availability.reshard import (
    assign_readers,
    group_tensors,
    plan_reshard,
)
from localckpt.errors import NoReplicasAvailableError
from localckpt.ids import Checkpoint, Generation
from localckpt.state_dict.saved_shard import PRIVATE


def _inventory(world_size: int, saved_by: int, held: list[list[int]], ranks: int) -> Inventory:
    """Nodes with ``ranks`` ranks each, and what each node holds."""
    inventory = Inventory(ranks_by_node([str(rank // ranks) for rank in range(world_size)]))
    for node, shards in enumerate(held):
        for shard in shards:
            inventory.add(_checkpoint(saved_by), shard, str(node), 100)
    return inventory


def _checkpoint(saved_by: int) -> Checkpoint:
    return Checkpoint(Generation(7, 1), 3, saved_by)


@given(st.data())
def test_each_shard_is_read_on_a_node_that_holds_it_or_else_its_rank_is_named(
    data: st.DataObject,
) -> None:
    saved_by, world_size = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    ranks = data.draw(st.integers(1, 3))
    nodes = -(-world_size // ranks)
    shards = st.lists(st.integers(0, saved_by - 1), unique=True)
    held = data.draw(st.lists(shards, min_size=nodes, max_size=nodes))
    inventory = _inventory(world_size, saved_by, held, ranks)
    lost = set(range(saved_by)) - {shard for of_node in held for shard in of_node}

    if lost:
        with pytest.raises(NoReplicasAvailableError, match=f"the shard of rank {min(lost)} "):
            assign_readers(_checkpoint(saved_by), inventory)
        return
    readers = assign_readers(_checkpoint(saved_by), inventory)

    assert list(readers) == list(range(saved_by))
    for shard, reader in readers.items():
        assert shard in held[reader // ranks]
        # The rank with the middle of the shard, of which it wants the most in an even division.
        middle = floor(Fraction(2 * shard + 1, 2 * saved_by) * world_size)
        assert reader == middle or shard not in held[middle // ranks]


def test_shards_whose_best_reader_lacks_them_are_spread() -> None:
    # Four nodes saved with copies on the next one; the last is lost.
    held = [[0, 3], [1, 0], [2, 1]]

    assert assign_readers(_checkpoint(4), _inventory(3, 4, held, 1)) == {0: 0, 1: 1, 2: 2, 3: 0}


def test_a_computed_shard_is_read_where_it_was_computed() -> None:
    readers = assign_readers(_checkpoint(2), _inventory(2, 2, [[0], []], 1), {1: 1})

    assert readers == {0: 0, 1: 1}


@pytest.mark.parametrize(("nodes", "reader"), [(["a", "a"], 0), (["a", "b"], 1)])
@pytest.mark.parametrize("equal_on", ["all", PRIVATE])
def test_a_rank_reads_what_it_wants_by_itself_if_its_node_has_the_shard(
    equal_on: str, nodes: list[str], reader: int
) -> None:
    whole = ((0, 8),), ((0, 4),)
    wanted, tables = group_tensors([("w", "float32", (8, 4), (((0, 3),), ((1, 2),)), "")])
    saved, _ = group_tensors([("w", "float32", (8, 4), whole, equal_on)])

    plan = plan_reshard(
        *({7: list(saved)}, {0: list(wanted)}, tables, {7: 1}, nodes), held={7: [nodes[1]]}
    )

    assert [take.reader for take in plan.takes] == [reader]


def test_what_a_rank_of_the_node_has_computed_is_sent_to_the_others() -> None:
    whole = (((0, 8),),)
    wanted, tables = group_tensors([("w", "float32", (8,), whole, "")])
    saved, _ = group_tensors([("w", "float32", (8,), whole, "7")])

    plan = plan_reshard({7: list(saved)}, {0: list(wanted)}, tables, {7: 1}, ["a", "a"], held={})

    assert [take.reader for take in plan.takes] == [1]
