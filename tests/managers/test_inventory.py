"""What nodes hold: how it is told, and what is known of it then."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localckpt.availability.inventory import Inventory, node_report
from localckpt.errors import MismatchError
from localckpt.ids import MOST_RANKS, Checkpoint, Generation, Piece, ShardRecord

_NUMBERS = st.integers(0, 10**19 - 1)
_ANY_CHECKPOINT = st.builds(
    Checkpoint,
    generation=st.builds(Generation, _NUMBERS, _NUMBERS),
    iteration=_NUMBERS,
    world_size=st.integers(1, MOST_RANKS),
)
_FEW_CHECKPOINTS = st.builds(
    Checkpoint,
    generation=st.builds(Generation, st.integers(1, 2), st.integers(1, 2)),
    iteration=st.integers(0, 2),
    world_size=st.integers(1, 3),
)
_NODES = st.sampled_from("abc")
_RANKS_ON = {"a": [0, 1, 4], "b": [2], "c": [3, 5]}


def _record(checkpoint: Checkpoint, owner: int, nbytes: int = 4096) -> ShardRecord:
    return ShardRecord(checkpoint.shard(owner, "run"), nbytes)


def _told(records: Sequence[ShardRecord]) -> Any:
    return json.loads(json.dumps(node_report(records)))


@given(
    st.dictionaries(
        st.tuples(_ANY_CHECKPOINT, st.integers(0, MOST_RANKS - 1)), _NUMBERS, max_size=20
    )
)
def test_the_report_of_a_node_is_what_the_others_have(
    shards: Mapping[tuple[Checkpoint, int], int],
) -> None:
    inventory = Inventory(_RANKS_ON)

    inventory.merge("b", _told([_record(c, owner, size) for (c, owner), size in shards.items()]))

    known = {
        (checkpoint, owner): nbytes
        for checkpoint in inventory.checkpoints
        for owner, nbytes in inventory.shards_on(checkpoint, "b").items()
    }
    assert known == shards


@pytest.mark.parametrize(
    "lineage",
    [
        *(None, {}, [1, 1, 4, -1, [], [], 0], [1, 1, -1, 5, [], [], 0], [1, 1, 0, -2, [], [], 0]),
        *([1, 1, 0, 5, [[1, 1]], [], 0], [1, 1, 0, 5, [[1, 1, "5"]], [], 0]),
        *([1, 1, 0, 5, [[0, 0, 0]] * 9, [], 0], [1, 1, 0, 5, [], [[0, 0, 0]] * 9, 0]),
        *([1, 1, 0, 5, [], [], 2], [10**20, 1, 0, 5, [], [], 0]),
    ],
    ids=str,
)
def test_a_lineage_that_cannot_be_is_refused_and_nothing_is_taken_in(lineage: Any) -> None:
    inventory = Inventory(_RANKS_ON)

    with pytest.raises(MismatchError, match="what rank 3 tells of its node's shards"):
        inventory.merge("c", [[[1, 1, 9, 1, [0], [8]]], [lineage]])

    assert not inventory.checkpoints
    assert not inventory.lineages


@pytest.mark.parametrize(
    "told",
    [
        *(None, "text", [7], [[1, 1, 5, 2, [0], [9], 0]], [[1, 1, 5, 2, [0, 1], [9]]]),
        *([[1, 1, 5, 2, [], []]], [[1, 1, 5, 2, [0, 0], [9, 9]]]),
        *([[1, 1, 5, 2, [0], [9]], [1, 1, 5, 2, [1], [9]]], [[1, 1, 10**19, 2, [0], [9]]]),
        *([[1, 1, 5, 2, [MOST_RANKS], [9]]], [[1, 1, 5, MOST_RANKS + 1, [0], [9]]]),
        *([[1, 1, True, 2, [0], [9]]], [[1, 1, 5, 2, [0], [-9]]], [[1, 1, 5, 2, [0], [9.0]]]),
    ],
    ids=str,
)
def test_a_report_that_cannot_be_read_is_refused_and_its_rank_named(told: Any) -> None:
    inventory = Inventory(_RANKS_ON)
    shards = [[1, 1, 9, 1, [0], [8]], *told] if isinstance(told, list) else told

    with pytest.raises(MismatchError, match="what rank 3 tells of its node's shards") as raised:
        inventory.merge("c", [shards, []])

    assert len(str(raised.value)) < 500
    assert not inventory.checkpoints


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 10**20) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.just("a"), inner),
    max_leaves=8,
)
_NEARLY_TOLD = st.lists(
    st.tuples(*[_NUMBERS | _JSON] * 4, *[st.lists(_NUMBERS, max_size=3) | _JSON] * 2).map(list),
    max_size=2,
).map(lambda shards: [shards, []])


@given(_JSON | _NEARLY_TOLD)
def test_every_report_is_either_refused_or_taken_as_it_is(told: Any) -> None:
    inventory = Inventory(_RANKS_ON)

    try:
        inventory.merge("a", told)
    except MismatchError:
        assert not inventory.checkpoints
        return

    heard = {
        (*c.generation, c.iteration, c.world_size, *inventory.shards_on(c, "a").items())
        for c in inventory.checkpoints
    }
    assert heard == {(*held[:4], *zip(held[4], held[5], strict=True)) for held in told[0]}


_CHANGES = st.lists(
    st.tuples(st.booleans(), _FEW_CHECKPOINTS, st.integers(0, 2), _NODES), max_size=40
)


@given(_CHANGES)
def test_an_inventory_knows_what_was_added_and_not_removed(
    changes: Sequence[tuple[bool, Checkpoint, int, str]],
) -> None:
    inventory = Inventory(_RANKS_ON)
    held: set[tuple[Checkpoint, int, str]] = set()

    for added, checkpoint, owner, node in changes:
        if added:
            inventory.add(checkpoint, owner, node, 10 + owner)
            held.add((checkpoint, owner, node))
        else:
            inventory.remove(checkpoint, Piece(owner), node)
            held.discard((checkpoint, owner, node))

    assert set(inventory.checkpoints) == {checkpoint for checkpoint, _, _ in held}
    for asked in {checkpoint for _, checkpoint, _, _ in changes}:
        of_it = {(owner, node) for checkpoint, owner, node in held if checkpoint == asked}
        owners = {owner for owner, _ in of_it}
        assert inventory.shards(asked) == {owner: 10 + owner for owner in owners}
        assert inventory.holders(asked).keys() == owners
        for owner in range(3):
            nodes = {node for node in "abc" if (owner, node) in of_it}
            assert sorted(inventory.holders(asked).get(owner, [])) == sorted(nodes)
        for node in "abc":
            there = {owner for owner in owners if (owner, node) in of_it}
            assert inventory.shards_on(asked, node) == {owner: 10 + owner for owner in there}
